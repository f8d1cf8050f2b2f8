"""The composition of passes as data: the properties of each micro-batch that affect the rounding of the others.

The rounding of a product depends on its shape, not on the contents of other rows. So a pass can be repeated for one of
its operations alone: placeholders of the same shape, filled with zeros, replace the micro-batches of the others.
(Experts are the exception: the number of tokens of each depends on the tokens.)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from twinkle.engine import AdapterRef, Operation
from twinkle.errors import ArgumentError
from twinkle_torch.layout import Layout, Shape
from twinkle_transformers.group import OptimizerGroup
from twinkle_transformers.pool.config import AdapterPlan
from twinkle_transformers.pool.experts import ExpertSite
from twinkle_transformers.pool.stream import TokenPieces
from twinkle_transformers.pool.tenants import Tenant
from twinkle_transformers.pool.work import MicroBatch, Scoring, WorkItem
from twinkle_transformers.sites import Site
from twinkle_transformers.token_scores import Needs

PASS, PARTS, ROWS = "pass", "parts", "rows"


class Compositions:
    """Describes passes, and creates placeholders from descriptions.

    Args:
        sites: the layers that adapters may adapt, in the order in which layouts have them.
        experts: the parameters of experts that adapters may adapt.
        group: training state of placeholders.
        device: device of the model.
    """

    def __init__(
        self, sites: Mapping[str, Site], experts: Mapping[str, ExpertSite], group: OptimizerGroup, device: torch.device
    ) -> None:
        self._sites: dict[str, Site | ExpertSite] = {**sites, **experts}
        self._places = {name: place for place, name in enumerate(self._sites)}
        self._group, self._device = group, device
        self._code = lru_cache(maxsize=256)(self._coded)
        self._layout = lru_cache(maxsize=256)(self._decoded)

    def note(self, parts: Sequence[MicroBatch], number: int) -> None:
        """Add a pass that succeeded to the composition of each of its operations.

        Args:
            parts: micro-batches of the pass in order, without twins.
            number: number of the pass, larger than those before it.
        """
        shapes = [self._shape(part) for part in parts]
        places: dict[WorkItem, list[int]] = {}
        for place, part in enumerate(parts):
            if not part.placeholder:
                places.setdefault(part.work, []).append(place)
        for work, own in places.items():
            entries = list(shapes)
            for place in own:
                entries[place] = {ROWS: [parts[place].first, len(parts[place].rows)]}
            work.composition.append({PASS: number, PARTS: entries})

    def passes(self, works: Sequence[WorkItem]) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of each recorded pass, with placeholders for absent operations.

        Args:
            works: operations with a composition, cut accordingly (`cuts_of`).
        """
        slots_of: dict[int, list[Any]] = {}
        for work in works:
            parts = {part.first: part for part in work.parts}
            for entry in work.operation.composition or ():
                slots = slots_of.setdefault(entry[PASS], list(entry[PARTS]))
                for place, slot in enumerate(entry[PARTS]):
                    if ROWS in slot:
                        slots[place] = parts[slot[ROWS][0]]
        for number in sorted(slots_of):
            yield [slot if isinstance(slot, MicroBatch) else self._placeholder(slot) for slot in slots_of[number]]

    def _shape(self, part: MicroBatch) -> dict[str, Any]:
        pieces: TokenPieces = part.pieces
        shape: dict[str, Any] = {"lengths": [len(ids) for ids in pieces.ids]}
        if max(pieces.parents, default=-1) >= 0:
            shape |= {"starts": pieces.starts, "parents": pieces.parents, "tokens": part.tokens}
        if (tenant := part.work.tenant) is not None:
            shape["adapter"] = self._code(tenant.plan.layout)
            if tenant.plan.dropout and part.work.training:
                shape["dropout"] = tenant.plan.dropout
        if part.work.training:
            shape["trained"] = True
        if part.scoring is not None:
            shape["scores"] = _write_scoring(part.scoring)
        if part.twin is not None:
            shape["base"] = self._shape(part.twin)
        return shape

    def _placeholder(self, shape: Mapping[str, Any]) -> MicroBatch:
        lengths, training = shape["lengths"], bool(shape.get("trained"))
        ids = [torch.zeros(length, dtype=torch.int64) for length in lengths]
        count = sum(lengths)
        tenant = None if "adapter" not in shape else self._tenant(shape["adapter"], float(shape.get("dropout", 0.0)))
        scoring = None if "scores" not in shape else _read_scoring(shape["scores"])
        needs, temperature = (Needs(), 1.0) if scoring is None else (scoring.needs, scoring.temperature)
        work = WorkItem(-1, Operation(None, "forward", ()), tenant, None, needs, temperature, training, 0)
        part = MicroBatch(work, (), {}, torch.empty(shape.get("tokens", count), dtype=torch.int64), ids)
        part.placeholder, part.scoring = True, scoring
        starts, parents = shape.get("starts", [0] * len(ids)), shape.get("parents", [-1] * len(ids))
        part.pieces = TokenPieces(ids, starts, parents, torch.arange(count))
        work.parts = [part]
        if "base" in shape:
            part.twin = self._placeholder(shape["base"])
        return part

    def _tenant(self, code: Any, dropout: float) -> Tenant:
        layout = self._layout(_frozen(code))
        plan = AdapterPlan(None, layout, dropout, "kaiming", {})  # without files
        flat = nn.Parameter(torch.zeros(layout.size, device=self._device), requires_grad=False)
        return Tenant(AdapterRef("", 0), plan, flat, self._group)

    def _coded(self, layout: Layout) -> list[Any]:
        """Return a layout as `[rank multiple, [rank, scale, bit mask of sites in hexadecimal], ...]`."""
        kinds: dict[tuple[int, float], int] = {}
        for name, shape in layout.shapes.items():
            kind = (shape.rank, shape.scale)
            kinds[kind] = kinds.get(kind, 0) | 1 << self._places[name]
        return [layout.rank_multiple, *([rank, scale, f"{bits:x}"] for (rank, scale), bits in kinds.items())]

    def _decoded(self, code: tuple[Any, ...]) -> Layout:
        multiple, *kinds = code
        shapes: dict[int, tuple[str, Shape]] = {}
        names = list(self._sites)
        for rank, scale, bits in kinds:
            for place in range(len(names)):
                if int(bits, 16) >> place & 1:
                    site = self._sites[names[place]]
                    shape = Shape(rank, site.fan_in, site.fan_out, float(scale), getattr(site, "experts", 0))
                    shapes[place] = (names[place], shape)
        return Layout.of((shapes[place] for place in sorted(shapes)), rank_multiple=multiple)


