"""From a pass's message to rows of the model, arguments of the loss, and the loss itself.

What is wrong is said with key and numbers. The engine and its loss workers build a loss alike, from its name and
options. Weights are never silently ignored: a published loss multiplies by them literally; other losses know labels
that are no target (-100), and perhaps the batch's `loss_scale`.
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
from twinkle_server.wire import codec, provenance
from twinkle_server.wire import tinker_pb2 as pb
from twinkle_server.wire.codec import Array

TARGETS: Final = "target_tokens"
WEIGHTS: Final = "weights"
SEQUENCES: Final = "sampled_sequence"
"""Input of a loss that is read from the provenance spans of a datum, and from no `loss_fn_input`."""
NAMES: Final[Mapping[str, str]] = {"logprobs": "old_logps"}
"""What losses call an input that the wire calls otherwise."""
MOST_TARGETS: Final = 1024
"""Targets of one position."""
MOST_CELLS: Final = 2**24
"""Numbers of all inputs of a request, sparse ones written out."""
WIRE_NAMES: Final[Mapping[str, str]] = {own: wire for wire, own in NAMES.items()}


@dataclass(slots=True)
class Rows:
    """What a request trains on.

    Attributes:
        features: rows as the pool takes them: `input_ids`, `labels` `[N]` or `[N, K]`, `loss_scale` likewise.
        inputs: the other inputs of the loss by its own names, an array a row; every row has the same names.
        shapes: of each row's `target_tokens`.
    """

    features: list[dict[str, Any]] = field(default_factory=list)
    inputs: dict[str, list[Array]] = field(default_factory=dict)
    shapes: list[tuple[int, ...]] = field(default_factory=list)


def read_request(payload: bytes) -> pb.ForwardBackwardRequest:
    """Return a pass's request.

    Raises:
        UserError: the bytes are none.
    """
    try:
        return codec.parse_request(payload)
    except ValueError as error:
        raise UserError(str(error)) from error


def read_rows(
    request: pb.ForwardBackwardRequest,
    context: int,
    vocabulary: int,
    takes: Sequence[str],
    ignores: Collection[str] = (),
    spans: bool = False,
) -> Rows:
    """Return the rows of a request, checked. A row without `weights` among rows that have them has weights of 1.

    Args:
        request: what was sent.
        context: tokens that a row may have.
        vocabulary: number of token ids.
        takes: names of the inputs that the loss takes, for errors.
        ignores: names of inputs that are left out unread.
        spans: whether the loss takes the input `SEQUENCES`, which the provenance spans of each datum give.

    Raises:
        UserError: there are none, or one cannot be used; says which datum, which key, and the numbers.
    """
    if not request.data:
        raise UserError("data must contain at least one datum")
    rows = Rows()
    keys: set[str] | None = None
    left = MOST_CELLS
    for number, datum in enumerate(request.data):
        where = f"datum {number}"
        try:
            tokens = codec.datum_tokens(datum)
            inputs = codec.datum_inputs(datum, min(left, MOST_TARGETS * len(tokens)))
        except ValueError as error:
            raise UserError(f"{where}: {error}") from error
        left -= sum(array.size for array in inputs.values())
        if left < 0:
            raise UserError(
                f"{where}: the loss_fn_inputs of a request must have at most {MOST_CELLS} numbers; send fewer datums"
            )
        _check_tokens(where, tokens, context, vocabulary)
        inputs = {name: array for name, array in inputs.items() if name not in ignores}
        if spans and SEQUENCES in inputs:
            raise UserError(
                f"{where}: cannot use the loss_fn_input {SEQUENCES!r}: it is derived from the provenance spans of the "
                "datum; remove it"
            )
        named = inputs.keys() - {WEIGHTS}
        if keys is not None and named != keys:
            odd = sorted(named ^ keys)[0]
            raise UserError(
                f"{where}: some datums have the loss_fn_input {odd!r} and others do not; all must have the same "
                f"(loss_fn {request.loss_fn!r} takes {', '.join(takes)})"
            )
        keys = set(named)
        _add(rows, where, tokens, inputs, vocabulary)
        if spans:
            rows.inputs.setdefault(SEQUENCES, []).append(_sequences(where, datum, tokens, rows.shapes[-1]))
    _fill_weights(rows)
    if any(len(shape) == 2 for shape in rows.shapes):
        _check_room(rows)
    return rows


def _fill_weights(rows: Rows) -> None:
    if any("loss_scale" in feature for feature in rows.features):
        for feature, shape in zip(rows.features, rows.shapes, strict=True):
            feature.setdefault("loss_scale", np.ones(shape, np.float32))


def _sequences(where: str, datum: pb.Datum, tokens: Array, shape: tuple[int, ...]) -> Array:
    """Return the input `SEQUENCES` of a datum."""
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


def _check_room(rows: Rows) -> None:
    """Refuse rows that grow too large when all of them are filled up to the width of the widest."""
    width = max(shape[1] if len(shape) == 2 else 1 for shape in rows.shapes)
    if width * sum(shape[0] for shape in rows.shapes) > MOST_CELLS:
        raise UserError(
            f"some datums have {width} targets per position; padded to this width, the request exceeds {MOST_CELLS} "
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
    if not ((tokens >= 0) & (tokens < vocabulary)).all():
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
    if targets.ndim == 2 and targets.shape[1] > MOST_TARGETS:
        raise UserError(
            f"{where}: {TARGETS} must have at most {MOST_TARGETS} targets per position, got {targets.shape[1]}"
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
            rows.inputs.setdefault(NAMES.get(name, name), []).append(values.copy())  # not a view of the message
    rows.features.append(feature)
    rows.shapes.append(targets.shape)


def _check_finite(where: str, name: str, values: Array) -> None:
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        at = int(np.flatnonzero(~np.isfinite(values))[0])
        raise UserError(f"{where}: {name} must be finite, got {values.reshape(-1)[at]} at {at}")


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
