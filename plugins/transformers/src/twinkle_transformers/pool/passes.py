"""One pass of the model over the parts of several operations, and its way back."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from inspect import unwrap
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from twinkle.logging import get_logger
from twinkle_torch.layout import Layout
from twinkle_torch.numerics import Evidence, turned_off
from twinkle_torch.segments import Segments
from twinkle_transformers.backbone import Backbone
from twinkle_transformers.lowrank.grouped import Groups
from twinkle_transformers.lowrank.products import Cohort, Routing
from twinkle_transformers.pool.fit import judge_adapters
from twinkle_transformers.pool.load import Load, Scales
from twinkle_transformers.pool.outputs import Outputs
from twinkle_transformers.pool.slow import run_alone
from twinkle_transformers.pool.stream import Scratch, Stream, build
from twinkle_transformers.pool.work import Part
from twinkle_transformers.recompute import Recompute
from twinkle_transformers.sites import Site


@dataclass(slots=True, eq=False)
class Flight:
    """A pass that went forward: its parts, whose outputs have a graph, and the buffers that the way back fills."""

    parts: list[Part]
    stream: Stream
    training: bool
    recomputed: bool


class Passes:
    """Runs parts through one model.

    Args:
        backbone: body, head and what lies between.
        device: where they are.
        autocast: the context in which forwards run.
        dtype: of the low-rank products.
        recompute: decides whether activations are recomputed.
        head: name of the output projection among the places that adapters may adapt.
        alone: whether each sequence goes through the model alone.

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
        self.scratch, self.scales = Scratch(), Scales(backbone, dtype)
        self.evidence: Evidence | None = None

    def judge(self, sites: Mapping[str, Site]) -> None:
        """Measure whether adapters that share a pass compute what each computes alone; if not, they go alone."""
        if self._alone:
            why = turned_off("fused") or self.backbone.segmenter.evidence["packing"]
            self.evidence = replace(why, path="fused")
            return
        with self._autocast():
            self.evidence = judge_adapters(self.backbone, self._body, sites, self.dtype)
        if not self.evidence.exact:
            get_logger().warning(
                "%s: adapters do not share passes: %s. Each sequence goes through the model alone, which is slower",
                type(self.backbone.model).__name__, self.evidence.reason,
            )  # fmt: skip
            self._alone = True

    def load(self, parts: Sequence[Part]) -> Load:
        """Return what a pass over parts weighs."""
        return self.scales.weigh(parts, share=self.share_prefixes and not self._alone)

    def change(self, backbone: Backbone, alone: bool) -> None:
        """Go on with a model that was changed: what it is split into, and whether sequences go through it alone."""
        self.backbone = self._outputs.backbone = backbone
        self._alone = alone
        self.scales = Scales(backbone, self.dtype)
        self.recompute.forget()

    def forward(self, parts: Sequence[Part], free: int | None = None) -> Flight:
        """Compute the outputs of parts; with a graph if one of them is trained.

        Args:
            parts: what to compute.
            free: bytes that were free a moment ago; by default they are asked for.
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
        return Flight(parts, stream, training, training and self.recompute.on)

    def probe(self, ids: Tensor, layout: Layout) -> Tensor:
        """Run one sequence as a training pass of one adapter would.

        Args:
            ids: int64 `[1, T]`.
            layout: of the adapter, whose weights are 0.

        Returns:
            hidden states (or logits) `[T, ...]`, with a graph.
        """
        total = ids.shape[1]
        weights = torch.zeros(1, layout.size, dtype=self.dtype, device=self.device)
        routing = Routing([Cohort(layout, Groups(0, (total,)), weights)], total, total)
        positions = torch.arange(total, device=self.device)[None]
        return self._body(Stream(ids, positions, Segments.of([total], self.device), routing, []))

    def backward(self, flight: Flight) -> None:
        """Fill the buffers of the cohorts from the losses of usable parts."""
        roots = []
        for part in flight.parts:
            item = part.item
            if part.work.training and part.work.error is None and item is not None and item.loss is not None:
                roots.append(item.loss.loss_sum)
        if roots:
            torch.autograd.backward(roots)

    def _body(self, stream: Stream) -> Tensor:
        with self._recomputing(), self._autocast():
            if self._alone:
                return run_alone(self._run, stream)
            given = {"input_ids": stream.ids}
            if "position_ids" in self.backbone.inputs:
                given["position_ids"] = stream.positions
            with self.backbone.segmenter.within(stream.segments, stream.routing):
                return self._run(given)

    def _run(self, given: Mapping[str, Tensor]) -> Tensor:
        """Return hidden states of one row, or its logits where the head cannot be told apart."""
        found: Tensor
        if self.backbone.splits:
            found = self.backbone.body(**given, use_cache=False).last_hidden_state[0]
        else:
            found = self.backbone.model(**given, use_cache=False).logits[0]
        return found

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Let layers that recompute believe that they train; what is in them goes on as it was."""
        on = self.recompute.on and torch.is_grad_enabled()
        for layer in self._layers if on else ():
            layer.training = True
        try:
            yield
        finally:
            for layer in self._layers if on else ():
                layer.training = False


def _can_recompute(layer: nn.Module) -> bool:
    """Say whether a layer's own forward does nothing else in training than to recompute."""
    return isinstance(layer, GradientCheckpointingLayer) and "training" not in _names(unwrap(type(layer).forward))


def _names(function: Any) -> set[str]:
    code = function.__code__
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names, *(name for part in inner for name in part.co_names)}
