"""Fused passes over micro-batches of several operations: composition, memory, forward and backward, and cost."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from inspect import unwrap
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from twinkle.engine import AdapterRef, Operation, Usage
from twinkle.errors import ArgumentError, CapacityError
from twinkle.logging import get_logger
from twinkle_torch.head import CHUNK_TOKENS
from twinkle_torch.numerics import Evidence, turned_off
from twinkle_torch.segments import Segments
from twinkle_transformers.backbone import Backbone, Needs
from twinkle_transformers.group import OptimizerGroup
from twinkle_transformers.lowrank.grouped import Groups
from twinkle_transformers.lowrank.layout import Layout, Shape
from twinkle_transformers.lowrank.products import AdapterGroup, Routing
from twinkle_transformers.memory import SHARE, Recompute
from twinkle_transformers.pool.compatibility import measure_adapters, run_each_sequence
from twinkle_transformers.pool.config import AdapterPlan
from twinkle_transformers.pool.embedding import changed_embeddings
from twinkle_transformers.pool.stream import Outputs, Scratch, Stream, TokenPieces, build, pieces_of
from twinkle_transformers.pool.tenants import Tenant
from twinkle_transformers.pool.work import MicroBatch, Scoring, WorkItem, split_in_half
from twinkle_transformers.sites import ExpertSite, Site

PASS, PARTS, ROWS = "pass", "parts", "rows"
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
"""Names of the number of experts per token in configurations of models."""


@dataclass(frozen=True, slots=True)
class PassLoad:
    """Size of a pass.

    Attributes:
        tokens: number of tokens of its stream.
        width: length of its longest sequence.
        beside: bytes that it needs beside activations: copies of weights, gradients, hidden states and logits of the
            head.
    """

    tokens: int
    width: int
    beside: int


class LoadEstimator:
    """Estimates the size of passes of one model; it reads the configuration once, because attribute access is slow.

    Args:
        backbone: the model.
        dtype: of the low-rank products.

    Attributes:
        layers: number of decoder layers.
    """

    def __init__(self, backbone: Backbone, dtype: torch.dtype) -> None:
        config = backbone.model.config.get_text_config()
        self.layers = max(1, getattr(config, "num_hidden_layers", None) or 1)
        self._narrow, self._wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
        self._logits = config.vocab_size * self._wide
        self._hidden = (getattr(config, "hidden_size", None) or 0) * self._wide
        self._splits, self._capped = backbone.splits, bool(backbone.transform.softcap)

    def estimate(self, parts: Sequence[MicroBatch], *, share: bool) -> PassLoad:
        """Return the size of a pass over micro-batches (and their twins).

        Args:
            parts: the micro-batches.
            share: whether prefixes that rows of a micro-batch share are computed once.
        """
        everything = [*parts, *(part.twin for part in parts if part.twin is not None)]
        tokens = sum(len(piece) for part in everything for piece in pieces_of(part, share).ids)
        beside = chunk = 0
        for part in everything:
            kept, passing = self._head_bytes(part)
            beside, chunk = beside + kept + self._adapter_bytes(part), max(chunk, passing)
        return PassLoad(tokens, max(part.width for part in parts), beside + chunk)

    def _adapter_bytes(self, part: MicroBatch) -> int:
        """Return the bytes of an adapter's weights and gradients in a pass, and of gradients not yet allocated."""
        work = part.work
        if work.tenant is None:
            return 0
        numbers, flat = work.tenant.plan.layout.size, work.tenant.flat
        if not work.training:
            return numbers * self._narrow
        new = (flat.grad is None and work.tenant.spare is None) + (len(work.parts) > 1 and work.grad is None)
        return numbers * (self._narrow + self._wide + new * flat.element_size())

    def _head_bytes(self, part: MicroBatch) -> tuple[int, int]:
        """Return the bytes of the head's results that are kept, and of the logits that exist at the same time."""
        needs = part.work.needs
        if needs.embeddings:
            return 0, 0
        if needs.logits or not self._splits:
            return 3 * part.tokens * self._logits, 0  # logits, log-probabilities, and the gradient of one of them
        copies = 4 if needs.entropies or needs.uniform_logps or self._capped else 2
        rows = min(part.tokens, needs.chunk_tokens or CHUNK_TOKENS)
        return part.tokens * self._hidden, copies * rows * self._logits


@dataclass(slots=True, eq=False)
class ForwardPass:
    """A forward pass: its micro-batches, whose outputs have a graph, and the buffers that the backward fills."""

    parts: list[MicroBatch]
    stream: Stream
    training: bool
    recomputed: bool


