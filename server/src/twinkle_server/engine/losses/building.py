"""Conversion of a request into rows of the model, inputs of the loss, and the loss itself.

Errors name the datum and the key. The engine and its loss workers build a loss in the same way, from its name and
options. Weights are never silently ignored: a published loss multiplies by them; other losses know labels without a
target (-100), and optionally the batch's `loss_scale`.
"""

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from twinkle import registry
from twinkle.errors import ArgumentError
from twinkle_registry import ComponentSpec
from twinkle_server.engine.errors import UserError
from twinkle_server.engine.native.components import check_bound
from twinkle_server.wire import codec, provenance
from twinkle_server.wire import tinker_pb2 as pb
from twinkle_server.wire.codec import Array

TARGETS: Final = "target_tokens"
WEIGHTS: Final = "weights"
SEQUENCES: Final = "sampled_sequence"
"""Input of a loss that is derived from the provenance spans of a datum, not from a `loss_fn_input`."""
NAMES: Final[Mapping[str, str]] = {"logprobs": "old_logps"}
"""Names of inputs in losses, by their names in requests, where they differ."""
MAX_TARGETS: Final = 1024
"""Maximum number of targets per position."""
MAX_CELLS: Final = 2**24
"""Maximum number of values of all inputs of a request, sparse arrays counted as dense."""
WIRE_NAMES: Final[Mapping[str, str]] = {own: wire for wire, own in NAMES.items()}
REWARDS: Final = "rewards"
"""Input that every loss accepts and none gets unless it takes it: the reward of the row, or of each token, to show."""
NOTED: Final[Sequence[str]] = ("logprobs", "advantages", "mask", REWARDS)
"""Inputs that tell how a row was sampled; see `Rows.noted`."""


@dataclass(slots=True)
class Rows:
    """The training data of a request.

    Attributes:
        features: rows for the engine: `input_ids`, `labels` `[N]` or `[N, K]`, and `loss_scale` of the same shape.
        inputs: the other inputs by their names in losses, an array per row; every row has the same names.
        shapes: shape of each row's `target_tokens`.
        noted: for each row, those inputs of the request that are in `NOTED`, also if the loss ignores them.
    """

    features: list[dict[str, Any]] = field(default_factory=list)
    inputs: dict[str, list[Array]] = field(default_factory=dict)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    noted: list[dict[str, Array]] = field(default_factory=list)


def read_request(payload: bytes) -> pb.ForwardBackwardRequest:
    """Parse the request of a pass.

    Raises:
        UserError: the bytes are not a valid request.
    """
    try:
        return codec.parse_request(payload)
    except ValueError as error:
        raise UserError(str(error)) from error


def read_rows(
    request: pb.ForwardBackwardRequest,
    context: int,
    vocabulary: int,
    accepted: Sequence[str],
    ignored: Collection[str] = (),
    spans: bool = False,
) -> Rows:
    """Read and check the rows of a request. Rows without `weights` among rows with them get weights of 1.

    Args:
        request: the request.
        context: maximum number of tokens of a row.
        vocabulary: number of token ids.
        accepted: names of the inputs that the loss takes, for errors.
        ignored: names of inputs that are dropped.
        spans: whether the loss takes the input `SEQUENCES`, derived from the provenance spans of each datum.

    Raises:
        UserError: there are no rows, or one is invalid; the message names the datum, the key and the numbers.
    """
    if not request.data:
        raise UserError("data must contain at least one datum")
    rows = Rows()
    keys: set[str] | None = None
    remaining = MAX_CELLS
    for number, datum in enumerate(request.data):
        where = f"datum {number}"
        try:
            tokens = codec.datum_tokens(datum)
            inputs = codec.datum_inputs(datum, min(remaining, MAX_TARGETS * len(tokens)))
        except ValueError as error:
            raise UserError(f"{where}: {error}") from error
        remaining -= sum(array.size for array in inputs.values())
        if remaining < 0:
            raise UserError(
                f"{where}: the loss_fn_inputs of a request must have at most {MAX_CELLS} numbers; send fewer datums"
            )
        _check_tokens(where, tokens, context, vocabulary)
        noted = {name: inputs[name] for name in NOTED if name in inputs}
        inputs = {name: array for name, array in inputs.items() if name not in ignored}
        if REWARDS not in accepted and (rewards := inputs.pop(REWARDS, None)) is not None:
            _check_rewards(where, rewards, len(tokens))
        if spans and SEQUENCES in inputs:
            raise UserError(
                f"{where}: cannot use the loss_fn_input {SEQUENCES!r}: it is derived from the provenance spans of the "
                "datum; remove it"
            )
        named = inputs.keys() - {WEIGHTS}
        if keys is not None and named != keys:
            differing = sorted(named ^ keys)[0]
            raise UserError(
                f"{where}: some datums have the loss_fn_input {differing!r} and others do not; all must have the same "
                f"(loss_fn {request.loss_fn!r} takes {', '.join(accepted)})"
            )
        keys = set(named)
        _add(rows, where, tokens, inputs, vocabulary)
        rows.noted.append(noted)
        if spans:
            rows.inputs.setdefault(SEQUENCES, []).append(_sequences(where, datum, tokens, rows.shapes[-1]))
    _fill_weights(rows)
    if any(len(shape) == 2 for shape in rows.shapes):
        _check_padded_size(rows)
    return rows


