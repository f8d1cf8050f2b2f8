"""`LoadedModel`: a Hugging Face model on this process's device, with its precision, its ranks and its patches."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from twinkle.hub import local_model
from twinkle.hub.fingerprint import commit_of, fingerprint
from twinkle.platform import Platform
from twinkle_torch.numerics import Evidence
from twinkle_transformers.backbone import Backbone
from twinkle_transformers.group import PRECISION, OptimizerGroup, check_model_id, check_model_options, new_group
from twinkle_transformers.loading import dtype_of, given_dtype, load_model
from twinkle_transformers.loss_scaler import LossScaler
from twinkle_transformers.memory import Recompute
from twinkle_transformers.parallel import load_on_ranks, parallel_of
from twinkle_transformers.router_replay import RouterReplay, SameRoutes
from twinkle_transformers.segments import recompute_contexts


class LoadedModel:
    """A Hugging Face model that was loaded for training; the arguments are those of `TransformersModel`.

    Attributes:
        module: the Hugging Face module, or the `peft.PeftModel` around it.
        backbone: the module as body and head; a patch may replace it.
        model_id: the argument of that name.
        path: local folder that the model was loaded from; None for random weights of a configuration.
        tokenizer_path: local folder of the tokenizer; None if it is unknown.
        routers: records and replays the experts of a mixture model, with `enable_router_replay`.
        base: identity of the weights: `id`, `fingerprint` of the folder, and the hub's `commit` where it has one.
        device: where the model runs.
        device_mesh: the argument of that name.
        parallel: how the parameters are distributed over ranks.
        mixed_precision: the argument of that name; "auto" is resolved.
        on_nonfinite: the argument of that name.

    Raises:
        ModelLoadError: the folder is missing, incomplete or corrupt.
        Unsupported: the mesh divides the model by other dimensions than dp and fsdp.
    """

    def __init__(
        self,
        model_cls: Any,
        model_id: str | None,
        config: Any,
        device_mesh: Any,
        mixed_precision: str,
        *,
        strategy: str = "accelerate",
        ddp_config: dict[str, Any] | None = None,
        fsdp_config: dict[str, Any] | None = None,
        grad_scaler_config: dict[str, Any] | None = None,
        memory_efficient_init: bool = False,
        gradient_checkpointing: Any = "auto",
        on_nonfinite: str = "raise",
        dtype: Any = None,
        tokenizer_id: str | None = None,
        enable_router_replay: bool = False,
        **kwargs: Any,
    ) -> None:
        dtype = given_dtype(dtype, kwargs)
        if mixed_precision == "auto":
            half = dtype is not None and dtype_of(dtype) != torch.float32
            # weights of a half type are never trained as they are unless that is asked for
            mixed_precision = "bf16" if half or Platform.computes_bfloat16() else "no"
        check_model_options(mixed_precision, strategy, on_nonfinite, grad_scaler_config)
        check_model_id(model_id, model_cls, config, kwargs)
        self.model_id = "" if model_id is None else str(model_id)
        self.device_mesh = device_mesh
        self.mixed_precision = mixed_precision
        self.on_nonfinite = on_nonfinite
        self.device = torch.device(Platform.get_local_device())
        self.parallel = parallel_of(device_mesh, ddp_config, fsdp_config)
        self._gradient_checkpointing = gradient_checkpointing
        self._scaler_options: Mapping[str, Any] | None = grad_scaler_config
        dtype = dtype or ("float32" if mixed_precision == "no" else "auto")
        # A model that will be sharded is loaded into host memory and moved to the device layer by layer.
        device = None if self.parallel.in_lockstep else self.device
        load = functools.partial(
            load_model, self.model_id or None, dtype=dtype, model_cls=model_cls, config=config, device=device,
            other_arguments=_ARGUMENTS, **kwargs,
        )  # fmt: skip
        module, self.path, self.backbone = load_on_ranks(load, self.parallel, memory_efficient_init)
        self.module: Any = module
        self._unpatched: Backbone | None = None
        self.backbone.segmenter.precision = self.autocast
        self.tokenizer_path = self.path if tokenizer_id is None else local_model(tokenizer_id)
        self.routers = self._find_routers() if enable_router_replay else None
        self.base: Mapping[str, Any] = {
            "id": self.model_id,
            "fingerprint": None if self.path is None else fingerprint(self.path),
            "commit": None if self.path is None else commit_of(self.path),
        }

    def _find_routers(self) -> RouterReplay:
        with self.autocast():
            return RouterReplay.of(self.backbone.model, check=not self.parallel.in_lockstep)

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Return the context in which forwards of this model run: mixed precision, if it is on."""
        dtype = PRECISION[self.mixed_precision]
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            yield

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of matrix products."""
        dtype: torch.dtype = PRECISION[self.mixed_precision] or self.module.dtype
        return dtype

    def evidence(self) -> list[Evidence]:
        """Return the measurements of the fast paths of this model; missing ones are made first."""
        return list(self.backbone.segmenter.measured().values())

    def new_group(self, name: str) -> OptimizerGroup:
        """Return the initial training state of an adapter; the full model has the name `""`."""
        group = new_group(name, self.device_mesh, self.parallel.ranks.control)
        if self.mixed_precision == "fp16":
            group.loss_scale = LossScaler.from_config(self._scaler_options)
        return group

    def new_recompute(self, forward: Callable[[dict[str, Tensor]], object]) -> Recompute:
        """Return what decides on recomputation of activations; `forward` is that of `Recompute`."""
        return Recompute(
            self.backbone.model, self._gradient_checkpointing, self.device, _recompute_contexts,
            forward=forward, agree=self.parallel.any_rank if self.parallel.in_lockstep else None,
        )  # fmt: skip

    def apply_patch(self, patch_cls: Any, kwargs: Mapping[str, Any]) -> None:
        """Apply a patch to the module; see `twinkle.patch.apply_patch`."""
        from twinkle.patch import apply_patch

        causal = self.backbone.model
        before = causal.forward
        apply_patch(self.module, patch_cls, **kwargs)
        if causal.forward != before:  # the patch computes the logits: body and head cannot be called separately
            self.backbone, self._unpatched = replace(self.backbone, splits=False), self.backbone
        self._forget_measurements()

    def undo_patch(self, patch_cls: Any) -> None:
        """Undo a patch that `apply_patch` applied, also one from before the first adapter was added."""
        from twinkle.patch import is_applied, undo_patch

        causal = self.backbone.model
        before = causal.forward
        undo_patch(causal if is_applied(causal, patch_cls) else self.module, patch_cls)
        if causal.forward != before and self._unpatched is not None:
            self.backbone, self._unpatched = self._unpatched, None
        self._forget_measurements()

    def _forget_measurements(self) -> None:
        if not self.parallel.in_lockstep:  # one rank of a sharded model cannot run the model to measure again
            self.backbone.segmenter.forget()


def _recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a forward and of its recomputation, which sees the same segments and experts."""
    forward, again = recompute_contexts()
    return forward, SameRoutes(again)


_ARGUMENTS = (
    *(name for name in inspect.signature(LoadedModel.__init__).parameters if name not in ("self", "kwargs")),
    "share_prefixes",
)
"""Arguments of the models of this package, which the error about an unknown argument may suggest."""
