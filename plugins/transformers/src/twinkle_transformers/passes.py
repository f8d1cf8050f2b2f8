"""The passes of `TransformersModel`: rows become batches that fit into memory, and run on all ranks together."""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from twinkle.data_format import ModelOutput
from twinkle.errors import CapacityError, TrainingStateError
from twinkle.logging import get_logger
from twinkle.model.base import Inputs
from twinkle.model.transformers.moe.router_replay import RouterReplayAction
from twinkle_torch.head import CHUNK_TOKENS
from twinkle_torch.segments import Segments
from twinkle_transformers import adapters, losses
from twinkle_transformers.backbone import IGNORE, Backbone, Needs, check_batch, context_of, has_targets
from twinkle_transformers.batches import (
    PackedBatch,
    Size,
    as_rows,
    batch_size,
    check_sharing,
    positions,
    row_inputs,
    rows_together,
    share_arguments,
    sharing_prefixes,
    split_rows,
    without_padding,
)
from twinkle_transformers.group import OptimizerGroup, Pass, Status, check_call, top_of_call
from twinkle_transformers.loaded_model import LoadedModel
from twinkle_transformers.losses import check_loss_arguments, check_rows_for
from twinkle_transformers.memory import SHARE, Recompute
from twinkle_transformers.router_replay import (
    KEY,
    RouterReplay,
    Routes,
    action_of,
    in_rows,
    in_stream,
    place,
    routing,
    without_routes,
)
from twinkle_transformers.training import AdapterTraining, PeftAdapters

Batch = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PassKind:
    """Common properties of the passes of a call.

    Attributes:
        adapter: the trained adapter; activations are measured once for each.
        needs: what a forward computes.
        training: whether the pass keeps activations for a backward.
        together: number of consecutive rows that stay in one pass.
        splittable: whether the rows may be computed in several passes.
        keeps_logits: whether whole logits of a pass are kept during the next one.
        advice: advice in the error if the rows do not fit.
    """

    adapter: str
    needs: Needs
    training: bool
    together: int = 1
    splittable: bool = True
    keeps_logits: bool = False
    advice: str = "give shorter rows, or free memory"


