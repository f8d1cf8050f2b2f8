"""What a loss worker does for the engine: loads a plugin's losses, builds one, and computes value and gradients."""

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
from twinkle_server.engine.losses.building import build_loss, watched

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
"""What the engine must know of a loss that it does not have, with the defaults of `Loss`."""
_KEPT: Final = 4
"""Losses of the latest operations that are kept."""
_LONGEST: Final = 4000
_FOLDER: Final = re.compile(r"(?<![\w.])/(?:[^\s/'\":,;]+/)+")


def import_all() -> None:
    """Read the manifests, so that every fork has them; importing this module has imported the rest."""
    torch.set_num_threads(1)
    registry().specs("loss")


class Calls:
    """Answers the engine."""

    def __init__(self) -> None:
        self._losses: dict[int, Any] = {}

    def do(self, what: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do `load`, `open` or `call`; whatever a plugin raises is an answer too."""
        try:
            answer: dict[str, Any] = getattr(self, f"_{what}")(**request)
        except BaseException as error:
            return {"error": _described(error)}
        return answer

    def _load(self, specs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Import the losses of a plugin; one that cannot be imported says so when it is opened."""
        for spec in map(_spec, specs):
            try:
                registry().load(spec)
            except TwinkleError:
                continue
        return {}

    def _open(self, operation: int, **how: Any) -> dict[str, Any]:
        loss = self._built(operation, **how)
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
        loss = self._built(operation, **how)
        leaves = {name: outputs[name].requires_grad_() for name in differentiable} if gradient else {}
        with torch.set_grad_enabled(gradient):
            given = outputs | {name: leaf.clone() for name, leaf in leaves.items()}  # a leaf cannot be written to
            answer = _answer(loss(inputs, given, **kwargs), how["spec"]["name"])
        total = answer["loss_sum"]
        if not total.requires_grad:
            return {**answer, "gradients": None}
        found = torch.autograd.grad(total.reshape(()), list(leaves.values()), allow_unused=True)
        gradients = {name: one for name, one in zip(leaves, found, strict=True) if one is not None}
        return {**answer, "gradients": gradients}

    def _built(self, operation: int, spec: Mapping[str, Any], config: Mapping[str, float | str], weighted: bool) -> Any:
        """Return the loss of an operation; the parts of an operation share one."""
        if operation not in self._losses:
            component = _spec(spec)
            loss = build_loss(component, config)
            self._losses[operation] = watched(loss, component.name) if weighted else loss
            for old in list(self._losses)[:-_KEPT]:
                del self._losses[old]
        return self._losses[operation]


def _spec(fields: Mapping[str, Any]) -> ComponentSpec:
    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    return ComponentSpec(**given)


def fields_of(spec: ComponentSpec) -> dict[str, Any]:
    """Return a spec as frames carry it."""
    return dataclasses.asdict(spec)


def _answer(raw: Any, name: str) -> dict[str, Any]:
    """Return what a loss returned as tensors and numbers, or say what is wrong with it."""
    if isinstance(raw, LossOutput):
        found: dict[str, Any] = {
            "loss_sum": raw.loss_sum,
            "denominator": float(raw.denominator),
            "metrics": {str(key): float(value) for key, value in raw.metrics.items()},
        }
    elif isinstance(raw, Mapping) and "loss" in raw:
        count = raw.get("num_tokens")
        found = {"loss_sum": raw["loss"], "num_tokens": None if count is None else float(count), "older": True}
    else:
        raise ComponentTypeError(
            f"loss {name} returned a {type(raw).__name__}; return LossOutput(loss_sum, denominator), "
            "or the older {'loss': sum, 'num_tokens': count}"
        )
    total = found["loss_sum"]
    if not isinstance(total, Tensor) or total.numel() != 1:
        what = f"shape {list(total.shape)}" if isinstance(total, Tensor) else f"a {type(total).__name__}"
        raise ComponentTypeError(f"loss_sum of loss {name} must be a scalar tensor, got {what}")
    return found


def _described(error: BaseException) -> dict[str, Any]:
    """Return an error as data: its kind, its first line without folders of this machine, and where it was raised."""
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
