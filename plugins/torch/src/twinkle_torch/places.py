"""Where sequences lie that come one after the other in one row, and which go on after a prefix that they share."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from twinkle.errors import ArgumentError
from twinkle_torch.prefix_attention import Part


@dataclass(frozen=True)
class Segments:
    """Where the sequences of a packed row lie.

    Attributes:
        lengths: tokens of each sequence, in order, each at least 1; of one with a parent, those of its own.
        cu_seqlens: int32 `[n + 1]`, where each sequence begins, and the end; on the device of the tokens.
        parents: for each sequence the number of the one that it goes on after, or -1; empty where none has one.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    parents: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device | str | None = None,
        parents: Sequence[int] | None = None,
    ) -> "Segments":
        """Return the segments of sequences of these lengths.

        Args:
            lengths: tokens of each sequence, without those of its parent.
            device: where `cu_seqlens` shall be.
            parents: for each sequence the number of an earlier one whose tokens, and those of that one's own parent,
                come before its own; -1 for a sequence that begins by itself.

        Raises:
            ArgumentError: there are none, or one has no tokens, or a parent does not come before its child.
        """
        if not lengths or min(lengths) < 1:
            raise ArgumentError(f"segments of lengths {list(lengths)}; there must be one, and each needs a token")
        found = () if parents is None else tuple(map(int, parents))
        if parents is not None and len(found) != len(lengths):
            raise ArgumentError(f"{len(found)} parents for {len(lengths)} segments; give one for each, -1 for none")
        for number, parent in enumerate(found):
            if not -1 <= parent < number:
                raise ArgumentError(f"segment {number} has the parent {parent}; a parent comes before its children")
        if max(found, default=-1) < 0:
            found = ()
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(tuple(map(int, lengths)), bounds if device is None else bounds.to(device), found)

    @cached_property
    def total(self) -> int:
        """Number of tokens."""
        return sum(self.lengths)

    @cached_property
    def longest(self) -> int:
        """Length of the longest sequence, its parent's tokens not counted."""
        return max(self.lengths)

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Where each sequence begins and ends."""
        return tuple(pairwise((0, *accumulate(self.lengths))))

    @cached_property
    def chains(self) -> tuple[tuple[int, ...], ...]:
        """For each sequence the numbers of those that come before it: its parent last."""
        chains: list[tuple[int, ...]] = []
        for parent in self.parents or [-1] * len(self.lengths):
            chains.append(() if parent < 0 else (*chains[parent], parent))
        return tuple(chains)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Position of the first token of each sequence: the number of tokens that come before it."""
        return tuple(sum(self.lengths[number] for number in chain) for chain in self.chains)

    @cached_property
    def reach(self) -> int:
        """Number of tokens that the last token of some sequence sees, at most."""
        return max(start + length for start, length in zip(self.starts, self.lengths, strict=True))

    @cached_property
    def positions(self) -> Tensor:
        """Position of each token in its sequence, int64 `[T]`, on the device of `cu_seqlens`."""
        pairs = zip(self.starts, self.lengths, strict=True)
        counted = torch.cat([torch.arange(start, start + length) for start, length in pairs])
        return counted.to(self.cu_seqlens.device)

    @cached_property
    def families(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """The numbers of the sequences of each parent and length."""
        found: dict[tuple[int, int], list[int]] = {}
        for number, length in enumerate(self.lengths):
            found.setdefault((self.parents[number] if self.parents else -1, length), []).append(number)
        return {key: tuple(numbers) for key, numbers in found.items()}

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The calls that attend without copying: neighbours of one length to themselves, children to each parent."""
        own: list[Part] = []
        for start, stop in self.bounds:
            last = own[-1] if own else None
            if last is not None and (last.queries[1] - last.queries[0]) // last.count == stop - start:
                own[-1] = Part((last.queries[0], stop), (last.queries[0], stop), last.count + 1)
            else:
                own.append(Part((start, stop), (start, stop)))
        return (*own, *self._parts_of_parents())

    def _parts_of_parents(self) -> list[Part]:
        runs: dict[int, list[tuple[int, int]]] = {}
        for chain, (start, stop) in zip(self.chains, self.bounds, strict=True):
            for number in chain:
                known = runs.setdefault(number, [])
                if known and known[-1][1] == start:
                    known[-1] = known[-1][0], stop
                else:
                    known.append((start, stop))
        return [Part(run, self.bounds[number]) for number, found in runs.items() for run in found]

    @cached_property
    def keys(self) -> "Keys":
        """What each sequence sees, one after the other."""
        seen = [[self.bounds[n] for n in (*chain, number)] for number, chain in enumerate(self.chains)]
        lengths = [sum(stop - start for start, stop in pieces) for pieces in seen]
        index = torch.cat([torch.arange(*piece) for pieces in seen for piece in pieces])
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        device = self.cu_seqlens.device
        return Keys(index.to(device), bounds.to(device))


@dataclass(frozen=True, slots=True)
class Keys:
    """The tokens that sequences see, gathered.

    Attributes:
        index: int64 `[K]`, where in the row each of them lies.
        cu_seqlens: int32 `[n + 1]`, where those of each sequence begin, and the end.
    """

    index: Tensor
    cu_seqlens: Tensor
