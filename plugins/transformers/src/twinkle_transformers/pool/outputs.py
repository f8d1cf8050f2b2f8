"""Outputs of the micro-batches of a pass, computed from its hidden states."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from twinkle.data_format import ModelOutput
from twinkle.errors import ArgumentError, TwinkleError
from twinkle_torch.head import CHUNK_TOKENS, TokenScores, score_tokens
from twinkle_torch.logits import LogitTransform
from twinkle_torch.pooling import embed
from twinkle_transformers.backbone import Backbone
from twinkle_transformers.group import Pass
from twinkle_transformers.lowrank import products as lowrank
from twinkle_transformers.lowrank.grouped import Groups
from twinkle_transformers.lowrank.products import AdapterGroup, Routing
from twinkle_transformers.pool.stream import LEAST_ROWS, Stream
from twinkle_transformers.pool.work import MicroBatch, Scoring
from twinkle_transformers.token_scores import (
    Needs,
    check_top,
    has_targets,
    scatter_scores,
    score_logits,
    targets_at,
    trained_places,
)


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
