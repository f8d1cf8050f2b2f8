"""`CheckpointEngineManager`: copies a trainer's weights to a sampler."""

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from twinkle.checkpoint_engine.mixin import CheckpointEngineMixin
from twinkle.errors import ArgumentError
from twinkle.platform import Platform

_HERE = "InProcessCheckpointEngine"
_ELSEWHERE = {"GPU": "NCCLCheckpointEngine", "CUDA": "NCCLCheckpointEngine", "NPU": "HCCLCheckpointEngine"}


class CheckpointEngineManager:
    """Copies the weights of a model to a sampler.

    The model must have `send_weights` and `get_peft_config_dict`; the sampler must have `receive_weights`,
    `get_state_keys` and `count_base_writes`; both must have the methods of `CheckpointEngineMixin`. A sampler that can
    share the module of a live model has `shares_weights(model)` and `publish_adapter(adapter_name)`. Instead of all
    these, a model whose weights do not pass through this process has `sync_sampler(sampler, adapter_name)`.
    """

    def __init__(self, model: Any, sampler: Any, platform: str = "GPU", *, engine: Any = None) -> None:
        """Store both; each sync connects them while it runs.

        Args:
            model: the sender.
            sampler: the receiver.
            platform: platform of the devices; selects the engine if model and sampler live in other processes.
            engine: any form of component argument. By default `InProcessCheckpointEngine` if both live in this process,
                else that of the platform (`NCCLCheckpointEngine`, `HCCLCheckpointEngine`).

        Raises:
            ArgumentError: the model cannot send, or the sampler cannot receive.
            MeshError: the platform is unknown.
        """
        Platform.get(platform)
        elsewhere = hasattr(model, "sync_sampler")
        for what, value, method in (("model", model, "send_weights"), ("sampler", sampler, "receive_weights")):
            if not elsewhere and not hasattr(value, method):
                raise ArgumentError(
                    f"CheckpointEngineManager: {what} is a {type(value).__name__}, which has no {method}; give a "
                    f"{what} such as {'TransformersModel' if what == 'model' else 'TorchSampler'}"
                )
        self.model, self.sampler, self.platform = model, sampler, platform
        here = isinstance(model, CheckpointEngineMixin) and isinstance(sampler, CheckpointEngineMixin)
        self.engine = engine or (_HERE if here else _ELSEWHERE.get(platform.strip().upper(), _HERE))
        self._base: int | None = None  # count of writes to the sampler's base at the last base sync

    def sync_weights(self, merge_and_sync: bool = True, *, adapter_name: str | None = None) -> None:
        """Make the sampler use the present weights of the model, until the next sync.

        A sampler with its own weights gets all weights with the adapter merged into them, or (with
        `merge_and_sync=False`) the base once and then only the adapter, which becomes the default adapter of its rows.
        A model without adapter sends all weights. The model is never written, and the sampler only after all weights
        have arrived and been checked. A sampler that shares the model's module publishes the present adapter,
        independent of `merge_and_sync`; the shared base is not changed. So does the model of a service: weights stay
        there, and the sampler uses a checkpoint of the adapter.

        Args:
            merge_and_sync: merge the adapter into the weights that are sent.
            adapter_name: the adapter; by default the model's active one. Required for a model with many adapters.

        Raises:
            ArgumentError: names, shapes or dtypes differ, or the model does not have the adapter.
            Unsupported: the adapter cannot be merged, or cannot be sent alone; the message says what to do.
        """
        sync = getattr(self.model, "sync_sampler", None)
        if sync is not None:
            sync(self.sampler, adapter_name)
            return
        shares = getattr(self.sampler, "shares_weights", None)
        if shares is not None and shares(self.model):
            self.sampler.publish_adapter(adapter_name)
            return
        config = self.model.get_peft_config_dict(adapter_name)
        merges = merge_and_sync or config is None
        base_is_there = not merges and self._base is not None and self._base == self.sampler.count_base_writes()
        names = {"adapter_name": adapter_name, "base_sync_done": base_is_there}
        keys = None if base_is_there else self.sampler.get_state_keys()
        send = partial(self.model.send_weights, merge_and_sync=merges, model_keys=keys, **names)
        receive = partial(self.sampler.receive_weights, peft_config=None if merges else config, **names)
        self._base = None
        try:
            self._connect()
            self._both(receive, send)
        finally:
            self._part()
        if not merges:
            self._base = self.sampler.count_base_writes()

    def _part(self) -> None:
        self.model.finalize_checkpoint_engine()
        self.sampler.finalize_checkpoint_engine()

    def _connect(self) -> None:
        from twinkle._registry import registry

        sides = (self.model, self.sampler)
        metadata = [side.prepare_checkpoint_engine(self.engine) for side in sides]
        engine: Any = registry().resolve(self.engine, "checkpoint_engine")
        for side, part in zip(sides, engine.build_topology(1, 1, metadata), strict=True):
            side.init_checkpoint_process_group(**{name: values[0] for name, values in part.items()})

    def _both(self, *calls: Callable[[], None]) -> None:
        """Run calls that wait for each other concurrently; if one fails, stop the other and raise the first error."""
        with ThreadPoolExecutor(len(calls), thread_name_prefix="twinkle-sync") as pool:
            running: list[Future[None]] = [pool.submit(call) for call in calls]
            done, waiting = wait(running, return_when=FIRST_EXCEPTION)
            failed = next((error for future in done if (error := future.exception()) is not None), None)
            if failed is not None and waiting:
                self._part()
        if failed is not None:
            raise failed
