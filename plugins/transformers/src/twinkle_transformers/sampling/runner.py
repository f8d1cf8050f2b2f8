"""Runs a model over a step's stream, with the adapters of its rows, against keys and values that it has."""

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
from twinkle_transformers.backbone import Backbone
from twinkle_transformers.lowrank import products as lowrank
from twinkle_transformers.lowrank.grouped import Groups, runs
from twinkle_transformers.lowrank.products import AdapterGroup, Routing
from twinkle_transformers.sampling.adapters import Banks, sites_of
from twinkle_transformers.sampling.attention import AttentionMetadata, CacheScope, Stretch
from twinkle_transformers.sampling.kv_cache import KVCache, LayerShape
from twinkle_transformers.segments import Scope, Switch, is_routed
from twinkle_transformers.sites import Site, install
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
    reach: AttentionMetadata
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
    return Stream(
        both[:1], both[1:], AttentionMetadata(stretches, len(ids) + spare, device), firsts, owners + [None] * spare
    )


def route(owners: Sequence[AdapterVersion | None], weights: Callable[[list[AdapterVersion]], Tensor]) -> Routing | None:
    """Return which rows belong to which adapter; None if none does.

    Args:
        owners: of each row; those of one adapter next to each other.
        weights: stacks the weights of versions of one layout.
    """
    groups = [(owners[first], first, past - first) for first, past in runs(_keys(owners)) if owners[first] is not None]
    adapter_groups = []
    for first, past in runs([version.layout for version, _, _ in groups if version is not None]):
        part = groups[first:past]
        versions = [version for version, _, _ in part if version is not None]
        lengths = Groups(part[0][1], tuple(count for _, _, count in part))
        adapter_groups.append(AdapterGroup(versions[0].layout, lengths, weights(versions)))
    return Routing(adapter_groups, len(owners)) if adapter_groups else None


def _keys(owners: Sequence[AdapterVersion | None]) -> list[str | None]:
    return [None if version is None else version.key for version in owners]


Texts = tuple[tuple[int, ...], ...]
_LIVELY_ROPE = ("dynamic", "longrope")
"""Rotary embeddings that change with the longest sequence of a call."""


class Read:
    """What the model made of a step's stream.

    Attributes:
        stream: what it read.
        hidden: last hidden states `[T, H]`.
    """

    def __init__(self, stream: Stream, hidden: Tensor) -> None:
        self.stream, self.hidden = stream, hidden


