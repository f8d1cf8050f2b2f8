"""The token stream of a pass: the position of each micro-batch in it, and its outputs."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import accumulate, pairwise
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from twinkle.data_format import ModelOutput
from twinkle.errors import ArgumentError, TwinkleError
from twinkle_torch.head import CHUNK_TOKENS, LogitTransform, TokenScores, score_tokens
from twinkle_torch.pooling import embed
from twinkle_torch.segments import Segments
from twinkle_transformers.backbone import (
    Backbone,
    Needs,
    check_top,
    has_targets,
    scatter_scores,
    score_logits,
    targets_at,
    trained_places,
)
from twinkle_transformers.group import Pass
from twinkle_transformers.lowrank import products as lowrank
from twinkle_transformers.lowrank.grouped import Groups, runs
from twinkle_transformers.lowrank.products import AdapterGroup, Routing, stack
from twinkle_transformers.noise import masks_from
from twinkle_transformers.pool.embedding import PatchedRow, is_patched, keys_of, patched_rows
from twinkle_transformers.pool.work import MicroBatch, Scoring
from twinkle_transformers.shared_prefixes import plan_prefixes

SCRATCH_BYTES = 256 << 20
LEAST_ROWS = 8
"""Products of fewer rows are padded to this number: for fewer, libraries use other kernels, which round otherwise."""


@dataclass(slots=True, eq=False)
class Stream:
    """Input of a pass: all sequences one after the other in one row.

    Attributes:
        ids: int64 `[1, T]`.
        positions: int64 `[1, T]`; they start again at each sequence.
        segments: boundaries of the sequences, which attention must not cross.
        routing: tokens of each adapter.
        adapter_groups: the micro-batches of each adapter group of `routing`.
        padding: number of tokens at the end that belong to no micro-batch.
    """

    ids: Tensor
    positions: Tensor
    segments: Segments
    routing: Routing
    adapter_groups: list[tuple[AdapterGroup, list[MicroBatch]]]
    padding: int = 0
    borrowed: list[Tensor] = field(default_factory=list)
    """Buffers to return to the scratch."""
    patched: list[PatchedRow] = field(default_factory=list)
    """Rows whose embeddings are changed."""


class Scratch:
    """Buffers that passes reuse: on a CPU, page faults of new memory cost more than the work on it.

    Args:
        most: maximum number of bytes to keep between passes.
    """

    def __init__(self, most: int = SCRATCH_BYTES) -> None:
        self.most, self._free = most, list[Tensor]()
        self._lock = Lock()

    def take(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, borrowed: list[Tensor]) -> Tensor:
        """Return an uninitialized buffer, and append it to `borrowed`."""
        count = shape[0] * shape[1]
        with self._lock:
            fits = [
                f for f in self._free if f.dtype == dtype and f.device == device and count <= f.numel() <= 2 * count
            ]
            buffer = min(fits, key=Tensor.numel, default=None)
            self._free = [f for f in self._free if f is not buffer]
        if buffer is None:
            buffer = torch.empty(count, dtype=dtype, device=device)
        borrowed.append(buffer)
        return buffer[:count].view(shape)

    def give_back(self, borrowed: list[Tensor]) -> None:
        """Take buffers back; the oldest beyond the limit are freed."""
        kept: list[Tensor] = []
        room = self.most
        with self._lock:
            for tensor in (*borrowed, *self._free):
                room -= tensor.numel() * tensor.element_size()
                if room >= 0 and tensor.device.type == "cpu":
                    kept.append(tensor)
            self._free = kept
        borrowed.clear()


def in_order(parts: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Return micro-batches in stream order: trained ones first, adapters of one layout together, the base model last.

    With this order trained rows are one slice, so that the backward skips all other rows, and adapters of one layout
    form one grouped product.
    """
    order: dict[Any, int] = {}
    places = {id(part): place for place, part in enumerate(parts)}
    for part in parts:
        if (tenant := part.work.tenant) is not None:
            order.setdefault(tenant.plan.layout, len(order))

    def key(part: MicroBatch) -> tuple[Any, ...]:
        tenant = part.work.tenant
        place = (len(order), False) if tenant is None else (order[tenant.plan.layout], _drops(part))
        return (not part.work.training, *place, part.tokens, places[id(part)])

    return sorted(parts, key=key)


