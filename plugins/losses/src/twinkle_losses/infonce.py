"""Contrastive loss over embeddings."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.errors import ArgumentError, DataError
from twinkle.loss import Loss
from twinkle_losses.options import flag, number, output, whole

if TYPE_CHECKING:
    from torch import Tensor


class InfonceLoss(Loss):
    """InfoNCE: each anchor must find its positive among other texts (arXiv:1807.03748, eq. 4).

    The rows of a batch are groups `[anchor, positive, negatives ...]`; a row's `labels` is the number 1 where a group
    begins and 0 elsewhere. With s the dot product of embeddings (their cosine, they have length 1), q anchors, d the
    documents (positives and negatives) of all groups and t the temperature,

        loss_sum = - sum_i log( exp(s(q_i, d_i+) / t) / Z_i ),     Z_i = sum over k of exp(s(q_i, d_k) / t) + ...

    and `denominator` is the number of anchors. `include_qq` adds to Z_i the terms of s(q_i, q_j), j != i, and
    `include_dd` those of s(d_i+, d_k), d_k != d_i+ (the denominator of Qwen3-Embedding, arXiv:2506.05176, section 3.1).

    Args:
        temperature: t, above 0.
        use_batch: compare with the documents of all groups, over all data ranks, so that a batch must come in one
            piece (no `micro_batch_size`). False compares with the group's own documents only; micro-batches must then
            not cut a group.
        hard_negatives: how many negatives each group shall have: more are cut off at the end, fewer are repeated in
            turn from the first. None keeps the groups as they are.
        mask_fake_negative: leave out of Z_i every term but the positive's whose s is above
            `s(q_i, d_i+) + fake_neg_margin`: it may be an unlabelled positive (arXiv:2506.05176, section 3.1;
            the paper also leaves out texts equal to d_i+, which are not told apart here: a text that is the positive
            of two groups of a batch is a negative of each).
        fake_neg_margin: see `mask_fake_negative`.
        include_qq: compare anchors with each other.
        include_dd: compare positives with all other documents.
        process_group: data ranks whose rows are compared with `use_batch` (a model on several ranks gives its own);
            None is all ranks, if there are several.

    Raises:
        ArgumentError: an argument is outside its range, or needs `use_batch`.
    """

    require_logps = False
    splittable = False

    def __init__(
        self,
        temperature: float = 0.1,
        use_batch: bool = True,
        hard_negatives: int | None = None,
        mask_fake_negative: bool = False,
        fake_neg_margin: float = 0.1,
        include_qq: bool = False,
        include_dd: bool = False,
        process_group: Any = None,
    ) -> None:
        self.temperature = number(self, "temperature", temperature, above=0)
        self.use_batch = flag(self, "use_batch", use_batch)
        self.hard_negatives = None if hard_negatives is None else whole(self, "hard_negatives", hard_negatives, least=0)
        self.mask_fake_negative = flag(self, "mask_fake_negative", mask_fake_negative)
        self.fake_neg_margin = number(self, "fake_neg_margin", fake_neg_margin)
        self.include_qq = flag(self, "include_qq", include_qq)
        self.include_dd = flag(self, "include_dd", include_dd)
        if not self.use_batch and (self.include_qq or self.include_dd):
            raise ArgumentError(
                "InfonceLoss: include_qq and include_dd compare groups with each other, which use_batch=False leaves "
                "out; give one or the other"
            )
        self.process_group = process_group
        self.splittable = not self.use_batch

    def __call__(self, inputs: InputBatch, outputs: ModelOutput) -> LossOutput:
        """Compute the loss of a batch.

        Args:
            inputs: `labels` `[B]`: 1 where a group begins, else 0.
            outputs: `embeddings` `[B, H]` of length 1.

        Raises:
            DataError: the labels do not make groups; the message names the row.
            TrainingStateError: the forward was not one of `task="embedding"`.
        """
        import torch

        embeddings = output(outputs, "embeddings", self, "call with task='embedding'")
        groups = _groups(inputs["labels"], len(embeddings), self.hard_negatives)
        logits, targets = self._logits(embeddings, groups)
        total = torch.nn.functional.cross_entropy(logits / self.temperature, targets, reduction="sum")
        return LossOutput(total, len(groups.anchors))

    def _logits(self, embeddings: "Tensor", groups: "_Groups") -> tuple["Tensor", "Tensor"]:
        """Return similarities `[anchors, terms]`, -inf where a term is left out, and each positive's column."""
        import torch

        from twinkle_losses.gathering import gather_rows

        device = embeddings.device
        queries, documents = embeddings[groups.anchors], embeddings[groups.documents]
        all_queries, all_documents, first_query, first_document = queries, documents, 0, 0
        if self.use_batch:
            all_documents, first_document = gather_rows(documents, self.process_group)
            if self.include_qq:
                all_queries, first_query = gather_rows(queries, self.process_group)
        each = torch.arange(len(queries), device=device)
        column = torch.tensor(groups.positives, device=device)
        targets = column + first_document

        query_document = queries @ all_documents.T
        positive = query_document[each, targets]
        out = torch.zeros_like(query_document, dtype=torch.bool)
        if not self.use_batch:
            out = torch.tensor(groups.owners, device=device) != each[:, None]
        blocks = [(query_document, out)]
        if self.include_qq:
            blocks.append((queries @ all_queries.T, _only(each + first_query, len(all_queries))))
        if self.include_dd:
            blocks.append((documents[column] @ all_documents.T, _only(targets, len(all_documents))))
        if self.mask_fake_negative:
            limit = positive.detach()[:, None] + self.fake_neg_margin
            blocks = [(block, out | (block.detach() > limit)) for block, out in blocks]
            blocks[0][1][each, targets] = False
        return torch.cat([block.masked_fill(out, float("-inf")) for block, out in blocks], dim=1), targets


