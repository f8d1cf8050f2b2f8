"""Runs a model on the token stream of a step, with the adapters of its rows and attention over the KV cache.

A step concatenates tokens of many sequences to one row `[1, T]` without padding between them. All layers but attention
treat tokens independently, so only attention must know the sequences: `CacheScope` replaces it during the forward.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from twinkle.errors import Unsupported
from twinkle.logging import get_logger
from twinkle_torch.head import is_plain, product_of, wide
from twinkle_torch.numerics import Evidence, judge, probe_tokens, turned_off
from twinkle_torch.segments import Segments
from twinkle_transformers.backbone import Backbone
from twinkle_transformers.lowrank import products as lowrank
from twinkle_transformers.lowrank.grouped import Groups, runs
from twinkle_transformers.lowrank.layout import AdapterVersion
from twinkle_transformers.lowrank.products import AdapterGroup, Routing
from twinkle_transformers.router_replay import RouterReplay
from twinkle_transformers.router_replay import routing as routing_experts
from twinkle_transformers.sampling.adapters import Banks, sites_of
from twinkle_transformers.sampling.attention import AttentionMetadata, CacheScope, TokenSpan
from twinkle_transformers.sampling.kv_cache import KVCache, LayerShape
from twinkle_transformers.segments import Scope, Switch, is_routed
from twinkle_transformers.sites import Site, install

Texts = tuple[tuple[int, ...], ...]
_DYNAMIC_ROPE = ("dynamic", "longrope")
"""Rotary embeddings that depend on the longest sequence of a call."""
_LENGTHS = (7, 5, 3)
_CUTS = (((0, 2), (2, 6), (6, 7)), ((0, 3), (3, 4), (4, 5)), ((0, 1), (1, 2), (2, 3)))


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The tokens that a step reads of one sequence.

    Attributes:
        slot: slot of the sequence in the KV cache.
        start: number of its tokens that are already in the cache.
        tokens: the tokens to read, at least one.
        version: the adapter, None for the base model.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    version: AdapterVersion | None


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """The input of a step's forward.

    Attributes:
        ids: int64 `[1, T]`.
        positions: int64 `[1, T]`.
        metadata: the tokens of the step, grouped by attention call.
        firsts: first row of each piece, in the order of the pieces.
        owners: the adapter of each token, in the order of the stream; None for padding.
    """

    ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    firsts: list[int]
    owners: list[AdapterVersion | None]


def lay_out(pieces: Sequence[Piece], device: torch.device, multiple: int = 1) -> Stream:
    """Concatenate pieces: those of one adapter together, adapters of one layout together, the base model last.

    In this order, the low-rank terms of all adapters of one layout are one grouped product over contiguous rows, so
    that the number of matrix products does not increase with the number of adapters.

    Args:
        pieces: pieces of a step.
        device: device of the model.
        multiple: the stream is padded to a multiple of this number of tokens.
    """
    layouts: dict[object, int] = {}
    keys: dict[str, int] = {}
    for piece in pieces:
        if piece.version is not None:
            layouts.setdefault(piece.version.layout, len(layouts))
            keys.setdefault(piece.version.key, len(keys))

    def position(index: int) -> tuple[int, int, int]:
        version = pieces[index].version
        if version is None:
            return len(layouts), 0, pieces[index].slot
        return layouts[version.layout], keys[version.key], pieces[index].slot

    order = sorted(range(len(pieces)), key=position)
    firsts = [0] * len(pieces)
    ids: list[int] = []
    positions: list[int] = []
    owners: list[AdapterVersion | None] = []
    token_spans = []
    for index in order:
        piece = pieces[index]
        count = len(piece.tokens)
        firsts[index] = len(ids)
        token_spans.append(TokenSpan(piece.slot, piece.start, len(ids), count))
        ids += piece.tokens
        positions += range(piece.start, piece.start + count)
        owners += [piece.version] * count
    padding = -len(ids) % multiple
    padded = torch.tensor([ids + [0] * padding, positions + [0] * padding], device=device)
    return Stream(
        padded[:1],
        padded[1:],
        AttentionMetadata(token_spans, len(ids) + padding, device),
        firsts,
        owners + [None] * padding,
    )


def route(owners: Sequence[AdapterVersion | None], weights: Callable[[list[AdapterVersion]], Tensor]) -> Routing | None:
    """Return the adapter of each row as groups of rows; None if no row has an adapter.

    Args:
        owners: adapter of each row; rows of one adapter are contiguous.
        weights: function that stacks the weights of versions of one layout.
    """
    groups = [(owners[first], first, past - first) for first, past in runs(_keys(owners)) if owners[first] is not None]
    adapter_groups = []
    for first, past in runs([version.layout for version, _, _ in groups if version is not None]):
        group = groups[first:past]
        versions = [version for version, _, _ in group if version is not None]
        lengths = Groups(group[0][1], tuple(count for _, _, count in group))
        adapter_groups.append(AdapterGroup(versions[0].layout, lengths, weights(versions)))
    return Routing(adapter_groups, len(owners)) if adapter_groups else None


def _keys(owners: Sequence[AdapterVersion | None]) -> list[str | None]:
    return [None if version is None else version.key for version in owners]


class Read:
    """The result of a step's forward.

    Attributes:
        stream: its input.
        hidden: last hidden states `[T, H]`.
    """

    def __init__(self, stream: Stream, hidden: Tensor) -> None:
        self.stream, self.hidden = stream, hidden


class Runner:
    """Runs a causal language model step by step.

    Attributes:
        model: the Hugging Face module.
        device: device of the model.
        vocabulary: size of its embedding.
        evidence: measurement by `store`; None before.
    """

    def __init__(
        self, model: Any, *, row_multiple: int = 1, backbone: Backbone | None = None,
        routers: RouterReplay | None = None,
    ) -> None:  # fmt: skip
        """Inspect the model, without running it.

        Args:
            model: the Hugging Face module; layers inside may be wrapped by PEFT.
            row_multiple: steps are padded to a multiple of this number of rows.
            backbone: the model as body and head, with its evidence, if it was measured before.
            routers: records the experts of each token into the KV cache; None records nothing.
        """
        self.model, self.row_multiple, self.routers = model, row_multiple, routers
        weight = model.get_input_embeddings().weight
        self.device: torch.device = weight.device
        self.vocabulary = int(weight.shape[0])
        self.evidence: Evidence | None = None
        self._banks = Banks()
        self._sites: dict[str, Site] | None = None
        self._structure: tuple[int, ...] = ()
        if backbone is not None:
            self.backbone = backbone

    @property
    def sites(self) -> dict[str, Site]:
        """The layers that adapters may adapt, by name; the first access installs the low-rank forward in them.

        Raises:
            Unsupported: a layer's forward was replaced.
        """
        if self._sites is None:
            sites = sites_of(self.model)
            install(list(sites.values()))
            self._sites = sites
        return self._sites

    def changed(self) -> bool:
        """Return whether weights of the base model were written since the last call; inspects its layers again.

        Writes through `.data` are not detected.
        """
        state: list[int] = []
        for name, parameter in self.model.named_parameters():
            if ".lora_" not in name:
                state += parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version
        structure = tuple(map(id, self.model.modules()))
        if structure != self._structure[: len(structure)] or len(self._structure) != len(structure) + len(state):
            self._sites = None
        before, self._structure = self._structure, (*structure, *state)
        return before != self._structure

    def store(self) -> KVCache:
        """Measure whether steps compute the same as a forward over whole sequences, and return an empty KV cache.

        Three texts are read in shared steps, and each one separately. The difference must be of the size of
        rounding, and changing one text must not change the others: otherwise sequences leak into each other.

        Raises:
            Unsupported: the results differ, or the model cannot run in steps. `evidence` has the numbers.
        """
        self.evidence = turned_off("steps") or self._judge()
        get_logger().debug("%s: %s", type(self.model).__name__, self.evidence)
        if not self.evidence.exact:
            raise Unsupported(self.evidence.reason)
        return self._store()

    def _judge(self) -> Evidence:
        if reason := self._refusal():
            return Evidence("steps", False, "structure", reason)
        texts, others = (
            tuple(tuple(probe_tokens(sum(_LENGTHS), self.vocabulary, changed=changed)[a:b]) for a, b in _bounds())
            for changed in (False, True)
        )
        changes = []
        for number, changed_text in enumerate(others):
            rows = [row for i, (a, b) in enumerate(_bounds()) if i != number for row in range(a, b)]
            changes.append(((*texts[:number], changed_text, *texts[number + 1 :]), rows))
        return judge("steps", self._in_steps, self._whole, texts, changes, routed=is_routed(self.model))

    def _store(self) -> KVCache:
        """Return an empty KV cache with the shapes of the layers, measured by a forward of one token."""
        probe = _Probe(self._switch)
        self._body(probe_tokens(1, self.vocabulary), probe)
        experts = 0 if self.routers is None else len(self.routers.layers) * self.routers.count
        return KVCache(probe.layers, self.device, experts)

    def read(self, pieces: Sequence[Piece], store: KVCache) -> Read:
        """Run one step; keys and values are written to the KV cache, from the start of each piece on."""
        if any(piece.version is not None for piece in pieces):
            _ = self.sites  # installs the low-rank forward
        stream = lay_out(pieces, self.device, self.row_multiple)
        routing = self.route(stream.owners)
        routes = None if self.routers is None else self.routers.recording()
        with CacheScope(stream.metadata, store, self._switch, routing), routing_experts(routes):
            hidden = self._run(stream.ids, stream.positions)
        if routes is not None:
            experts = routes.used().flatten(1)
            for piece, first in zip(pieces, stream.firsts, strict=True):
                count = len(piece.tokens)
                store.experts[piece.slot, piece.start : piece.start + count] = experts[first : first + count]
        return Read(stream, hidden)

    def experts_of(self, store: KVCache, slot: int, tokens: int) -> Tensor | None:
        """Return the experts of the first tokens of a slot, int16 `[tokens, layers, k]` on the CPU; None if unknown."""
        if self.routers is None:
            return None
        return store.experts[slot, :tokens].cpu().view(tokens, len(self.routers.layers), self.routers.count)

    def logits(self, read: Read, rows: Sequence[int]) -> Tensor:
        """Return the logits `[n, V]` of rows of the stream, in ascending order, float32 or wider."""
        hidden = read.hidden if len(rows) == len(read.hidden) else read.hidden[torch.tensor(rows, device=self.device)]
        head: Any = self.backbone.head
        owners = [read.stream.owners[row] for row in rows]
        if padding := -len(hidden) % self.row_multiple:
            hidden = nn.functional.pad(hidden, (0, 0, 0, padding))
            owners += [None] * padding
        routing = self.route(owners) if self.head_name else None
        if routing is not None and routing.at(self.head_name):
            base = getattr(head, "base_layer", head)
            raw = lowrank.linear(hidden, base.weight, base.bias, routing, self.head_name)
        else:
            raw = self._plain_head(hidden, head)
        return self.backbone.transform.apply_(raw[: len(rows)].to(wide(raw.dtype)))

    def _plain_head(self, hidden: Tensor, head: Any) -> Tensor:
        base = getattr(head, "base_layer", head)
        if is_plain(base):
            logits: Tensor = nn.functional.linear(*product_of(hidden, base))
            return logits
        out: Tensor = base(hidden)
        return out

    @cached_property
    def backbone(self) -> Backbone:
        """The model as body and head."""
        return Backbone.of(self.model)

    @cached_property
    def head_name(self) -> str:
        """Path of the output projection in the model; "" if it is not found."""
        head = self.model.get_output_embeddings()
        return next((name for name, module in self.model.named_modules() if module is head), "")

    @property
    def _switch(self) -> Switch:
        return self.backbone.segmenter._switch

    def route(self, owners: Sequence[AdapterVersion | None]) -> Routing | None:
        """Return the adapter of each row; see the function `route`."""
        return route(owners, self._stacked)

    def _stacked(self, versions: list[AdapterVersion]) -> Tensor:
        kind = self.device.type
        on = torch.is_autocast_enabled(kind)
        return self._banks.of(versions, torch.get_autocast_dtype(kind) if on else self.model.dtype)

    def _refusal(self) -> str | None:
        backbone, config = self.backbone, self.model.config.get_text_config()
        if backbone.segmenter.check() is not None:
            return f"several sequences in one row are off: {backbone.segmenter.reason}"
        if not backbone.splits:
            return "its body and head, one after the other, do not give its own logits"
        if self._switch.mixers:
            return f"{type(self._switch.mixers[0]).__name__} keeps a state of its own"
        if "position_ids" not in inspect.signature(self.model.base_model.forward).parameters:
            return "it takes no position_ids"
        if kinds := sorted(set(_rope_types(getattr(config, "rope_parameters", None))) & set(_DYNAMIC_ROPE)):
            return f"its rotary embedding ({kinds[0]}) changes with the longest sequence of a batch"
        return None

    def _body(self, ids: Sequence[int], scope: "_Probe") -> Tensor:
        inputs = torch.tensor([ids, range(len(ids))], device=self.device)
        with scope:
            return self._run(inputs[:1], inputs[1:])

    def _run(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return last hidden states `[T, H]`.

        The mask is all ones and has no effect; without it transformers would search `position_ids` for packed rows.
        """
        mask = torch.ones_like(ids, dtype=torch.bool)
        body = self.model.base_model
        out = body(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def _whole(self, texts: Texts) -> Tensor:
        """Return the hidden states of the texts, each from a separate forward."""
        return torch.cat([self._body(text, _Probe(self._switch)) for text in texts])

    def _in_steps(self, texts: Texts) -> Tensor:
        """Return the hidden states of the texts, read together in shared steps."""
        store = self._store()
        store.resize(len(texts), max(map(len, texts)))
        hidden_states: list[list[Tensor]] = [[] for _ in texts]
        for bounds in zip(*_CUTS, strict=True):
            pieces = [Piece(slot, start, texts[slot][start:stop], None) for slot, (start, stop) in enumerate(bounds)]
            read = self.read(pieces, store)
            for outputs, piece, first in zip(hidden_states, pieces, read.stream.firsts, strict=True):
                outputs.append(read.hidden[first : first + len(piece.tokens)])
        return torch.cat([torch.cat(outputs) for outputs in hidden_states])


def _bounds() -> list[tuple[int, int]]:
    ends = [0, *accumulate(_LENGTHS)]
    return list(pairwise(ends))


class _Probe(Scope):
    """Records the shapes of keys and values of the layers."""

    def __init__(self, switch: Switch) -> None:

        super().__init__(Segments.of([1]), switch)
        self.layers: list[LayerShape] = []

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Record the shapes, and attend."""
        kind = q.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else v.dtype
        self.layers.append(LayerShape((k.shape[1], k.shape[2]), (v.shape[1], v.shape[2]), dtype))
        self.segments = Segments.of([len(q)], q.device)
        return super().attend(module, q, k, v, **options)


def _rope_types(parameters: Any) -> list[str]:
    """Return the types of rotary embedding in `rope_parameters`, which may have one for each type of layer."""
    if not isinstance(parameters, dict):
        return []
    types = [parameters["rope_type"]] if isinstance(parameters.get("rope_type"), str) else []
    return types + [kind for value in parameters.values() for kind in _rope_types(value)]