def build(
    parts: Sequence[MicroBatch], device: torch.device, dtype: torch.dtype, *, share: bool = False,
    scratch: Scratch | None = None,
) -> Stream:  # fmt: skip
    """Arrange micro-batches in a stream, and set the positions of each in it.

    Args:
        parts: the micro-batches.
        device: device of the model.
        dtype: dtype of the low-rank products.
        share: compute prefixes that rows of one operation share once.
        scratch: lends buffers for weights and gradients; by default they are new.
    """
    scratch = Scratch(0) if scratch is None else scratch
    borrowed: list[Tensor] = []
    parts = in_order(parts)
    ids: list[Tensor] = []
    starts: list[int] = []
    lengths: list[int] = []
    parents: list[int] = []
    at = 0
    for part in parts:
        begin = at
        pieces = pieces_of(part, share)
        offset = len(lengths)
        ids += pieces.ids
        starts += pieces.starts
        lengths += (sizes := [len(piece) for piece in pieces.ids])
        parents += [parent if parent < 0 else parent + offset for parent in pieces.parents]
        at += sum(sizes)
        part.computed, part.stream = at - begin, pieces.index + begin
    # A product of very few rows may use another kernel with other rounding, so short streams are padded.
    padding = max(0, LEAST_ROWS - at)
    if padding:
        ids.append(torch.zeros(padding, dtype=torch.int64))
        starts, lengths, parents = [*starts, 0], [*lengths, padding], [*parents, -1]
    where = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
    adapter_groups = _adapter_groups(parts, device, dtype, scratch, borrowed)
    trained = sum(part.computed for part in parts if part.work.training)
    total = at + padding
    routing = Routing([c for c, _ in adapter_groups], total, min(total, max(trained, LEAST_ROWS)) if trained else 0)
    segments = Segments.of(lengths, device, parents if max(parents, default=-1) >= 0 else None)
    tokens = torch.cat(ids)[None]
    return Stream(
        tokens.to(device), where[None].to(device), segments, routing, adapter_groups, padding, borrowed,
        patched_rows(parts, device),
    )  # fmt: skip


@dataclass(slots=True)
class TokenPieces:
    """Tokens of a micro-batch in stream order.

    Attributes:
        ids: tokens of each piece: a sequence, a shared prefix, or the rest of a sequence after one.
        starts: position of the first token of each piece in its sequence.
        parents: index of the piece that each continues; -1 for none.
        index: int64 `[S]`, index in the pieces of each token of the sequences.
    """

    ids: list[Tensor]
    starts: list[int]
    parents: list[int]
    index: Tensor


def pieces_of(part: MicroBatch, share: bool) -> TokenPieces:
    """Return the tokens of a micro-batch in stream order; planned once."""
    if part.pieces is None:
        part.pieces = _pieces(part, share)
    pieces: TokenPieces = part.pieces
    return pieces


def _pieces(part: MicroBatch, share: bool) -> TokenPieces:
    sequences = part.sequences
    if share and len(sequences) > 1 and not _drops(part) and not is_patched(part):
        plan = plan_prefixes(sequences)
        if plan.saved:
            ids = [sequences[row][start:stop] for row, start, stop in plan.pieces]
            index = torch.cat([torch.from_numpy(index) for index in plan.index])
            return TokenPieces(ids, list(plan.starts), list(plan.parents), index)
    return TokenPieces(sequences, [0] * len(sequences), [-1] * len(sequences), torch.arange(part.tokens))


def _adapter_groups(
    parts: Sequence[MicroBatch], device: torch.device, dtype: torch.dtype, scratch: Scratch, borrowed: list[Tensor]
) -> list[tuple[AdapterGroup, list[MicroBatch]]]:
    adapter_groups: list[tuple[AdapterGroup, list[MicroBatch]]] = []
    bounds = [0, *accumulate(part.computed for part in parts)]
    kinds = [None if p.work.tenant is None else (p.work.tenant.plan.layout, p.work.training, _drops(p)) for p in parts]
    for first, last in runs(kinds):
        tenant = parts[first].work.tenant
        if tenant is None:
            continue
        group_parts = list(parts[first:last])
        groups = Groups(bounds[first], tuple(stop - start for start, stop in pairwise(bounds[first : last + 1])))
        size = (len(group_parts), tenant.plan.layout.size)
        flats = [p.work.tenant.flat for p in group_parts if p.work.tenant is not None]
        many = len(flats) > 1 or flats[0].dtype != dtype
        weights = stack(flats, dtype, scratch.take(size, dtype, device, borrowed) if many else None)
        grads = None
        if group_parts[0].work.training:
            grads = scratch.take(size, torch.promote_types(dtype, torch.float32), device, borrowed).zero_()
        mask = _Dropout(group_parts, device) if _drops(group_parts[0]) else None
        adapter_groups.append((AdapterGroup(tenant.plan.layout, groups, weights, grads, mask), group_parts))
    return adapter_groups