@dataclass(frozen=True, slots=True)
class _Groups:
    """Rows of a batch by their part: indices into the batch, in order; one entry a group or a document.

    Attributes:
        anchors: rows of the anchors.
        documents: rows of positives and negatives, group by group.
        positives: index into `documents` of each group's positive.
        owners: group of each document.
    """

    anchors: list[int]
    documents: list[int]
    positives: list[int]
    owners: list[int]


def _groups(labels: Any, rows: int, hard_negatives: int | None) -> _Groups:
    found = _Groups([], [], [], [])
    starts = _starts(labels, rows)
    for start, end in zip(starts, [*starts[1:], rows], strict=True):
        if end - start < 2:
            raise DataError(
                f"InfonceLoss: the group at row {start} has no positive; it needs "
                "[anchor, positive, ...] in consecutive rows, which a shuffle of rows tears apart: shuffle whole groups"
            )
        chosen = list(range(start + 2, end))
        if hard_negatives is not None:
            if hard_negatives and not chosen:
                raise DataError(
                    f"InfonceLoss: the group at row {start} has no negatives, hard_negatives={hard_negatives} asks for "
                    "some; give each group at least one, or leave hard_negatives out"
                )
            chosen = [chosen[k % len(chosen)] for k in range(hard_negatives)]
        found.positives.append(len(found.documents))
        found.owners.extend([len(found.anchors)] * (1 + len(chosen)))
        found.anchors.append(start)
        found.documents.extend([start + 1, *chosen])
    return found


def _starts(labels: Any, rows: int) -> list[int]:
    shape = tuple(getattr(labels, "shape", (len(labels),)))
    if shape not in ((rows,), (rows, 1)):
        raise DataError(
            f"InfonceLoss: labels have the shape {list(shape)} for {rows} embeddings; give each row one number: 1 "
            "where an [anchor, positive, negatives ...] group begins, else 0"
        )
    numbers = labels.reshape(-1).tolist()
    for row, label in enumerate(numbers):
        if label not in (0, 1):
            raise DataError(f"InfonceLoss: the label of row {row} is {label}; it must be 1 (an anchor) or 0")
    if not numbers or numbers[0] != 1:
        raise DataError(
            "InfonceLoss: row 0 begins no group (its label is not 1); keep groups whole: batch sizes and "
            "micro_batch_size must be multiples of the group's size, and rows must not be shuffled one by one"
        )
    return [row for row, label in enumerate(numbers) if label == 1]


def _only(columns: "Tensor", width: int) -> "Tensor":
    """Return a mask `[n, width]` that is True at `columns` `[n]`, one in each line."""
    import torch

    return torch.nn.functional.one_hot(columns, width).bool()
