"""One fused pass of the model over micro-batches of several operations, its backward, and the memory that it needs."""

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
from twinkle_torch.head import CHUNK_TOKENS
from twinkle_torch.layout import Layout
from twinkle_torch.numerics import Evidence, turned_off
from twinkle_torch.segments import Segments
from twinkle_transformers.backbone import Backbone
from twinkle_transformers.lowrank.grouped import Groups
from twinkle_transformers.lowrank.products import AdapterGroup, Routing
from twinkle_transformers.pool.compatibility import measure_adapters, run_each_sequence
from twinkle_transformers.pool.outputs import Outputs
from twinkle_transformers.pool.stream import Scratch, Stream, build, pieces_of
from twinkle_transformers.pool.work import MicroBatch
from twinkle_transformers.recompute import Recompute
from twinkle_transformers.sites import Site


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
        with self._recomputing(), self._autocast():
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