class FusedPasses:
    """Runs micro-batches of several operations through one model in one pass.

    Args:
        backbone: the model as body and head.
        device: device of the model.
        autocast: the context in which forwards run.
        dtype: of the low-rank products.
        recompute: decides whether activations are recomputed.
        head: name of the output projection, if adapters may adapt it.
        alone: whether each sequence runs through the model by itself.

    Attributes:
        share_prefixes: whether prefixes that rows of an operation share are computed once.
    """

    def __init__(
        self, backbone: Backbone, device: torch.device, autocast: Callable[[], AbstractContextManager[None]],
        dtype: torch.dtype, recompute: Recompute, head: str | None, *, alone: bool = False,
    ) -> None:  # fmt: skip
        self.backbone, self.device, self.dtype = backbone, device, dtype
        self.recompute, self._alone = recompute, alone
        self._autocast = autocast
        self._outputs = Outputs(backbone, device, head)
        self._layers = [m for m in backbone.model.modules() if _can_recompute(m)]
        self.share_prefixes = False
        self.scratch, self.estimator = Scratch(), LoadEstimator(backbone, dtype)
        self.evidence: Evidence | None = None

    def measure(self, sites: Mapping[str, Site]) -> None:
        """Measure whether adapters that share a pass compute what each computes alone; if not, stop sharing passes."""
        if self._alone:
            why = turned_off("fused") or self.backbone.segmenter.evidence["packing"]
            self.evidence = replace(why, path="fused")
            return
        with self._autocast():
            self.evidence = measure_adapters(self.backbone, self._body, sites, self.dtype)
        if not self.evidence.exact:
            get_logger().warning(
                "%s: adapters do not share passes: %s. Each sequence runs through the model by itself, which is slower",
                type(self.backbone.model).__name__, self.evidence.reason,
            )  # fmt: skip
            self._alone = True

    def load(self, parts: Sequence[MicroBatch]) -> PassLoad:
        """Return the size of a pass over micro-batches."""
        return self.estimator.estimate(parts, share=self.share_prefixes and not self._alone)

    def change(self, backbone: Backbone, alone: bool) -> None:
        """Use a model that a patch has changed: its body and head, and whether sequences run through it separately."""
        self.backbone = self._outputs.backbone = backbone
        self._alone = alone
        self.estimator = LoadEstimator(backbone, self.dtype)
        self.recompute.forget()

    def forward(self, parts: Sequence[MicroBatch], free: int | None = None) -> ForwardPass:
        """Compute the outputs of micro-batches; with a graph if one of them is trained.

        Args:
            parts: the micro-batches.
            free: free bytes, if they were measured just before; by default they are measured.
        """
        training = any(part.work.training for part in parts)
        if training:
            load = self.load(parts)
            self.recompute.prepare(load.tokens, load.width, masked=False, beside=load.beside, free=free)
        twins = [part.twin for part in parts if part.twin is not None]
        parts = [*parts, *twins]
        stream = build(
            parts, self.device, self.dtype, share=self.share_prefixes and not self._alone, scratch=self.scratch
        )
        with torch.set_grad_enabled(training):
            hidden = self.recompute.run(lambda: self._body(stream)) if training else self._body(stream)
            with self._autocast():
                self._outputs.write(parts, stream, hidden)
        return ForwardPass(parts, stream, training, training and self.recompute.on)

    def probe(self, ids: Tensor, layout: Layout) -> Tensor:
        """Run one sequence as a training pass of one adapter would.

        Args:
            ids: int64 `[1, T]`.
            layout: layout of the adapter; its weights are 0.

        Returns:
            hidden states (or logits) `[T, ...]`, with a graph.
        """
        total = ids.shape[1]
        weights = torch.zeros(1, layout.size, dtype=self.dtype, device=self.device)
        routing = Routing([AdapterGroup(layout, Groups(0, (total,)), weights)], total, total)
        positions = torch.arange(total, device=self.device)[None]
        return self._body(Stream(ids, positions, Segments.of([total], self.device), routing, []))

    def backward(self, forward_pass: ForwardPass) -> None:
        """Run the backward of all finite losses; gradients go to the buffers of the adapter groups."""
        roots = []
        for part in forward_pass.parts:
            item = part.item
            if part.work.training and part.work.error is None and item is not None and item.loss is not None:
                roots.append(item.loss.loss_sum)
        if roots:
            torch.autograd.backward(roots)

    def _body(self, stream: Stream) -> Tensor:
        patched = changed_embeddings(self.backbone.model, stream.patched)
        with self._recomputing(), self._autocast(), patched:
            if self._alone:
                return run_each_sequence(self._run, stream)
            given = {"input_ids": stream.ids}
            if "position_ids" in self.backbone.inputs:
                given["position_ids"] = stream.positions
            with self.backbone.segmenter.within(stream.segments, stream.routing):
                return self._run(given)

    def _run(self, given: Mapping[str, Tensor]) -> Tensor:
        """Return the hidden states of one row, or its logits if the head cannot be called separately."""
        output: Tensor
        if self.backbone.splits:
            output = self.backbone.body(**given, use_cache=False).last_hidden_state[0]
        else:
            output = self.backbone.model(**given, use_cache=False).logits[0]
        return output

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Set `training` on checkpointed layers, which recompute only then, but not on the modules inside."""
        on = self.recompute.on and torch.is_grad_enabled()
        for layer in self._layers if on else ():
            layer.training = True
        try:
            yield
        finally:
            for layer in self._layers if on else ():
                layer.training = False


def _can_recompute(layer: nn.Module) -> bool:
    """Return whether `training` changes nothing in a layer's own forward but recomputation."""
    return isinstance(layer, GradientCheckpointingLayer) and "training" not in _names(unwrap(type(layer).forward))


