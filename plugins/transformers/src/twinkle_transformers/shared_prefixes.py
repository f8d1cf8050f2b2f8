"""Which prefixes of token sequences are worth computing once, and where each token is then found. Needs no torch.

A row attends to its past alone, so rows that begin alike have the same hidden states as long as they do. The plan lays
out what has to be computed: a prefix that a group of rows shares, then what each of them goes on with.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from twinkle.errors import ArgumentError
from twinkle_transformers.prefix_groups import Prefix, choose_groups

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPlan:
    """What to compute, one piece after the other, and where each row finds its tokens in it.

    Attributes:
        pieces: for each segment of the stream the tokens that it holds: (row, first position, last position + 1).
        parents: for each segment the number of the prefix that it goes on after, which lies before it, or -1.
        lengths: tokens of each segment, each at least 1.
        starts: position of each segment's first token: the length of its parent, or 0.
        index: for each row int64 `[tokens of the row]`: where each of its tokens lies in the stream.
        saved: tokens of all rows less tokens of the stream.
    """

    pieces: tuple[tuple[int, int, int], ...]
    parents: tuple[int, ...]
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    index: tuple[NDArray[np.int64], ...]
    saved: int


def plan_prefixes(rows: Sequence[Any], *, least: int = 16) -> PrefixPlan:
    """Find the prefixes that rows share, and lay out the rows so that each is there once.

    A row that equals another one, or that another one begins with, is read from that one and takes nothing. Of the
    others, groups are chosen that save most tokens after `least - 1` is taken off for each; no choice of groups with
    one prefix a row does better. Beside sorting the rows it takes one pass over their tree of prefixes.

    Args:
        rows: sequences of integers: lists, arrays or tensors on the CPU, all of one adapter.
        least: number of tokens that a group must save to be one, at least 1.

    Returns:
        the plan: segments stand in the order in which rows first need them, children directly after their parent.

    Raises:
        ArgumentError: there is no row, one is empty or not a sequence of integers, or `least` is below 1.
    """
    if least < 1:
        raise ArgumentError(f"plan_prefixes: least is {least}; it is a number of tokens from 1")
    keys = [_key(row, number) for number, row in enumerate(rows)]
    if not keys:
        raise ArgumentError("plan_prefixes was given no rows; there must be one")
    order = sorted(reversed(range(len(keys))), key=keys.__getitem__)  # of equal rows the first one comes last
    read_from, common = _widest(keys, order, _common(keys, order))
    left = [row for row in order if read_from[row] == row]
    prefixes = dict(zip(left, choose_groups(common, least), strict=True))
    return _laid_out([len(key) // _BYTES for key in keys], read_from, prefixes)


_BYTES = 8


def _key(row: Any, number: int) -> bytes:
    """Return the tokens as bytes: rows that begin alike are neighbours when sorted by them, whatever the byte order."""
    import numpy as np

    try:
        if not hasattr(row, "dtype"):
            key = struct.pack(f"{len(row)}q", *row)  # the fastest way in Python that takes no float for an integer
            what = "empty"
        else:
            tokens = np.asarray(row)
            fits = tokens.ndim == 1 and tokens.dtype.kind in "iu"
            key = tokens.astype(np.int64).tobytes() if fits else b""
            what = f"{tokens.dtype} of shape {list(tokens.shape)}"
    except (TypeError, ValueError, struct.error) as error:
        raise ArgumentError(f"row {number} is no sequence of integers: {error}") from error
    if not key:
        raise ArgumentError(f"row {number} is {what}; a row is a sequence of integers with one token at least")
    return key


def _common(keys: Sequence[bytes], order: Sequence[int]) -> list[int]:
    """Return how many tokens each row of the order and the next one begin with in common."""
    import numpy as np

    tokens = [np.frombuffer(keys[number], np.int64) for number in order]
    found = []
    for one, other in pairwise(tokens):
        length = min(len(one), len(other))
        differ = one[:length] != other[:length]
        first = int(differ.argmax())
        found.append(first if differ[first] else length)
    return found


def _widest(keys: Sequence[bytes], order: Sequence[int], common: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return for each row the one that it is read from, and what `common` is between those that are left."""
    read_from = list(range(len(keys)))
    left: list[int] = []
    nearest = None
    for place in reversed(range(len(common))):
        row, after = order[place], order[place + 1]
        nearest = common[place] if nearest is None else min(nearest, common[place])
        if common[place] * _BYTES == len(keys[row]):
            read_from[row] = read_from[after]
        else:
            left.append(nearest)
            nearest = None
    return read_from, left[::-1]


def _laid_out(lengths: Sequence[int], read_from: Sequence[int], prefixes: Mapping[int, Prefix | None]) -> PrefixPlan:
    """Lay out each row that is read from, in the order of first need, directly after those of its group."""
    import numpy as np

    members: dict[Prefix, list[int]] = {}
    for row in dict.fromkeys(read_from):
        if (prefix := prefixes[row]) is not None:
            members.setdefault(prefix, []).append(row)
    pieces: list[tuple[int, int, int]] = []
    parents: list[int] = []
    found: dict[int, NDArray[np.int64]] = {}
    end = 0
    for row in read_from:
        if row in found:
            continue
        prefix = prefixes[row]
        shared, parent, before = 0, -1, np.arange(0)
        if prefix is not None:
            shared, parent = prefix.depth, len(pieces)
            pieces.append((row, 0, shared))
            parents.append(-1)
            before = np.arange(end, end + shared)
            end += shared
        for member in (row,) if prefix is None else members[prefix]:
            pieces.append((member, shared, lengths[member]))
            parents.append(parent)
            own = np.arange(end, end + lengths[member] - shared)
            found[member] = np.concatenate((before, own))
            end += len(own)
    return PrefixPlan(
        pieces=tuple(pieces),
        parents=tuple(parents),
        lengths=tuple(stop - start for _, start, stop in pieces),
        starts=tuple(start for _, start, _ in pieces),
        index=tuple(found[whole][:length] for whole, length in zip(read_from, lengths, strict=True)),
        saved=sum(lengths) - end,
    )
