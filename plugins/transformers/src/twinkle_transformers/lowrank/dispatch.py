"""Which tokens of a pass go to which expert, in an order in which experts and operations are slices."""

from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from twinkle.errors import Unsupported
from twinkle_transformers.lowrank.pieces import Pieces
from twinkle_transformers.lowrank.products import Cohort, Routing


class Dispatch:
    """The pairs (token, expert) of a layer in one pass, ordered by expert and then by the token's place in the stream.

    The pairs of an expert are then a slice, those of an operation a slice of that, and those that a gradient flows
    through (the first of the stream) its beginning. On a GPU making one waits for the device, once a layer.

    Args:
        chosen: integer `[T, k]`, the experts of each token.
        experts: number of experts.
        routing: of the pass; T must be its total.

    Attributes:
        width: k.
        order: `[T k]`, for each pair its number in the order of `chosen`.
        tokens: `[T k]`, for each pair its token.

    Raises:
        Unsupported: the pass has another number of tokens, or some are sent to an expert that is not there.
    """

    def __init__(self, chosen: Tensor, experts: int, routing: Routing) -> None:
        if chosen.ndim != 2 or len(chosen) != routing.total:
            raise Unsupported(
                f"a layer of experts sees tokens {list(chosen.shape[:-1])} of a pass of {routing.total}; adapters on "
                "such a layer are not supported"
            )
        self.width = chosen.shape[1]
        self._experts, self._total, self._trained = experts, routing.total, routing.trained
        flat = chosen.reshape(-1)
        self.order = torch.argsort(flat, stable=True)
        self.tokens = self.order // self.width
        self._edges = _edges(routing)
        self._bounds = self._count(flat)
        self._pieces: dict[int, Pieces] = {}

    @cached_property
    def slices(self) -> list[tuple[int, int, int]]:
        """Expert, start and length of the pairs of each expert that has any."""
        return self._slices(self._total)

    @cached_property
    def trained(self) -> list[tuple[int, int, int]]:
        """The same for the pairs that a gradient flows through."""
        return self._slices(self._trained)

    @cached_property
    def ends(self) -> Tensor:
        """int32 `[experts]`, where the pairs of each expert end."""
        return self._ends(self.slices)

    @cached_property
    def trained_ends(self) -> Tensor:
        """int32 `[experts]`, where they end when only those that a gradient flows through are there."""
        return self._ends(self.trained)

    @cached_property
    def trained_places(self) -> Tensor | None:
        """Places of the pairs that a gradient flows through; None where it flows through all."""
        if self._trained == self._total:
            return None
        return (self.tokens < self._trained).nonzero()[:, 0]

    @cached_property
    def experts_of_pairs(self) -> Tensor:
        """`[T k]`, the expert of each pair."""
        experts, _, lengths = (torch.tensor(column) for column in zip(*self.slices, strict=True))
        return torch.repeat_interleave(experts, lengths).to(self.order.device)

    def pieces(self, cohort: Cohort) -> Pieces:
        """Return the slices of a cohort of this pass: one for each of its operations and each expert that it meets."""
        found = self._pieces.get(id(cohort))
        if found is None:
            found = self._pieces[id(cohort)] = self._cut(cohort)
        return found

    def sum(self, pairs: Tensor) -> Tensor:
        """Return `[T, m]`, for each token the sum over its experts of `[T k, m]`, in the order that `chosen` has."""
        inverse = self._inverse
        return pairs.index_select(0, inverse).view(self._total, self.width, -1).sum(1)

    @cached_property
    def _inverse(self) -> Tensor:
        inverse = torch.empty_like(self.order)
        inverse[self.order] = torch.arange(len(self.order), device=self.order.device)
        return inverse

    def _count(self, flat: Tensor) -> Tensor:
        """Return `[experts, edges]`, on the CPU: where the pairs of each expert that lie before each edge end."""
        spans = len(self._edges) - 1
        edges = torch.tensor(self._edges[1:-1], dtype=torch.long, device=flat.device)
        span = torch.bucketize(torch.arange(self._total, device=flat.device), edges, right=True)
        keys = flat * spans + span.repeat_interleave(self.width)
        counts = torch.bincount(keys, minlength=self._experts * spans).cpu()
        if len(counts) > self._experts * spans:
            raise Unsupported(f"tokens are sent to expert {(len(counts) - 1) // spans} of {self._experts}")
        ends = counts.cumsum(0).view(self._experts, spans)
        starts = torch.cat([ends.new_zeros(1), ends[:-1, -1]])
        return torch.cat([starts[:, None], ends], 1)

    def _slices(self, past: int) -> list[tuple[int, int, int]]:
        starts = self._bounds[:, 0].tolist()
        stops = self._bounds[:, self._edges.index(past)].tolist()
        both = enumerate(zip(starts, stops, strict=True))
        return [(expert, start, stop - start) for expert, (start, stop) in both if stop > start]

    def _ends(self, slices: list[tuple[int, int, int]]) -> Tensor:
        lengths = [0] * self._experts
        for expert, _, length in slices:
            lengths[expert] = length
        return torch.tensor(list(accumulate(lengths)), dtype=torch.int32, device=self.order.device)

    def _cut(self, cohort: Cohort) -> Pieces:
        borders = [self._edges.index(edge) for edge in _borders(cohort)]
        bounds = self._bounds[:, borders]
        lengths = bounds.diff(dim=1)
        experts, operations = lengths.nonzero(as_tuple=True)
        return Pieces(
            tuple(experts.tolist()),
            tuple(operations.tolist()),
            tuple(bounds[experts, operations].tolist()),
            tuple(lengths[experts, operations].tolist()),
            len(self.order),
            self.order.device,
        )


def _borders(cohort: Cohort) -> list[int]:
    return list(accumulate(cohort.groups.lengths, initial=cohort.groups.start))


def _edges(routing: Routing) -> list[int]:
    """Return every place of the stream where an operation, or what is trained, begins or ends, in order."""
    edges = {0, routing.trained, routing.total}
    for cohort in routing.cohorts:
        edges.update(_borders(cohort))
    return sorted(edges)
