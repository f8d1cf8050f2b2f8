"""Compares the provenance spans of a pass with the recorded sampling requests."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from twinkle_server.app_state import AppState, Caller, now
from twinkle_server.errors import Gone, NotFound

LOSSES: Final = ("stable_reinforce",)
"""Losses that require provenance spans."""
_TARGETS: Final = "target_tokens"


@dataclass(frozen=True, slots=True)
class Claim:
    """The claim of a provenance span about its tokens.

    Attributes:
        datum: index of the datum.
        sequence: id of the sampled sequence.
        offset: position of the first token in the sequence.
        tokens: the targets that the span covers; None for a span of a prompt, whose tokens are not recorded.
    """

    datum: int
    sequence: str
    offset: int
    tokens: NDArray[np.int64] | None

    @property
    def request(self) -> str:
        """Id of the sampling request."""
        return self.sequence.rpartition(":")[0]


def claims_of(message: Any) -> tuple[Claim, ...]:
    """Return the claims of a pass; a datum that cannot be read is skipped, and fails later."""
    return tuple(_claims(message.data))


def _claims(data: Sequence[Any]) -> Iterator[Claim]:
    from twinkle_server.wire.codec import read_tensor
    from twinkle_server.wire.provenance import target_spans

    for number, datum in enumerate(data):
        try:
            if _TARGETS not in datum.loss_fn_inputs:  # access would add the key
                continue
            targets = read_tensor(datum.loss_fn_inputs[_TARGETS], _TARGETS).astype(np.int64)
            if targets.ndim != 1:
                continue
            spans = target_spans(datum, len(targets))
        except ValueError:
            continue
        for span in spans:
            tokens = targets[span.begin : span.end] if span.sampled else None
            yield Claim(number, span.sequence, span.offset, tokens)


async def refusal_of(state: AppState, caller: Caller, session: str, claims: Sequence[Claim]) -> str | None:
    """Return why a pass must be refused, or None.

    Each sequence must have been sampled by this session with `record_stability_info`, and have been sampled or trained
    on within the last `Times.kept_record` seconds. Sampled tokens must equal the recorded ones.
    """
    groups = await asyncio.to_thread(_by_request, claims)
    current, kept = now(), state.settings.times.kept_record
    known = await state.store.recorded.use(caller.tenant, session, groups, current - kept, current)
    for request, own in groups.items():
        if request not in known:
            return (
                f"datum {own[0].datum}: sequence {own[0].sequence[:160]!r} must be one that this session sampled with "
                f"record_stability_info=True and used in the last {kept / 3600:g} hours; sample it again, or train "
                "with another loss_fn"
            )
    for request, own in groups.items():  # sequentially, because results may be large
        try:
            future = await state.service.wait(request, caller.tenant, 0.0)
        except (Gone, NotFound):
            return f"the sequences of sampling request {request[:120]!r} are no longer kept; sample again"
        if future.status != "done" or future.result is None:
            return f"sampling request {request[:120]!r} has no sequences: its status is {future.status!r}"
        if (refusal := await asyncio.to_thread(_compare, own, future.result)) is not None:
            return refusal
    return None


def _by_request(claims: Sequence[Claim]) -> dict[str, list[Claim]]:
    """Group claims by sampling request, in the order of the pass."""
    groups: dict[str, list[Claim]] = {}
    for claim in claims:
        groups.setdefault(claim.request, []).append(claim)
    return groups


def _compare(claims: Sequence[Claim], result: bytes) -> str | None:
    """Return why claims about a sampling request are wrong, or None."""
    from twinkle_server.wire.codec import read_sample_response

    texts = read_sample_response(result)[0]
    for claim in claims:
        place = claim.sequence.rpartition(":")[2]
        if not place.isdecimal() or int(place) >= len(texts):
            return (
                f"datum {claim.datum}: sequence {claim.sequence[:160]!r} does not exist; its request has {len(texts)} "
                "sequences"
            )
        if claim.tokens is None:
            continue
        tokens = texts[int(place)].tokens
        end = claim.offset + len(claim.tokens)
        if end > len(tokens):
            return (
                f"datum {claim.datum}: a span of sequence {claim.sequence[:160]!r} must end within its {len(tokens)} "
                f"tokens, got offset {claim.offset} and length {len(claim.tokens)}"
            )
        different = np.flatnonzero(tokens[claim.offset : end] != claim.tokens)
        if len(different):
            at = int(different[0])
            return (
                f"datum {claim.datum}: target_tokens must equal the tokens of sequence {claim.sequence[:160]!r}; "
                f"its token {claim.offset + at} is {int(tokens[claim.offset + at])}, got {int(claim.tokens[at])}"
            )
    return None
