"""Calls that a loss worker handles: loading a plugin's losses, building one, and computing value and gradients."""

import dataclasses
import inspect
import random
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

import twinkle.errors
from twinkle import registry
from twinkle.data_format import LossOutput
from twinkle.errors import ComponentTypeError, TwinkleError
from twinkle_registry import ComponentSpec
from twinkle_server.engine.errors import UserError
from twinkle_server.engine.losses.building import build_loss, require_weights

ATTRIBUTES: Final[Mapping[str, Any]] = {
    "require_logps": True,
    "require_entropy": False,
    "require_uniform_logps": False,
    "require_logits": False,
    "chunk_tokens": None,
    "softcap": None,
    "skips_weight_zero": False,
    "splittable": True,
    "rows_together": 1,
    "row_inputs": (),
    "group_inputs": (),
}
"""Attributes of a loss that the engine needs, with the defaults of `Loss`."""
_KEPT: Final = 4
"""Number of losses that are kept, those of the latest operations."""
_LONGEST: Final = 4000
_FOLDER: Final = re.compile(r"(?<![\w.])/(?:[^\s/'\":,;]+/)+")


def import_all() -> None:
    """Read the manifests before forking; importing this module has imported everything else."""
    torch.set_num_threads(1)
    registry().specs("loss")


class Calls:
    """Handles the calls of the engine."""

    def __init__(self) -> None:
        self._losses: dict[int, Any] = {}

    def do(self, what: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Handle `load`, `open` or `call`; an exception of a plugin is returned as data."""
        try:
            response: dict[str, Any] = getattr(self, f"_{what}")(**request)
        except BaseException as error:
            return {"error": _error_fields(error)}
        return response

    def _load(self, specs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Import the losses of a plugin; a failed import is reported when the loss is opened."""
        for spec in map(_spec, specs):
            try:
                registry().load(spec)
            except TwinkleError:
                continue
        return {}

    def _open(self, operation: int, **how: Any) -> dict[str, Any]:
        loss = self._build(operation, **how)
        parameters = [
            [name, str(parameter.kind.name), parameter.default is parameter.empty]
            for name, parameter in inspect.signature(loss).parameters.items()
        ]
        attributes = {name: getattr(loss, name, default) for name, default in ATTRIBUTES.items()}
        return {"name": getattr(loss, "__name__", type(loss).__name__), "parameters": parameters, **attributes}

    def _call(
        self, operation: int, seed: int, gradient: bool, threads: int,
        inputs: dict[str, Any], outputs: dict[str, Any], differentiable: Sequence[str], kwargs: dict[str, Any],
        **how: Any,
    ) -> dict[str, Any]:  # fmt: skip
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        loss = self._build(operation, **how)
        leaves = {name: outputs[name].requires_grad_() for name in differentiable} if gradient else {}
        with torch.set_grad_enabled(gradient):
            given = outputs | {name: leaf.clone() for name, leaf in leaves.items()}  # losses may write in place
            result = _check_result(loss(inputs, given, **kwargs), how["spec"]["name"])
        total = result["loss_sum"]
        if not total.requires_grad:
            return {**result, "gradients": None}
        grads = torch.autograd.grad(total.reshape(()), list(leaves.values()), allow_unused=True)
        gradients = {name: grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}
        return {**result, "gradients": gradients}

    def _build(self, operation: int, spec: Mapping[str, Any], config: Mapping[str, float | str], weighted: bool) -> Any:
        """Return the loss of an operation; the micro-batches of an operation share one."""
        if operation not in self._losses:
            component = _spec(spec)
            loss = build_loss(component, config)
            self._losses[operation] = require_weights(loss, component.name) if weighted else loss
            for old in list(self._losses)[:-_KEPT]:
                del self._losses[old]
        return self._losses[operation]


def _spec(fields: Mapping[str, Any]) -> ComponentSpec:
    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    return ComponentSpec(**given)


def fields_of(spec: ComponentSpec) -> dict[str, Any]:
    """Return a spec as fields of a frame."""
    return dataclasses.asdict(spec)


def _check_result(raw: Any, name: str) -> dict[str, Any]:
    """Return the result of a loss as tensors and numbers; raise if it is invalid."""
    if isinstance(raw, LossOutput) and not raw.is_mean:
        result: dict[str, Any] = {
            "loss_sum": raw.loss_sum,
            "denominator": float(raw.denominator),
            "metrics": {str(key): float(value) for key, value in raw.metrics.items()},
        }
    elif isinstance(raw, Mapping) and "loss" in raw:
        count = raw.get("num_tokens")
        result = {"loss_sum": raw["loss"], "num_tokens": None if count is None else float(count), "older": True}
    else:
        raise ComponentTypeError(
            f"loss {name} returned a {type(raw).__name__}; return LossOutput(loss_sum, denominator), "
            "or the older {'loss': sum, 'num_tokens': count}"
        )
    total = result["loss_sum"]
    if not isinstance(total, Tensor) or total.numel() != 1:
        what = f"shape {list(total.shape)}" if isinstance(total, Tensor) else f"a {type(total).__name__}"
        raise ComponentTypeError(f"loss_sum of loss {name} must be a scalar tensor, got {what}")
    return result


def _error_fields(error: BaseException) -> dict[str, Any]:
    """Return an error as data: its type, its first line without folders of this machine, and its traceback."""
    ours = isinstance(error, TwinkleError | UserError)
    text = str(error) if ours else (str(error).splitlines() or [""])[0][:300]
    where = "".join(traceback.format_exception(error))[-_LONGEST:]
    return {
        "type": type(error).__name__,
        "text": _FOLDER.sub("…/", text)[:_LONGEST],
        "own": ours and (isinstance(error, UserError) or hasattr(twinkle.errors, type(error).__name__)),
        "key": error.args[0] if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str) else None,
        "memory": isinstance(error, MemoryError) or "can't allocate memory" in str(error),
        "log": where,
    }
