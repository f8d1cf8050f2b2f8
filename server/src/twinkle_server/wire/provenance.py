"""Provenance spans of a datum: which of its targets were sampled, and in which sequence."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinkle_server.wire import tinker_pb2 as pb

_LONGEST_ID = 512


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive positions of a datum that came from one sampling request.

    Attributes:
        sequence: id of a sequence of that request.
        sampled: whether the positions are tokens of the sequence, not of the prompt.
        begin: first position in the datum.
        end: position after the last one.
        offset: position of the first token in the sequence or the prompt.
    """

    sequence: str
    sampled: bool
    begin: int
    end: int
    offset: int


def target_spans(datum: pb.Datum, length: int) -> list[Span]:
    """Return the spans of a datum's targets in order.

    Args:
        datum: with `loss_fn_input_spans`.
        length: number of its targets.

    Raises:
        ValueError: it has no spans, they do not tile the targets, or two of them contain the same tokens of a sequence.
    """
    if not datum.loss_fn_input_spans:
        raise ValueError(
            "provenance spans are missing; name the sampled sequence of each position with Datum.with_provenance"
        )
    spans = list(_tiled(datum.loss_fn_input_spans, "loss_fn_inputs", length))
    ends: dict[str, int] = {}
    for span in spans:
        if span.sampled and span.end > span.begin:
            if span.offset < ends.get(span.sequence, 0):
                raise ValueError(
                    f"provenance spans of loss_fn_inputs must name the tokens of {span.sequence!r} in order and once, "
                    f"got offset {span.offset} after {ends[span.sequence]}"
                )
            ends[span.sequence] = span.offset + span.end - span.begin
    return spans


def check_input_spans(datum: pb.Datum, length: int) -> None:
    """Check that the spans of a datum's `model_input` tile its tokens.

    Raises:
        ValueError: they do not.
    """
    for _ in _tiled(datum.model_input_spans, "model_input", length):
        pass


def sequence_numbers(spans: Sequence[Span], length: int) -> NDArray[np.int64]:
    """Return the sequence of each target, `[length]`: numbered from 1 within the datum, 0 for targets not sampled."""
    numbers: dict[str, int] = {}
    out = np.zeros(length, np.int64)
    for span in spans:
        if span.sampled and span.end > span.begin:
            out[span.begin : span.end] = numbers.setdefault(span.sequence, len(numbers) + 1)
    return out


def _tiled(messages: Sequence[pb.ProvenanceSpan], what: str, length: int) -> Iterator[Span]:
    at = 0
    for message in messages:
        kind = message.WhichOneof("span")
        if kind is None:
            raise ValueError(f"a provenance span of {what} must be of prompt or sampled tokens")
        part = message.sampled_tokens if kind == "sampled_tokens" else message.prompt_tokens
        if not 0 < len(part.sequence_id) <= _LONGEST_ID or part.offset < 0 or part.length < 0:
            raise ValueError(
                f"a provenance span of {what} must have a sequence_id, an offset and a length of at least 0, got "
                f"{part.sequence_id[:80]!r}, {part.offset} and {part.length}"
            )
        if part.length > length - at:
            break
        yield Span(part.sequence_id, kind == "sampled_tokens", at, at + part.length, part.offset)
        at += part.length
    else:
        if at == length:
            return
    total = sum(m.sampled_tokens.length + m.prompt_tokens.length for m in messages)
    raise ValueError(f"provenance spans of {what} must cover its {length} positions, got {total}")
