"""`CheckpointEngineManager`: brings a trainer's weights to a sampler."""

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
    """Brings the weights of a model to a sampler, as often as asked.

    What it asks of both is little, so that other backends fill it: of the model `send_weights` and
    `get_peft_config_dict`, of the sampler `receive_weights`, `get_state_keys` and `count_base_writes`, of both
    `CheckpointEngineMixin`. A sampler that may share the module of a live model says so by `shares_weights(model)`, and
    publishes an adapter by `publish_adapter(adapter_name)`.
    """

    def __init__(self, model: Any, sampler: Any, platform: str = "GPU", *, engine: Any = None) -> None:
        """Remember both; a sync connects them for as long as it takes.

        Args:
            model: sends.
            sampler: receives.
            platform: of the devices; chooses the engine where model and sampler live in other processes.
            engine: any form of component argument. By default `InProcessCheckpointEngine` where both are here, else
                the platform's (`NCCLCheckpointEngine`, `HCCLCheckpointEngine`).

        Raises:
            ArgumentError: one of them cannot send, or receive.
            MeshError: the platform is unknown.
        """
        Platform.get(platform)
        for what, value, method in (("model", model, "send_weights"), ("sampler", sampler, "receive_weights")):
            if not hasattr(value, method):
                raise ArgumentError(
                    f"CheckpointEngineManager: {what} is a {type(value).__name__}, which has no {method}; give a "
                    f"{what} such as {'TransformersModel' if what == 'model' else 'TorchSampler'}"
                )
        self.model, self.sampler, self.platform = model, sampler, platform
        here = isinstance(model, CheckpointEngineMixin) and isinstance(sampler, CheckpointEngineMixin)
        self.engine = engine or (_HERE if here else _ELSEWHERE.get(platform.strip().upper(), _HERE))
        self._base: int | None = None  # the sampler's count of writes to its base, where that is the model's own

    def sync_weights(self, merge_and_sync: bool = True, *, adapter_name: str | None = None) -> None:
        """Let the sampler sample with the model's weights as they are now, until the next sync.

        A sampler with weights of its own gets either everything, the adapter merged into it, or (False) the base once
        and then the adapter alone, as the one that rows have by default. Where the model has no adapter all weights go
        over. Nothing of the model is written, not even for a moment, and of the sampler nothing until all has arrived
        and been compared. A sampler that shares the model's module publishes the adapter as it is now, whatever
        `merge_and_sync` says: the shared base is not touched.

        Args:
            merge_and_sync: merge the adapter into the weights that are sent.
            adapter_name: which adapter; by default the model's active one. Needed where many share a model.

        Raises:
            ArgumentError: names, shapes or dtypes differ, or an adapter is named that the model does not have.
            Unsupported: the adapter cannot be merged, or not be sent alone; it says what can be done.
        """
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
        """Make calls that wait for each other at the same time; if one fails, the other is told and its error kept."""
        with ThreadPoolExecutor(len(calls), thread_name_prefix="twinkle-sync") as pool:
            running: list[Future[None]] = [pool.submit(call) for call in calls]
            done, waiting = wait(running, return_when=FIRST_EXCEPTION)
            failed = next((error for future in done if (error := future.exception()) is not None), None)
            if failed is not None and waiting:
                self._part()
        if failed is not None:
            raise failed
