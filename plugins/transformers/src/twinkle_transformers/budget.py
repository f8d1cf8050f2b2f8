"""Cuts the rows of a call into passes that fit into the free memory, or refuses them with the numbers of bytes."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.errors import CapacityError
from twinkle.logging import get_logger
from twinkle_torch.head import CHUNK_TOKENS
from twinkle_transformers.backbone import Backbone
from twinkle_transformers.batches import Size, positions
from twinkle_transformers.recompute import SHARE, Recompute
from twinkle_transformers.token_scores import IGNORE, Needs, has_targets

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
