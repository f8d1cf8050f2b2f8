"""The stream of tokens that a step feeds to a model, and which part of it belongs to which adapter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinkle_transformers.lowrank.grouped import Groups, runs
from twinkle_transformers.lowrank.products import Cohort, Routing
from twinkle_transformers.sampling.reach import Reach, Stretch
from twinkle_transformers.versions import AdapterVersion


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What a step reads of one sequence.

    Attributes:
        slot: where the sequence's keys and values are.
        start: tokens that it has there already.
        tokens: those to read, at least one.
        version: the adapter, None for the base model.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    version: AdapterVersion | None


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """What a step computes.

    Attributes:
        ids: int64 `[1, T]`.
        positions: int64 `[1, T]`.
        reach: which tokens see what.
        firsts: where each piece begins, in the order in which they were given.
        owners: the adapter of each token, in the order of the stream; padding has none.
    """

    ids: Tensor
    positions: Tensor
    reach: Reach
    firsts: list[int]
    owners: list[AdapterVersion | None]


def lay_out(pieces: Sequence[Piece], device: torch.device, multiple: int = 1) -> Stream:
    """Put pieces one after the other: those of one adapter together, adapters of one layout too, the base last.

    Args:
        pieces: of a step.
        device: where the model is.
        multiple: the stream is padded to a multiple of so many tokens.
    """
    layouts: dict[object, int] = {}
    keys: dict[str, int] = {}
    for piece in pieces:
        if piece.version is not None:
            layouts.setdefault(piece.version.layout, len(layouts))
            keys.setdefault(piece.version.key, len(keys))

    def place(index: int) -> tuple[int, int, int]:
        version = pieces[index].version
        if version is None:
            return len(layouts), 0, pieces[index].slot
        return layouts[version.layout], keys[version.key], pieces[index].slot

    order = sorted(range(len(pieces)), key=place)
    firsts = [0] * len(pieces)
    ids: list[int] = []
    positions: list[int] = []
    owners: list[AdapterVersion | None] = []
    stretches = []
    for index in order:
        piece = pieces[index]
        count = len(piece.tokens)
        firsts[index] = len(ids)
        stretches.append(Stretch(piece.slot, piece.start, len(ids), count))
        ids += piece.tokens
        positions += range(piece.start, piece.start + count)
        owners += [piece.version] * count
    spare = -len(ids) % multiple
    both = torch.tensor([ids + [0] * spare, positions + [0] * spare], device=device)
    return Stream(both[:1], both[1:], Reach(stretches, len(ids) + spare, device), firsts, owners + [None] * spare)


def route(owners: Sequence[AdapterVersion | None], weights: Callable[[list[AdapterVersion]], Tensor]) -> Routing | None:
    """Return which rows belong to which adapter; None if none does.

    Args:
        owners: of each row; those of one adapter next to each other.
        weights: stacks the weights of versions of one layout.
    """
    groups = [(owners[first], first, past - first) for first, past in runs(_keys(owners)) if owners[first] is not None]
    cohorts = []
    for first, past in runs([version.layout for version, _, _ in groups if version is not None]):
        part = groups[first:past]
        versions = [version for version, _, _ in part if version is not None]
        lengths = Groups(part[0][1], tuple(count for _, _, count in part))
        cohorts.append(Cohort(versions[0].layout, lengths, weights(versions)))
    return Routing(cohorts, len(owners)) if cohorts else None


def _keys(owners: Sequence[AdapterVersion | None]) -> list[str | None]:
    return [None if version is None else version.key for version in owners]
