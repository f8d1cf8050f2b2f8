"""From a pass's message to rows of the model and arguments of the loss; what is wrong is said with key and numbers."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

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