def _drops(part: MicroBatch) -> bool:
    return part.work.training and part.work.tenant is not None and part.work.tenant.plan.dropout > 0


class _Dropout:
    """Dropout factors of an adapter group: functions of adapter seed, operation number, row and position."""

    def __init__(self, parts: Sequence[MicroBatch], device: torch.device) -> None:
        self.lengths = [part.computed for part in parts]
        self.rates = [part.work.tenant.plan.dropout for part in parts if part.work.tenant is not None]
        self.keys = torch.cat([keys_of(part) for part in parts]).to(device)

    def __call__(self, name: str, features: int, dtype: torch.dtype) -> Tensor:
        """Return the factors `[L, features]` of one layer."""
        site = zlib.crc32(name.encode())
        if min(self.rates) == max(self.rates):
            return masks_from(self.keys, site, features, self.rates[0], dtype)
        keys = torch.split_with_sizes(self.keys, self.lengths)
        return torch.cat([masks_from(k, site, features, rate, dtype) for k, rate in zip(keys, self.rates, strict=True)])


class Outputs:
    """Writes the outputs of micro-batches.

    Args:
        backbone: the model as body and head.
        device: device of the model.
        head: name of the output projection, if adapters may adapt it.
    """

    def __init__(self, backbone: Backbone, device: torch.device, head: str | None) -> None:
        self.backbone, self.device, self.head = backbone, device, head

    def write(self, parts: Sequence[MicroBatch], stream: Stream, hidden: Tensor) -> None:
        """Set the outputs of each micro-batch; those with equal needs of the same head share one product.

        Args:
            parts: the micro-batches of the pass.
            stream: the input of the pass.
            hidden: `[T, H]` hidden states, or `[T, V]` logits if the head cannot be called separately.
        """
        rows = {
            id(part): (adapter_group, row)
            for adapter_group, group_parts in stream.adapter_groups
            for row, part in enumerate(group_parts)
        }
        together: dict[Any, list[MicroBatch]] = {}
        for part in parts:
            if part.placeholder:
                if part.scoring is not None:
                    together.setdefault(_key(part, part.scoring.targets), []).append(part)
                continue
            needs, head = part.work.needs, self._head_of(part, rows)
            whole = needs.embeddings or needs.logits or head is None or not has_targets(part.batch.get("labels"))
            if whole:
                self._try([part], partial(self._whole, part, hidden, head))
            elif isinstance(head, nn.Module):
                together.setdefault(_key(part, tuple(part.batch["labels"].shape[2:])), []).append(part)
            else:
                self._try([part], partial(self._score, [part], hidden, head))
        for group in together.values():
            self._try(group, partial(self._score, group, hidden, self.backbone.head))

    @staticmethod
    def _try(parts: list[MicroBatch], call: Callable[[], None]) -> None:
        """Assign an error to the operations of the micro-batches, so that the others go on."""
        try:
            call()
        except (TwinkleError, ValueError, TypeError, LookupError) as error:
            for part in parts:
                part.work.error = error

    def _score(self, parts: list[MicroBatch], hidden: Tensor, head: Any) -> None:
        """Score the trained positions of micro-batches with equal needs in one product with the head."""
        needs, temperature = parts[0].work.needs, parts[0].work.temperature
        chosen = [_scored_places(part, needs) for part in parts]
        places = torch.cat([_in_stream(p, c) for p, c in zip(parts, chosen, strict=True)])
        targets = torch.cat([_targets(p, c) for p, c in zip(parts, chosen, strict=True)])
        chunk = needs.chunk_tokens or CHUNK_TOKENS
        rest = len(places) % chunk
        missing = LEAST_ROWS - rest if rest < LEAST_ROWS and (rest or not len(places)) else 0
        if missing:
            places = nn.functional.pad(places, (0, missing))
            targets = nn.functional.pad(targets, (0, 0) * (targets.dim() - 1) + (0, missing))
        if not parts[0].work.training:
            hidden = hidden.detach()  # the head would compute a gradient in its forward
        scores = score_tokens(
            hidden[places.to(self.device)],
            targets.to(self.device),
            head,
            transform=self._transform(parts[0], temperature),
            entropies=needs.entropies,
            uniform_logps=needs.uniform_logps,
            predictions=needs.predictions,
            top=needs.top,
            chunk_tokens=chunk,
        )
        sizes = [*map(len, chosen), missing]
        columns = [
            [None] * len(sizes) if values is None else torch.split_with_sizes(values, sizes)
            for values in (getattr(scores, field.name) for field in fields(TokenScores))
        ]
        for part, where, *part_values in zip(parts, chosen, *columns, strict=False):
            if part.placeholder:
                continue
            if isinstance(head, nn.Module):
                part.scoring = Scoring(needs, temperature, tuple(part.batch["labels"].shape[2:]), len(where))
            self._set(part, scatter_scores(part.batch["labels"], where.to(self.device), TokenScores(*part_values)))

    def _whole(self, part: MicroBatch, hidden: Tensor, head: Any) -> None:
        """Compute outputs that cannot be shared: whole logits, or one vector a row."""
        self._set(part, self._made(part, hidden, head))

    def _made(self, part: MicroBatch, hidden: Tensor, head: Any) -> ModelOutput:
        needs, temperature, batch = part.work.needs, part.work.temperature, part.batch
        scored = has_targets(batch.get("labels"))
        check_top(needs, scored and not needs.embeddings)
        rows = hidden[part.stream.to(self.device)]
        if needs.embeddings:
            if temperature != 1.0 or needs.logits:
                raise ArgumentError("task='embedding' makes no logits; leave temperature and return_logits out")
            return {"embeddings": embed(_padded(part, rows), batch)}
        if head is not None:
            rows = self._transform(part, temperature)(head(rows))
        elif temperature != 1.0:
            rows = rows / temperature
        logits = _padded(part, rows)
        outputs: ModelOutput = score_logits(logits, batch, needs) if scored else {}
        if needs.logits or not scored:
            outputs["logits"] = logits
        return outputs

    def _head_of(self, part: MicroBatch, rows: dict[int, tuple[AdapterGroup, int]]) -> Any:
        """Return the head of a micro-batch; None if the model returns whole logits."""
        if not self.backbone.splits:
            return None
        tenant = part.work.tenant
        if tenant is None or self.head is None or self.head not in tenant.plan.layout.entries:
            return self.backbone.head
        return _AdaptedHead(self.backbone.head, self.head, *rows[id(part)])

    def _transform(self, part: MicroBatch, temperature: float) -> LogitTransform:
        transform, softcap = self.backbone.transform, part.work.needs.softcap
        if softcap is not None and softcap != transform.softcap:
            raise ArgumentError(
                f"softcap of the loss must be that of the model ({transform.softcap}), got {softcap}; leave softcap "
                "out to use the model's own"
            )
        return LogitTransform(transform.scale, transform.softcap, temperature)

    @staticmethod
    def _set(part: MicroBatch, outputs: ModelOutput) -> None:
        part.item = Pass(part.batch, outputs, list(part.rows))  # type: ignore[arg-type]