def cuts_of(operation: Operation, rows: int) -> list[int] | None:
    """Return the first rows of the micro-batches of an operation with a composition; None without one.

    Raises:
        ArgumentError: the composition is invalid, or of an operation with another number of rows.
    """
    if not operation.composition:
        return None
    try:
        own = sorted(slot[ROWS] for entry in operation.composition for slot in entry[PARTS] if ROWS in slot)
        ends = [0, *(first + count for first, count in own)]
        fits = [first for first, _ in own] == ends[:-1] and ends[-1] == rows
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError("composition must be OperationResult.composition of an earlier run") from error
    if not fits:
        raise ArgumentError(f"composition must cover the {rows} rows of its operation once, got {own}")
    return ends[:-1]


def _frozen(code: Any) -> Any:
    return tuple(map(_frozen, code)) if isinstance(code, list | tuple) else code


def _write_scoring(scoring: Scoring) -> dict[str, Any]:
    plain = Needs()
    needs = {f.name: getattr(scoring.needs, f.name) for f in fields(Needs) if f.name != "fuse"}
    given = {name: value for name, value in needs.items() if value != getattr(plain, name)}
    return {"count": scoring.count, "targets": list(scoring.targets), "temperature": scoring.temperature} | given


def _read_scoring(given: Mapping[str, Any]) -> Scoring:
    needs = dict(given)
    count, targets, temperature = needs.pop("count"), needs.pop("targets"), needs.pop("temperature")
    return Scoring(Needs(**needs), float(temperature), tuple(targets), int(count))