class Runner:
    """One causal language model, and how to run it step by step.

    Attributes:
        model: the Hugging Face module.
        device: where it is.
        vocabulary: size of its embedding.
        evidence: what `store` measured; None before.
    """

    def __init__(self, model: Any, *, row_multiple: int = 1, backbone: Backbone | None = None) -> None:
        """Look at the model, without running it.

        Args:
            model: the Hugging Face module; layers inside may be wrapped by PEFT.
            row_multiple: steps are padded to a multiple of so many rows.
            backbone: the model as body and head, with its evidence, where somebody has it already.
        """
        self.model, self.row_multiple = model, row_multiple
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
        """Where adapters may act, by name; from now on steps with adapters go through these layers.

        Raises:
            Unsupported: a layer's forward was replaced.
        """
        if self._sites is None:
            sites = sites_of(self.model)
            install(list(sites.values()))
            self._sites = sites
        return self._sites

    def changed(self) -> bool:
        """Say whether weights of the base model were written since the last call; looks at its layers anew.

        What only writes through `.data` is not seen.
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
        """Measure whether steps compute what the model computes of whole sequences, and return an empty store.

        Raises:
            Unsupported: they do not, or cannot; it says why. `evidence` has the numbers.
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
        for number, part in enumerate(others):
            rows = [row for i, (a, b) in enumerate(_bounds()) if i != number for row in range(a, b)]
            changes.append(((*texts[:number], part, *texts[number + 1 :]), rows))
        return judge("steps", self._in_steps, self._whole, texts, changes, routed=is_routed(self.model))

    def _store(self) -> KVCache:
        """Return an empty store for what the layers keep of a token."""
        probe = _Probe(self._switch)
        self._body(probe_tokens(1, self.vocabulary), probe)
        return KVCache(probe.layers, self.device)

    def read(self, pieces: Sequence[Piece], store: KVCache) -> Read:
        """Read one step; keys and values go to the store, where nothing before a piece's start changes."""
        if any(piece.version is not None for piece in pieces):
            _ = self.sites  # installed
        stream = lay_out(pieces, self.device, self.row_multiple)
        routing = self.route(stream.owners)
        with CacheScope(stream.reach, store, self._switch, routing):
            hidden = self._run(stream.ids, stream.positions)
        return Read(stream, hidden)

    def logits(self, read: Read, rows: Sequence[int]) -> Tensor:
        """Return the logits `[n, V]` of rows of the stream, in ascending order, float32 or wider."""
        hidden = read.hidden if len(rows) == len(read.hidden) else read.hidden[torch.tensor(rows, device=self.device)]
        head: Any = self.backbone.head
        owners = [read.stream.owners[row] for row in rows]
        if spare := -len(hidden) % self.row_multiple:
            hidden = nn.functional.pad(hidden, (0, 0, 0, spare))
            owners += [None] * spare
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
            made: Tensor = nn.functional.linear(*product_of(hidden, base))
            return made
        out: Tensor = base(hidden)
        return out

    @cached_property
    def backbone(self) -> Backbone:
        """The model as body and head."""
        return Backbone.of(self.model)

    @cached_property
    def head_name(self) -> str:
        """The head's path in the model."""
        head = self.model.get_output_embeddings()
        return next((name for name, module in self.model.named_modules() if module is head), "")

    @property
    def _switch(self) -> Switch:
        return self.backbone.segmenter._switch

    def route(self, owners: Sequence[AdapterVersion | None]) -> Routing | None:
        """Return which rows belong to which adapter; see `stream.route`."""
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
        if kinds := sorted(set(_rope_types(getattr(config, "rope_parameters", None))) & set(_LIVELY_ROPE)):
            return f"its rotary embedding ({kinds[0]}) changes with the longest sequence of a batch"
        return None

    def _body(self, ids: Sequence[int], scope: "_Probe") -> Tensor:
        given = torch.tensor([ids, range(len(ids))], device=self.device)
        with scope:
            return self._run(given[:1], given[1:])

    def _run(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return last hidden states `[T, H]`; the mask says nothing, but that transformers need not look for rows."""
        mask = torch.ones_like(ids, dtype=torch.bool)
        body = self.model.base_model
        out = body(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def _whole(self, texts: Texts) -> Tensor:
        """Return the hidden states of each text read at once."""
        return torch.cat([self._body(text, _Probe(self._switch)) for text in texts])

    def _in_steps(self, texts: Texts) -> Tensor:
        """Return the hidden states of all texts, read in steps that they share."""
        store = self._store()
        store.resize(len(texts), max(map(len, texts)))
        found: list[list[Tensor]] = [[] for _ in texts]
        for bounds in zip(*_CUTS, strict=True):
            pieces = [Piece(slot, start, texts[slot][start:stop], None) for slot, (start, stop) in enumerate(bounds)]
            read = self.read(pieces, store)
            for parts, piece, first in zip(found, pieces, read.stream.firsts, strict=True):
                parts.append(read.hidden[first : first + len(piece.tokens)])
        return torch.cat([torch.cat(parts) for parts in found])


_LENGTHS = (7, 5, 3)
_CUTS = (((0, 2), (2, 6), (6, 7)), ((0, 3), (3, 4), (4, 5)), ((0, 1), (1, 2), (2, 3)))


def _bounds() -> list[tuple[int, int]]:
    ends = [0, *accumulate(_LENGTHS)]
    return list(pairwise(ends))


class _Probe(Scope):
    """Sees what the layers keep of a token."""

    def __init__(self, switch: Switch) -> None:
        from twinkle_torch.segments import Segments

        super().__init__(Segments.of([1]), switch)
        self.layers: list[LayerShape] = []

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Note the shapes, and attend."""
        from twinkle_torch.segments import Segments

        kind = q.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else v.dtype
        self.layers.append(LayerShape((k.shape[1], k.shape[2]), (v.shape[1], v.shape[2]), dtype))
        self.segments = Segments.of([len(q)], q.device)
        return super().attend(module, q, k, v, **options)


def _rope_types(parameters: Any) -> list[str]:
    """Return the kinds of rotary embedding in `rope_parameters`, perhaps one for each kind of layer."""
    if not isinstance(parameters, dict):
        return []
    own = [parameters["rope_type"]] if isinstance(parameters.get("rope_type"), str) else []
    return own + [kind for value in parameters.values() for kind in _rope_types(value)]