def _fill_weights(rows: Rows) -> None:
    if any("loss_scale" in feature for feature in rows.features):
        for feature, shape in zip(rows.features, rows.shapes, strict=True):
            feature.setdefault("loss_scale", np.ones(shape, np.float32))


def _sequences(where: str, datum: pb.Datum, tokens: Array, shape: tuple[int, ...]) -> Array:
    """Return the input `SEQUENCES` of a datum, shape `[N]`."""
    if len(shape) != 1:
        raise UserError(
            f"{where}: {TARGETS} must have one target per position with provenance spans, got {list(shape)}"
        )
    try:
        spans = provenance.target_spans(datum, shape[0])
        provenance.check_input_spans(datum, len(tokens))
        return provenance.sequence_numbers(spans, shape[0])
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


def _check_padded_size(rows: Rows) -> None:
    """Refuse rows that become too large when padded to the width of the widest."""
    width = max(shape[1] if len(shape) == 2 else 1 for shape in rows.shapes)
    if width * sum(shape[0] for shape in rows.shapes) > MAX_CELLS:
        raise UserError(
            f"some datums have {width} targets per position; padded to this width, the request exceeds {MAX_CELLS} "
            "numbers; send datums with fewer targets in a separate request"
        )


def _check_tokens(where: str, tokens: Array, context: int, vocabulary: int) -> None:
    if not len(tokens):
        raise UserError(f"{where}: model_input must have at least one token")
    if len(tokens) > context:
        raise UserError(
            f"{where}: model_input must have at most {context} tokens (the model's context), got {len(tokens)}"
        )
    _check_ids(f"{where}: model_input", tokens, vocabulary)


def _check_ids(what: str, tokens: Array, vocabulary: int) -> None:
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        wrong = tokens[(tokens < 0) | (tokens >= vocabulary)][0]
        raise UserError(f"tokens of {what} must be between 0 and {vocabulary - 1}, got {wrong}")


def _add(rows: Rows, where: str, tokens: Array, inputs: Mapping[str, Array], vocabulary: int) -> None:
    targets = inputs.get(TARGETS)
    if targets is None:
        raise UserError(f"{where}: the loss_fn_input {TARGETS!r} is required, got {sorted(inputs) or 'none'}")
    if targets.dtype.kind not in "iu":
        raise UserError(f"{where}: {TARGETS} must contain integers (int64), got {targets.dtype}")
    if targets.ndim not in (1, 2) or len(targets) != len(tokens) or not targets.size:
        raise UserError(
            f"{where}: {TARGETS} must have one target (or K targets) for each of the {len(tokens)} tokens of "
            f"model_input, got the shape {list(targets.shape)}"
        )
    if targets.ndim == 2 and targets.shape[1] > MAX_TARGETS:
        raise UserError(
            f"{where}: {TARGETS} must have at most {MAX_TARGETS} targets per position, got {targets.shape[1]}"
        )
    _check_ids(f"{where}: {TARGETS}", targets, vocabulary)
    feature: dict[str, Any] = {"input_ids": tokens.astype(np.int64), "labels": targets.astype(np.int64)}
    for name, values in inputs.items():
        if name == TARGETS:
            continue
        _check_finite(where, name, values)
        if name == WEIGHTS:
            if values.shape != targets.shape:
                raise UserError(
                    f"{where}: {WEIGHTS} must have the shape {list(targets.shape)} of {TARGETS}, "
                    f"got {list(values.shape)}"
                )
            feature["loss_scale"] = values.astype(np.float32)
        else:
            rows.inputs.setdefault(NAMES.get(name, name), []).append(values.copy())  # a view would keep the message
    rows.features.append(feature)
    rows.shapes.append(targets.shape)