def _names(function: Any) -> set[str]:
    code = function.__code__
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names, *(name for part in inner for name in part.co_names)}


class Admission:
    """Sorts the micro-batches of operations into passes that fit into memory.

    A pass that would take more than 80 % of the free memory recomputes its activations. If that is not enough, it gets
    fewer micro-batches, and micro-batches are cut. The results stay the same. An operation fails if one of its
    micro-batches neither fits alone nor can be cut; the other operations go on. A pass that cannot be measured is
    admitted.

    Args:
        passes: runs the passes.
    """

    def __init__(self, passes: FusedPasses) -> None:
        self.passes = passes

    def sort(self, works: Sequence[WorkItem], budget: int) -> Iterator[tuple[list[MicroBatch], int | None]]:
        """Yield the micro-batches of each pass and the free bytes; training comes first.

        Args:
            works: operations; those that fail meanwhile are left out.
            budget: maximum number of tokens of a pass, unless a single micro-batch has more.
        """
        waiting = sorted(
            (part for work in works for part in work.parts), key=lambda p: (not p.work.training, p.work.index, p.first)
        )
        while waiting := [part for part in waiting if part.work.error is None]:
            taken = _within(waiting, budget)
            free = self.free_for(taken)
            while not self.fits(taken, free):
                if len(taken) > 1:
                    taken = taken[:-1]
                elif cut := split_in_half(taken[0], self.passes.backbone):
                    waiting[:1], taken = cut, cut[:1]  # the first waiting micro-batch is always taken
                else:
                    taken[0].work.error = self._refusal(taken[0], free or 0)
                    break
            else:
                gone = set(map(id, taken))
                waiting = [part for part in waiting if id(part) not in gone]
                yield taken, free

    def needed(self, parts: Sequence[MicroBatch], *, recomputed: bool) -> int | None:
        """Return the bytes that a pass needs; None if activations could not be measured."""
        load = self.passes.load(parts)
        recompute = self.passes.recompute
        kept = recompute.needed_bytes(load.tokens, load.width, masked=False, recomputed=recomputed)
        if kept is None:
            return None
        if not any(part.work.training for part in parts):
            kept //= self.passes.estimator.layers  # without a graph, activations of only one layer exist at a time
        return kept + load.beside

    def free_for(self, parts: Sequence[MicroBatch]) -> int | None:
        """Return the free bytes for a pass over micro-batches; None if unknown."""
        recompute = self.passes.recompute
        if recompute.available() is None:
            return None
        return recompute.free_for(self.needed(parts, recomputed=recompute.mode is True) or 0)

    def fits(self, parts: Sequence[MicroBatch], free: int | None) -> bool:
        """Return whether a pass fits into `free` bytes; True if it cannot be measured."""
        if free is None:
            return True
        recompute = self.passes.recompute
        ways = [False] if recompute.mode is not True else []
        if recompute.possible and any(part.work.training for part in parts):
            ways.append(True)
        needed = (self.needed(parts, recomputed=recomputed) for recomputed in ways or [False])
        return any(size is None or size <= SHARE * free for size in needed)

    def _refusal(self, part: MicroBatch, free: int) -> CapacityError:
        size = self.needed([part], recomputed=part.work.training and self.passes.recompute.possible) or 0
        return no_room(part, f"needs about {size:,} bytes, and {free:,} are free, of which it may take 80 %")