class Budget:
    """Plans passes of one model.

    A pass that would take more than 80 % of the free memory recomputes its activations; if that is not enough, its rows
    are halved until it fits. Passes are measured as they run: padded, packed, or with shared prefixes. A pass that
    cannot be measured is admitted.

    Args:
        backbone: the model.
        recompute: measures activations and free memory.
    """

    def __init__(self, backbone: Backbone, recompute: Recompute) -> None:
        self.backbone, self.recompute = backbone, recompute

    def plan(
        self, parts: Sequence[Sequence[Any]], build: Callable[[Sequence[Any]], Batch], group: PassKind
    ) -> tuple[list[Sequence[Any]], list[Batch]]:
        """Return the rows of each pass and their batches; passes that fit are not changed.

        Args:
            parts: the rows of the passes that the caller requested.
            build: returns the batch of rows.
            group: common properties of the passes.

        Raises:
            CapacityError: rows that must be computed together do not fit.
        """
        if group.training:
            self.recompute.measure_together(group.adapter)
        waiting, planned = deque((part, build(part)) for part in parts), list[tuple[Sequence[Any], Batch]]()
        cut, held = False, 0
        while waiting:
            rows, batch = waiting.popleft()
            needed = self.fitting(batch, group, held)
            if needed is None:
                planned.append((rows, batch))
                held += int(batch["input_ids"].numel()) * self._logits if group.keeps_logits else 0
                continue
            half = (len(rows) // 2 + group.together - 1) // group.together * group.together
            if not group.splittable or not 0 < half < len(rows):
                raise self._refusal(rows, batch, needed, group)
            waiting.extendleft((part, build(part)) for part in (rows[half:], rows[:half]))
            cut = True
        if cut:
            get_logger().info(
                "%d rows are computed in %d passes: more at a time would not fit into the free memory",
                sum(map(len, parts)), len(planned),
            )  # fmt: skip
        return [rows for rows, _ in planned], [batch for _, batch in planned]

    def fitting(self, batch: Batch, group: PassKind, held: int = 0) -> tuple[int, int] | None:
        """Return None if the pass of a batch fits; else the bytes that it needs at least and the free bytes.

        Args:
            batch: batch of the pass.
            group: common properties of the passes.
            held: bytes that earlier passes keep.
        """
        size, beside, recompute = positions(batch), self.beside(batch, group) + held, self.recompute
        if recompute.surely_fits(size.tokens, size.width, beside, training=group.training):
            return None
        fitting = None
        for recomputed in self._ways(group):
            kept = self._kept(size, group, recomputed)
            if kept is None:
                return None
            free = recompute.free_for(kept + beside)
            if free is None or kept + beside <= SHARE * free:
                return None
            if fitting is None or kept + beside < fitting[0]:
                fitting = kept + beside, free
        return fitting

    @property
    def _logits(self) -> int:
        """Bytes of one position's logits."""
        model = self.backbone.model
        return int(model.config.get_text_config().vocab_size) * max(4, int(model.dtype.itemsize))

    def _ways(self, group: PassKind) -> list[bool]:
        if not group.training or not self.recompute.possible:
            return [False]
        return [True] if self.recompute.mode is True else [False, True]

    def _kept(self, size: Size, group: PassKind, recomputed: bool) -> int | None:
        """Return the bytes of activations and gradients: those kept for the backward, and one layer's during it."""
        if not group.training:
            return self.recompute.passing_bytes(size.tokens, size.width, size.masked, packed=size.packed)
        return self.recompute.needed_bytes(
            size.tokens, size.width, group.adapter, size.masked, packed=size.packed, recomputed=recomputed, transient=1
        )

    def beside(self, batch: Batch, group: PassKind) -> int:
        """Return the bytes of the head's results that are kept, and of the logits that exist at the same time."""
        needs, model = group.needs, self.backbone.model
        config, labels = model.config.get_text_config(), batch.get("labels")
        logits = self._logits
        hidden = int(getattr(config, "hidden_size", None) or 0) * max(4, int(model.dtype.itemsize))
        tokens = int(batch["input_ids"].numel())
        if needs.embeddings or self.backbone.scores_rows:
            return tokens * hidden
        if needs.logits or not self.backbone.splits or not has_targets(labels):
            return (3 if group.training else 2) * tokens * logits
        scored = int((labels != IGNORE).reshape(tokens, -1).any(-1).sum())
        copies = 4 if needs.entropies or needs.uniform_logps or needs.top or self.backbone.transform.softcap else 2
        return 2 * scored * hidden + copies * min(scored, needs.chunk_tokens or CHUNK_TOKENS) * logits

    def _refusal(self, rows: Sequence[Any], batch: Batch, needed: tuple[int, int], group: PassKind) -> CapacityError:
        size = positions(batch)
        what = f"{len(rows)} row{'s' * (len(rows) > 1)} of up to {size.width} tokens"
        whose = f"adapter {group.adapter!r}: " if group.adapter else ""
        return CapacityError(
            f"{whose}a pass over {what} ({size.tokens:,} positions) needs about {needed[0]:,} bytes, and "
            f"{needed[1]:,} are free, of which it may take {SHARE:.0%}; {group.advice}"
        )


class Passes:
    """Runs the calls of `TransformersModel` that go through the module.

    Args:
        loaded: the model.
        adapters: its adapters.
        training: creates what passes rely on.
        share_prefixes: the argument of `TransformersModel`.

    Attributes:
        recompute: decides whether a pass recomputes its activations.
    """

    def __init__(
        self, loaded: LoadedModel, adapters: PeftAdapters, training: AdapterTraining, share_prefixes: bool | str
    ) -> None:
        self._loaded, self._adapters, self._training = loaded, adapters, training
        self._share_prefixes = check_sharing(share_prefixes)
        self._longest = 0
        self.recompute = loaded.new_recompute(self._probe)

    @property
    def budget(self) -> Budget:
        """What cuts batches into passes that fit into memory."""
        return Budget(self._loaded.backbone, self.recompute)

    # Calls

    def forward(
        self, name: str | None, inputs: Inputs, temperature: float, return_logits: bool, task: str, replay: Any
    ) -> ModelOutput:
        """Run the whole batch in one pass in training mode, and keep its graph."""
        check_call(task, temperature)
        action = action_of(replay)
        group = self._adapters.trained(name)
        rows = as_rows(inputs, group.encoder(self._loaded.tokenizer_path))
        self._training.prepare(name, training=True)
        batch = self._whole_batch(group, rows, return_logits, task, action)
        self._loaded.parallel.idle_passes("forward", 1)
        group.training = True
        item = self._pass(group, group.train_status, rows, batch, temperature, return_logits, task, action=action)
        group.train_status.passes = [item]
        return item.outputs

    def forward_only(
        self, name: str | None, inputs: Inputs, temperature: float, return_logits: bool, task: str,
        micro_batch_size: int | None, disable_lora: bool, topk_logprobs: int | None, replay: Any,
    ) -> ModelOutput:  # fmt: skip
        """Run rows in evaluation mode without a graph, in micro-batches."""
        check_call(task, temperature)
        action = action_of(replay)
        top = top_of_call(topk_logprobs)
        group = self._adapters.select(name)
        parts = split_rows(self._rows(group, inputs), micro_batch_size, rows_together(group.loss_instance))
        status = group.eval_status
        self._training.prepare(name, training=False)
        group.training = False
        base = disable_lora or not group.adapter_name
        with torch.no_grad(), adapters.without_adapters(self._loaded.module, base):
            parts, batches = self._plan(group, status, parts, return_logits, task, top, action)
            idle = self._loaded.parallel.idle_passes("forward_only", len(parts))
            status.passes = [
                self._pass(group, status, part, batch, temperature, return_logits, task, top, action)
                for part, batch in zip(parts, batches, strict=True)
            ]
            for _ in range(idle):
                self._idle_pass(group, status, task)
        status.idle = not parts
        return losses.join([item.outputs for item in status.passes], left=group.pads_left()) if parts else {}

    def backward(self, name: str | None) -> None:
        """Add the gradients of the last calculated loss."""
        group = self._adapters.trained(name)
        status = group.train_status
        if not status.passes:
            raise TrainingStateError("backward: there is no forward; call forward and calculate_loss first")
        group.begin_backward()
        # Recomputation must run in the mode of the forward; a forward_only may have changed it since.
        self._loaded.module.train()
        usable = [item for item in status.passes if item.usable]
        self._loaded.parallel.idle_passes("backward", len(usable))
        for item in usable:
            losses.backward(group, item)
        group.count_backward(losses.settled(usable))

    def forward_backward(
        self, name: str | None, inputs: Inputs, micro_batch_size: int | None, temperature: float, return_logits: bool,
        task: str, loss_kwargs: dict[str, Any], replay: Any,
    ) -> ModelOutput:  # fmt: skip
        """Forward, loss and backward of a batch, one micro-batch after the other."""
        check_call(task, temperature)
        action = action_of(replay)
        group, parallel = self._adapters.trained(name), self._loaded.parallel
        group.begin_backward()
        loss = group.loss()
        rows = self._rows(group, inputs)
        loss_kwargs = dict(losses.given_to([loss], loss_kwargs, len(rows)))
        check_loss_arguments(loss, loss_kwargs)
        parts = split_rows(rows, micro_batch_size, rows_together(loss))
        self._training.prepare(name, training=True)
        # All batches are built first: an invalid row must not leave the gradients of earlier micro-batches behind.
        parts, batches = self._plan(group, group.train_status, parts, return_logits, task, action=action)
        left, sizes = group.pads_left(), [batch_size(batch) for batch in batches]
        check_rows_for(loss, sizes)
        shares = share_arguments(loss_kwargs, row_inputs(loss), sizes, left=left)
        group.training, group.train_status.passes = True, []
        done: list[Pass] = []
        added_gradient = False
        idle = parallel.idle_passes("forward_backward", len(parts))
        try:
            for part, batch, share in zip(parts, batches, shares, strict=True):
                status = group.train_status
                item = self._pass(group, status, part, batch, temperature, return_logits, task, action=action)
                losses.score(
                    group.loss_instance,
                    item,
                    split=len(parts) > 1,
                    several_ranks=not parallel.ranks.alone,
                    loss_kwargs=share,
                )
                losses.check_finite(group, item, self._loaded.on_nonfinite, parallel.all_usable)
                if item.usable:
                    added_gradient = True
                    losses.backward(group, item)
                    done.append(item)
                losses.detach(item, logits=return_logits)
            for _ in range(idle):
                self._idle_pass(group, group.train_status, task)
        except BaseException:
            if added_gradient:
                group.drop_passes()  # the gradient of a part of a batch must not reach an update
            raise
        group.count_backward(losses.settled(done))
        outputs = [item.outputs for item in done]
        if not done:
            return {"loss": float("nan") if parts else 0.0, "num_tokens": 0.0}
        return losses.join(outputs, left=left)

    # Passes

    def _rows(self, group: OptimizerGroup, inputs: Inputs) -> list[Any]:
        """Return encoded rows; one of several ranks may have none."""
        if not self._loaded.parallel.ranks.alone and isinstance(inputs, list | tuple) and not inputs:
            return []
        return as_rows(inputs, group.encoder(self._loaded.tokenizer_path))

    def _idle_pass(self, group: OptimizerGroup, status: Status, task: str) -> None:
        """Make a pass without effect: the other ranks gather the parameters that are sharded on this one."""
        row = {"input_ids": [0, 0], "labels": [0, IGNORE]}
        outputs = self._pass(group, status, [row], group.processor([row]), 1.0, False, task).outputs
        if status is not group.train_status:
            return
        if self._loaded.parallel.all_usable(True):
            # The gradient is zero, but its backward takes part in the collectives of the other ranks.
            roots = [v for v in outputs.values() if isinstance(v, torch.Tensor) and v.requires_grad]
            (torch.stack([v.sum() for v in roots]).sum() * 0.0).backward()  # type: ignore[no-untyped-call]
        else:
            losses.leave_to_others(group, self._loaded.on_nonfinite)

    def batch(
        self, group: OptimizerGroup, rows: Sequence[Any], action: RouterReplayAction = RouterReplayAction.DISABLED
    ) -> Any:
        """Return rows as the module sees them: collated, packed, or with their shared prefixes joined."""
        backbone, experts = self._loaded.backbone, None
        if action is RouterReplayAction.REPLAY_FORWARD and any(row.get(KEY) is not None for row in rows):
            rows, experts = self._routers().take(rows, left=group.pads_left())
        batch = group.processor(without_routes(rows))
        check_batch(batch, backbone.model)
        batch = without_padding(batch, left=group.pads_left())
        if experts is not None:  # rows with a shared prefix may have different experts in it
            batch[KEY] = place(batch, experts)
        elif self._share_prefixes:
            batch = sharing_prefixes(batch, backbone.segmenter, backbone.inputs, required=self._share_prefixes is True)
        context, width = context_of(backbone.model.config), positions(batch).width
        if context is not None and width > max(context, self._longest):
            self._longest = width
            get_logger().warning(
                "a row has %d tokens, and the context of the model is %d; to cut rows set max_length= of the template",
                width, context,
            )  # fmt: skip
        return batch

    def _pass(
        self, group: OptimizerGroup, status: Status, rows: Any, batch: Any, temperature: float, return_logits: bool,
        task: str, top: int = 0, action: RouterReplayAction = RouterReplayAction.DISABLED,
    ) -> Pass:  # fmt: skip
        loaded, training = self._loaded, status is group.train_status
        routes = self._routes(batch, action)
        loaded.module.train(training)
        needs = replace(losses.needs_of(group, status, return_logits, task), top=top)

        def forward() -> ModelOutput:
            backbone = loaded.backbone
            with loaded.autocast(), routing(routes):
                run = loaded.parallel.run
                output = run(backbone.model, lambda: backbone(batch, loaded.device, needs, temperature))
            if routes is not None:
                output["routed_experts"] = in_rows(batch, routes.used())
            return output

        if not training:
            return Pass(batch, forward(), list(rows))
        size = positions(batch)
        masked = loaded.parallel.in_lockstep or size.masked  # sharded ranks must measure the same kind of pass
        beside = self.budget.beside(batch, PassKind(group.adapter_name, needs, training=True))
        self.recompute.prepare(size.tokens, size.width, group.adapter_name, masked, packed=size.packed, beside=beside)
        return Pass(batch, self.recompute.run(forward), list(rows))

    def _routers(self) -> RouterReplay:
        if (routers := self._loaded.routers) is None:
            raise TrainingStateError(
                "router_replay_action requires a model that was built with enable_router_replay=True; build it so, or "
                "leave router_replay_action out"
            )
        return routers

    def _routes(self, batch: Any, action: RouterReplayAction) -> Routes | None:
        """Return what a pass records, and perhaps replays; None if it does neither."""
        if action is RouterReplayAction.DISABLED:
            return None
        if isinstance(batch, PackedBatch):
            self._loaded.backbone.segmenter.check()  # it is measured by passes of its own, which are not recorded
        if action is RouterReplayAction.RECORD:
            return self._routers().recording()
        return self._routers().replaying(in_stream(batch, batch[KEY])) if KEY in batch else None

    def _plan(
        self,
        group: OptimizerGroup,
        status: Status,
        parts: Any,
        return_logits: bool,
        task: str,
        top: int = 0,
        action: RouterReplayAction = RouterReplayAction.DISABLED,
    ) -> tuple[list[Any], list[Any]]:
        """Return the rows of each pass and their batches, cut so that passes fit into memory."""
        loss = group.loss_instance
        common = self._common(group, status, return_logits, task, top)
        common = replace(common, together=rows_together(loss), splittable=bool(getattr(loss, "splittable", True)))
        if not common.splittable:
            common = replace(common, advice="the loss compares all rows of a call: give fewer rows, or free memory")
        return self.budget.plan(parts, lambda rows: self.batch(group, rows, action), common)

    def _whole_batch(
        self, group: OptimizerGroup, rows: Any, return_logits: bool, task: str, action: RouterReplayAction
    ) -> Any:
        """Return the batch of rows whose graph is kept, which must be computed in one pass."""
        common = self._common(group, group.train_status, return_logits, task)
        advice = "give fewer rows, or call forward_backward, which computes them in several passes"
        common = replace(common, splittable=False, advice=advice)
        return self.budget.plan([rows], lambda part: self.batch(group, part, action), common)[1][0]

    def _common(self, group: OptimizerGroup, status: Status, return_logits: bool, task: str, top: int = 0) -> PassKind:
        needs = replace(losses.needs_of(group, status, return_logits, task), top=top)
        training = status is group.train_status
        return PassKind(
            group.adapter_name, needs, training=training, keeps_logits=needs.logits and (return_logits or not training)
        )

    def _probe(self, row: dict[str, torch.Tensor]) -> object:
        """Run one row as a training pass would, so that its activations can be measured."""
        loaded, backbone = self._loaded, self._loaded.backbone
        within: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if "position_ids" in row:  # a packed pass
            within = backbone.segmenter.within(Segments.of([row["input_ids"].shape[1]], loaded.device))
        arguments = {name: value for name, value in row.items() if name in backbone.inputs}
        with loaded.autocast(), within:
            return loaded.parallel.run(backbone.model, lambda: backbone.body(**arguments, use_cache=False))