def _check_rewards(where: str, rewards: Array, length: int) -> None:
    if rewards.shape not in ((), (1,), (length,)):
        raise UserError(
            f"{where}: {REWARDS} must have one number for the row, or one for each of its {length} tokens, got the "
            f"shape {list(rewards.shape)}"
        )
    _check_finite(where, REWARDS, rewards)


def _check_finite(where: str, name: str, values: Array) -> None:
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        at = int(np.flatnonzero(~np.isfinite(values))[0])
        raise UserError(f"{where}: {name} must be finite, got {values.reshape(-1)[at]} at {at}")


def build_loss(spec: ComponentSpec, config: Mapping[str, Any]) -> Any:
    """Build a loss for one operation.

    Raises:
        UserError: an option is invalid.
    """
    for option, value in config.items():
        check_bound("loss_fn", spec.name, option, value)
    options = _options(spec, config)
    try:
        component = registry().resolve(spec, "loss")
        if not isinstance(component, type):
            return _function(spec, component, options)
        loss = registry().build(component, "loss", **options)
    except ArgumentError as error:
        raise UserError(f"loss_fn {spec.name!r}: loss_fn_config: {error}") from error
    loss.row_inputs = with_inputs(getattr(loss, "row_inputs", ()), spec)
    return loss


def with_inputs(row_inputs: Sequence[str], spec: ComponentSpec) -> tuple[str, ...]:
    """Return the arguments with one entry per row: those that a loss names, and those that its manifest declares."""
    return tuple(dict.fromkeys((*row_inputs, *spec.inputs)))


def _function(spec: ComponentSpec, function: Any, options: Mapping[str, Any]) -> Any:
    if options:
        raise UserError(f"loss_fn {spec.name!r} has no options; remove {sorted(options)[0]!r} from loss_fn_config")
    return function


def _options(spec: ComponentSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the loss's constructor, validated by the declared model of its options."""
    if not spec.config or not config:
        return dict(config)
    from pydantic import BaseModel, ValidationError  # slow: a quarter of an engine's start without torch

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


def enforce_weights(loss: Any, name: str, rows: Rows) -> Any:
    """Remove targets of weight 0 from the rows, and return a loss that fails if it ignored other weights.

    Args:
        loss: an object or function used only for this operation.
        name: its name in the request.
        rows: of the request; their labels are changed.
    """
    return require_weights(loss, name) if mask_weightless(rows) else loss


def mask_weightless(rows: Rows) -> bool:
    """Remove targets of weight 0 from the labels; return whether weights other than 0 and 1 remain."""
    weights = [feature[_SCALE] for feature in rows.features if _SCALE in feature]
    for feature in rows.features:
        if _SCALE in feature:
            feature[_LABELS] = np.where(feature[_SCALE] == 0, _NO_TARGET, feature[_LABELS])
    return not all(np.isin(values, (0.0, 1.0)).all() for values in weights)


def require_weights(loss: Any, name: str) -> Any:
    """Return a loss that fails if it does not read the weights of the batch."""
    if not isinstance(loss, type) and hasattr(loss, "__name__"):
        return _require_weights(loss, name, place=0)
    kind = type(loss)
    loss.__class__ = type(
        kind.__name__, (kind,), {"__slots__": (), "__call__": _require_weights(kind.__call__, name, place=1)}
    )
    return loss


def _require_weights(call: Any, name: str, place: int) -> Any:
    """Return a callable that fails if the weights of its batch were not read."""

    @functools.wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        batch = _Batch(args[place])
        result = call(*args[:place], batch, *args[place + 1 :], **kwargs)
        if not batch.read:
            raise ArgumentError(
                f"loss_fn {name!r} only accepts the weights 0 (no target) and 1, got other values; change them or "
                "remove weights"
            )
        return result

    return checked


class _Batch(dict[str, Any]):
    """A batch that records whether its weights were read."""

    read = False

    def __getitem__(self, key: str) -> Any:
        self.read = self.read or key == _SCALE
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read = self.read or key == _SCALE
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        self.read = True  # an iteration over all keys includes the weights
        return super().__iter__()
