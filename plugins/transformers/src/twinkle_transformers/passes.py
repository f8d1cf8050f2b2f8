"""The passes of `TransformersModel`: rows become batches, and batches go through the module, on all ranks together."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from twinkle import get_logger
from twinkle.data_format import ModelOutput
from twinkle.model.base import Inputs
from twinkle_torch.segments import Segments
from twinkle_transformers import loop
from twinkle_transformers.backbone import IGNORE, check_batch
from twinkle_transformers.budget import Budget, Group
from twinkle_transformers.components import Components
from twinkle_transformers.group import OptimizerGroup, Pass, Status
from twinkle_transformers.options import PRECISION
from twinkle_transformers.packing import positions, without_padding
from twinkle_transformers.rows import as_rows, rows_together
from twinkle_transformers.sampling.prompts import context_of
from twinkle_transformers.sharing import sharing_prefixes


class Passes(Components):
    """What `forward`, `forward_only` and `forward_backward` have in common."""

    device: torch.device
    on_nonfinite: Any
    _longest: int
    _shares: bool | str

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Context in which this model's forwards run: mixed precision, if it is on."""
        dtype = PRECISION[self.mixed_precision]
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            yield

    def _rows(self, group: OptimizerGroup, inputs: Inputs) -> list[Any]:
        """Return encoded rows; one of several ranks may have none."""
        if not self.parallel.ranks.alone and isinstance(inputs, list | tuple) and not inputs:
            return []
        return as_rows(inputs, group.encoder(self.model_path))

    def _ready(self, group: OptimizerGroup, *, training: bool) -> None:
        """Do what passes rely on; ranks do it together, those without rows too."""
        if training and group.optimizer is None:
            get_logger().info("adapter %r: no optimizer was set; AdamW at 1e-5 is used", group.adapter_name)
            self.set_optimizer("AdamW", adapter_name=group.adapter_name)
        group.loss()
        self._place(group, trained=training)

    def _idle_passes(self, call: str, passes: int) -> int:
        """Return how many passes without rows this rank must make so that sharded ranks stay together.

        Sharded ranks at different calls are told so here.
        """
        if not self.parallel.in_lockstep:
            return 0
        return int(self.parallel.ranks.agree(call, passes).max()) - passes

    def _idle_pass(self, group: OptimizerGroup, status: Status, task: str) -> None:
        """Make a pass that adds nothing: the other ranks need this one's shards."""
        row = {"input_ids": [0, 0], "labels": [0, IGNORE]}
        outputs = self._pass(group, status, [row], group.processor([row]), 1.0, False, task).outputs
        if status is not group.train_status:
            return
        if self._counts(True):
            made = [v for v in outputs.values() if isinstance(v, torch.Tensor) and v.requires_grad]
            (torch.stack([v.sum() for v in made]).sum() * 0.0).backward()  # type: ignore[no-untyped-call]
        else:
            loop.leave_to_others(group, self.on_nonfinite)

    def _counts(self, usable: bool) -> bool:
        """Return whether a pass is counted; where ranks go in lockstep, only if all can count theirs."""
        if self.parallel.in_lockstep:
            return bool(self.parallel.ranks.agree("losses are finite", usable).all())
        return usable

    def _batch(self, group: OptimizerGroup, rows: Any) -> Any:
        batch = group.processor(rows)
        check_batch(batch, self._backbone.model)
        batch = without_padding(batch, left=group.pads_left())
        if self._shares:
            batch = sharing_prefixes(
                batch, self._backbone.segmenter, self._backbone.inputs, required=self._shares is True
            )
        context, width = context_of(self._backbone.model.config), positions(batch).width
        if context is not None and width > max(context, self._longest):
            self._longest = width
            get_logger().warning(
                "a row has %d tokens, and the model was made for %d; to cut rows set max_length= of the template",
                width, context,
            )  # fmt: skip
        return batch

    def _pass(
        self, group: OptimizerGroup, status: Status, rows: Any, batch: Any, temperature: float, return_logits: bool,
        task: str, top: int = 0,
    ) -> Pass:  # fmt: skip
        training = status is group.train_status
        self.model.train(training)
        needs = replace(loop.needs_of(group, status, return_logits, task), top=top)

        def forward() -> ModelOutput:
            with self.autocast():
                return self.parallel.run(
                    self._backbone.model, lambda: self._backbone(batch, self.device, needs, temperature)
                )

        if not training:
            return Pass(batch, forward(), list(rows))
        sizes = positions(batch)
        masked = self.parallel.in_lockstep or sizes.masked  # sharded ranks measure the same
        beside = self._budget.beside(batch, Group(group.adapter_name, needs, training=True))
        self._recompute.prepare(
            sizes.tokens, sizes.width, group.adapter_name, masked, packed=sizes.packed, beside=beside
        )
        return Pass(batch, self._recompute.run(forward), list(rows))

    def _plan(
        self, group: OptimizerGroup, status: Status, parts: Any, return_logits: bool, task: str, top: int = 0
    ) -> tuple[list[Any], list[Any]]:
        """Return the rows of each pass and their batches, cut so that passes fit into memory."""
        loss = group.loss_instance
        common = self._common(group, status, return_logits, task, top)
        common = replace(common, together=rows_together(loss), splittable=bool(getattr(loss, "splittable", True)))
        if not common.splittable:
            common = replace(common, advice="the loss compares all rows of a call: give fewer rows, or free memory")
        return self._budget.plan(parts, lambda rows: self._batch(group, rows), common)

    def _uncut(self, group: OptimizerGroup, rows: Any, return_logits: bool, task: str) -> Any:
        """Return the batch of rows whose graph is kept, which one pass must compute."""
        common = self._common(group, group.train_status, return_logits, task)
        advice = "give fewer rows, or call forward_backward, which computes them in several passes"
        common = replace(common, splittable=False, advice=advice)
        return self._budget.plan([rows], lambda part: self._batch(group, part), common)[1][0]

    def _common(self, group: OptimizerGroup, status: Status, return_logits: bool, task: str, top: int = 0) -> Group:
        needs = replace(loop.needs_of(group, status, return_logits, task), top=top)
        training = status is group.train_status
        return Group(
            group.adapter_name, needs, training=training, keeps_logits=needs.logits and (return_logits or not training)
        )

    @property
    def _budget(self) -> Budget:
        return Budget(self._backbone, self._recompute)

    def _probe(self, row: dict[str, torch.Tensor]) -> object:
        backbone = self._backbone
        within: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if "position_ids" in row:  # as packed rows are
            within = backbone.segmenter.within(Segments.of([row["input_ids"].shape[1]], self.device))
        taken = {name: value for name, value in row.items() if name in backbone.inputs}
        with self.autocast(), within:
            return self.parallel.run(backbone.model, lambda: backbone.body(**taken, use_cache=False))
