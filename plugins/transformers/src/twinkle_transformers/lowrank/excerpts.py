"""The routing of some sequences of a pass, for layers that see them without the rest of the stream."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from twinkle_transformers.lowrank.grouped import Groups, runs
from twinkle_transformers.lowrank.products import Cohort, Mask, Routing

Spans = Sequence[tuple[int, int]]
"""First row, and one past the last, of each sequence."""


def excerpt(routing: Routing, spans: Spans) -> Routing:
    """Return the routing of some rows of a stream, put one after the other.

    Weights and gradients are views of the buffers of the whole, so that what an operation adds lands in its own.

    Args:
        routing: of the whole stream.
        spans: ascending and apart.
    """
    total = sum(stop - start for start, stop in spans)
    trained = sum(_common(span, (0, routing.trained)) for span in spans)
    cohorts = [part for cohort in routing.cohorts for part in _parts(cohort, spans)]
    return Routing(cohorts, total, trained, routing.anchor if trained else None)


def _common(one: tuple[int, int], other: tuple[int, int]) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


def _parts(cohort: Cohort, spans: Spans) -> Iterator[Cohort]:
    """Yield a cohort for each run of operations that have rows in the spans."""
    start = cohort.groups.start
    owners = list(pairwise(accumulate(cohort.groups.lengths, initial=start)))
    counts = [sum(_common(span, owner) for span in spans) for owner in owners]
    at = sum(_common(span, (0, start)) for span in spans)
    for first, last in runs([count > 0 for count in counts]):
        if not counts[first]:
            continue
        lengths = tuple(counts[first:last])
        grads = None if cohort.grads is None else cohort.grads[first:last]
        dropout = cohort.dropout
        if dropout is not None:
            dropout = _Rows(dropout, _places(spans, owners[first][0], owners[last - 1][1]) - start)
        yield Cohort(cohort.layout, Groups(at, lengths), cohort.weights[first:last], grads, dropout)
        at += sum(lengths)


def _places(spans: Spans, start: int, stop: int) -> Tensor:
    """Return the rows of the stream, from `start` to `stop`, that lie in the spans."""
    inside = [(max(a, start), min(b, stop)) for a, b in spans]
    return torch.cat([torch.arange(a, b) for a, b in inside if a < b])


@dataclass(frozen=True, slots=True)
class _Rows:
    """The dropout factors of some rows of a cohort."""

    mask: Mask
    rows: Tensor

    def __call__(self, name: str, features: int, dtype: torch.dtype) -> Tensor:
        whole = self.mask(name, features, dtype)
        return whole[self.rows.to(whole.device)]