class _AdaptedHead:
    """The output projection with one adapter's low-rank term."""

    def __init__(self, head: Any, name: str, adapter_group: AdapterGroup, row: int) -> None:
        self.head, self.name, self.adapter_group, self.row = head, name, adapter_group, slice(row, row + 1)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits `[n, V]` of hidden states `[n, H]`."""
        adapter_group, count = self.adapter_group, len(hidden)
        grads = None if adapter_group.grads is None else adapter_group.grads[self.row]
        head_group = AdapterGroup(adapter_group.layout, Groups(0, (count,)), adapter_group.weights[self.row], grads)
        routing = Routing([head_group], count, 0 if grads is None else count)
        return lowrank.linear(hidden, self.head.weight, self.head.bias, routing, self.name)


def _key(part: MicroBatch, targets: tuple[int, ...]) -> Any:
    """Return what micro-batches must have in common to be scored together."""
    return part.work.needs, part.work.temperature, part.work.training, targets


def _scored_places(part: MicroBatch, needs: Needs) -> Tensor:
    if part.placeholder and part.scoring is not None:
        return torch.arange(part.scoring.count)
    return trained_places(part.batch, needs)


def _in_stream(part: MicroBatch, places: Tensor) -> Tensor:
    if part.placeholder:
        return part.stream[places % max(1, len(part.stream))]
    return part.stream[torch.searchsorted(part.places, places)]


def _targets(part: MicroBatch, places: Tensor) -> Tensor:
    if part.placeholder and part.scoring is not None:
        return torch.zeros(len(places), *part.scoring.targets, dtype=torch.int64)
    return targets_at(part.batch["labels"], places)


def _padded(part: MicroBatch, rows: Tensor) -> Tensor:
    """Return `[B, T, ...]` of `[S, ...]`, with 0 where nothing was computed."""
    shape = part.batch["input_ids"].shape[:2]
    out = rows.new_zeros((shape.numel(), *rows.shape[1:]))
    return out.index_put((part.places.to(rows.device),), rows).view(*shape, *rows.shape[1:])