def no_room(part: MicroBatch, why: str) -> CapacityError:
    """Return the error of an operation with a micro-batch that neither fits nor can be cut."""
    whose = "the base model" if part.work.name is None else f"adapter {part.work.name!r}"
    rows = f"{len(part.rows)} row{'s' if len(part.rows) > 1 else ''} of {part.tokens} tokens"
    return CapacityError(f"{whose}: a pass over {rows} {why}; give shorter rows, or free memory")


def _within(waiting: Sequence[MicroBatch], budget: int) -> list[MicroBatch]:
    """Return the first micro-batches within the budget; at least one, and from one operation of each adapter.

    How many operations of an adapter are waiting depends on timing, and its results must not.
    """
    size, taken = 0, list[MicroBatch]()
    works: dict[int, WorkItem] = {}
    for part in waiting:
        if part.work.tenant is not None and works.setdefault(id(part.work.tenant), part.work) is not part.work:
            continue
        size += part.tokens if part.twin is None else 2 * part.tokens
        if taken and size > budget:
            break
        taken.append(part)
    return taken


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


class UsageMeter:
    """Counts the tokens and floating-point operations of passes.

    It counts products of a token with weights, at two operations a weight: linear layers of the text decoder (of
    experts, those that the token is routed to), the output projection, and the adapter's matrices. It does not count
    embeddings, norms, convolutions, and products of attention between tokens.

    Args:
        model: the Hugging Face module.

    Attributes:
        base: number of weights of the base model that a token is multiplied with.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        counts = (getattr(config, name, None) for name in _ACTIVE)
        self._active = next((count for count in counts if isinstance(count, int)), 1)
        self._shares = dict(self._listed_experts(model))
        self.base = sum(self._met(*weight) for weight in _weights(model))
        self.of_adapter = lru_cache(maxsize=None)(self._of_adapter)

    def _met(self, path: str, count: int, experts: int) -> float:
        """Return how many of the weights at `path` a token is multiplied with."""
        return count * (min(self._active, experts) / experts if experts else self._shares.get(path, 1.0))

    def _of_adapter(self, layout: Layout) -> float:
        """Return how many weights of an adapter a token is multiplied with."""
        return sum(
            self._met(name, s.rank * (s.fan_in + s.fan_out) * max(1, s.experts), s.experts)
            for name, s in layout.shapes.items()
        )

    def _listed_experts(self, model: Any) -> Iterator[tuple[str, float]]:
        """Yield the modules of experts in a `ModuleList`, and the share of tokens that is routed to each."""
        for path, module in model.named_modules():
            if path.endswith(".experts") and isinstance(module, nn.ModuleList):
                share = min(self._active, len(module)) / len(module)
                yield from ((f"{path}.{name}", share) for name, _ in module.named_modules())

    def of(self, forward_pass: ForwardPass) -> Iterator[tuple[MicroBatch, Usage]]:
        """Yield the cost of each micro-batch of a pass.

        With recomputed activations every token runs through the model twice. Padding tokens of a very small pass count
        for the last micro-batch, so that the sum over all is what was computed.
        """
        twice = 2 if forward_pass.recomputed else 1
        last = max(forward_pass.parts, key=lambda part: int(part.stream[-1])) if forward_pass.stream.padding else None
        for part in forward_pass.parts:
            tenant = part.work.tenant
            own = 0.0 if tenant is None else self.of_adapter(tenant.plan.layout)
            forward = 2 * self.base + 2 * own
            back = 2 * self.base + 4 * own if part.work.training else 0.0
            padded = forward_pass.stream.padding * twice if part is last else 0
            yield part, Usage(part.tokens, part.computed * twice, padded, part.computed * (twice * forward + back))


def _weights(model: Any) -> Iterator[tuple[str, int, int]]:
    """Yield path, number of weights, and number of experts (or 0) of each matrix that tokens are multiplied with."""
    head = model.get_output_embeddings()
    inside = {id(module) for module in model.get_decoder().modules()} - {id(head)}
    for path, module in model.named_modules():
        if id(module) not in inside or isinstance(module, (nn.Embedding, nn.Conv1d)):
            continue
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim in (2, 3) and not name.endswith("bias"):
                yield path, weight.numel(), weight.shape[0] if weight.ndim == 3 else 0
    if head is not None:
        yield "", head.weight.numel(), 0
