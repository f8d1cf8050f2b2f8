"""From the name, the options and the weights of a request to a loss; the engine and its loss workers do it alike.

Weights are never silently ignored. A published loss multiplies by them literally. Other losses know labels that are no
target (-100), and perhaps the batch's `loss_scale`.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from twinkle import registry
from twinkle.errors import ArgumentError
from twinkle_registry import ComponentSpec
from twinkle_server.engine.errors import UserError
from twinkle_server.engine.rows import Rows


def build_loss(spec: ComponentSpec, config: Mapping[str, float | str]) -> Any:
    """Return a loss for one operation, its options checked.

    Raises:
        UserError: an option is wrong.
    """
    options = _options(spec, config)
    try:
        found = registry().resolve(spec, "loss")
        if not isinstance(found, type):
            return _function(spec, found, options)
        loss = registry().build(found, "loss", **options)
    except ArgumentError as error:
        raise UserError(f"loss_fn {spec.name!r}: loss_fn_config: {error}") from error
    loss.row_inputs = with_inputs(getattr(loss, "row_inputs", ()), spec)
    return loss


def with_inputs(row_inputs: Sequence[str], spec: ComponentSpec) -> tuple[str, ...]:
    """Return the arguments with an entry a row: those that a loss names, and those that its manifest declares."""
    return tuple(dict.fromkeys((*row_inputs, *spec.inputs)))


def _function(spec: ComponentSpec, found: Any, options: Mapping[str, Any]) -> Any:
    if options:
        raise UserError(f"loss_fn {spec.name!r} has no options; remove {sorted(options)[0]!r} from loss_fn_config")
    return found


def _options(spec: ComponentSpec, config: Mapping[str, float | str]) -> dict[str, Any]:
    """Return the arguments of the loss's constructor; a declared model of its options checks them first."""
    if not spec.config or not config:
        return dict(config)
    from pydantic import BaseModel, ValidationError  # a quarter of the start of an engine without torch

    try:
        model = registry().load(dataclasses.replace(spec, ref=spec.config))
        if isinstance(model, type) and issubclass(model, BaseModel):
            return model.model_validate(dict(config)).model_dump(exclude_unset=True)
        model(**config)
    except ValidationError as error:
        what = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:4])
        raise UserError(f"loss_fn {spec.name!r}: loss_fn_config: {what}") from error
    except (ArgumentError, TypeError, ValueError) as error:
        raise UserError(f"loss_fn {spec.name!r}: loss_fn_config: {error}") from error
    return dict(config)


_SCALE, _LABELS, _NO_TARGET = "loss_scale", "labels", -100


def honoured(loss: Any, name: str, rows: Rows) -> Any:
    """Take the targets of weight 0 out of the rows, and return a loss that fails if it ignores other weights.

    Args:
        loss: an object or function of its own for this operation.
        name: what the request calls it.
        rows: of the request; their labels are changed.
    """
    return watched(loss, name) if mask_weightless(rows) else loss


def mask_weightless(rows: Rows) -> bool:
    """Take the targets of weight 0 out of the labels, and return whether other weights than 0 and 1 remain."""
    weights = [feature[_SCALE] for feature in rows.features if _SCALE in feature]
    for feature in rows.features:
        if _SCALE in feature:
            feature[_LABELS] = np.where(feature[_SCALE] == 0, _NO_TARGET, feature[_LABELS])
    return not all(np.isin(values, (0.0, 1.0)).all() for values in weights)


def watched(loss: Any, name: str) -> Any:
    """Return a loss that fails where it does not read the weights of the batch."""
    if not isinstance(loss, type) and hasattr(loss, "__name__"):
        return _watched(loss, name, place=0)
    kind = type(loss)
    loss.__class__ = type(kind.__name__, (kind,), {"__slots__": (), "__call__": _watched(kind.__call__, name, place=1)})
    return loss


def _watched(call: Any, name: str, place: int) -> Any:
    """Return a loss's call that fails where the batch's weights were not read."""

    @functools.wraps(call)
    def watched(*args: Any, **kwargs: Any) -> Any:
        batch = _Batch(args[place])
        result = call(*args[:place], batch, *args[place + 1 :], **kwargs)
        if not batch.read:
            raise ArgumentError(
                f"loss_fn {name!r} only accepts the weights 0 (no target) and 1, got other values; change them or "
                "remove weights"
            )
        return result

    return watched


class _Batch(dict[str, Any]):
    """A batch that notes whether its weights were looked at."""

    read = False

    def __getitem__(self, key: str) -> Any:
        self.read = self.read or key == _SCALE
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read = self.read or key == _SCALE
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        self.read = True  # whoever goes through all of it has them, too
        return super().__iter__()
