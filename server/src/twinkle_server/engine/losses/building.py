"""From the name and the options of a request to a loss; the engine and its loss workers do it alike."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle import registry
from twinkle.errors import ArgumentError
from twinkle_registry import ComponentSpec
from twinkle_server.engine.errors import UserError


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
