"""Operations in progress: what each must compute, cut into micro-batches, and its outputs row by row."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from twinkle import registry
from twinkle.data_format import InputFeature, ModelOutput
from twinkle.engine import Operation, Usage
from twinkle.errors import ArgumentError, DataError
from twinkle_transformers import losses
from twinkle_transformers.backbone import IGNORE, Backbone, Needs, check_batch, context_of, has_targets
from twinkle_transformers.batches import PackedBatch, as_rows, batch_size, row_inputs, share_arguments, without_padding
from twinkle_transformers.group import Pass, check_call, top_of_call
from twinkle_transformers.losses import check_loss_arguments, given_to, loss_name
from twinkle_transformers.pool.tenants import Tenant

_OPTIONS = ("temperature", "return_logits", "task", "topk_logprobs")


@dataclass(frozen=True, slots=True)
class Scoring:
    """Share of a micro-batch in the product with the head, which micro-batches of equal needs compute together.

    Attributes:
        needs: what is computed.
        temperature: divides the logits.
        targets: `()` for one target a position, `(K,)` for K targets.
        count: number of scored positions.
    """

    needs: Needs
    temperature: float
    targets: tuple[int, ...]
    count: int


@dataclass(slots=True, eq=False)
class MicroBatch:
    """Rows of an operation that run through the model in one pass.

    Attributes:
        work: the operation that the rows belong to.
        rows: the rows.
        batch: the rows as the loss sees them: padded, one sequence a row.
        places: int64 `[S]`, indices of the tokens (without padding) in the flattened batch.
        sequences: int64 tokens of each sequence.
        loss_kwargs: arguments of the loss, cut to these rows.
        first: index of the first row in the operation.
    """

    work: "WorkItem"
    rows: Sequence[InputFeature]
    batch: dict[str, Any]
    places: Tensor
    sequences: list[Tensor]
    loss_kwargs: dict[str, Any] = field(default_factory=dict)
    first: int = 0
    left: bool = False
    """Whether the rows are padded on the left."""
    stream: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64 `[S]`, indices in the stream of the pass of the tokens at `places`."""
    computed: int = 0
    """Number of tokens that it adds to the stream; fewer than `tokens` where rows share a prefix."""
    item: Pass | None = None
    twin: "MicroBatch | None" = None
    """The same rows without an adapter, if the loss compares with the base model."""
    done: bool = False
    """Whether the pass succeeded."""
    pieces: Any = None
    """`TokenPieces`: the order of its tokens in a stream, once planned."""
    tries: int = 0
    """How often it ran out of memory in a pass of its own."""
    scoring: Scoring | None = None
    """Its share in the product with the head, once computed."""
    placeholder: bool = False
    """Whether it stands for an operation of an earlier run: only its shape matters, and its outputs are dropped."""

    @property
    def tokens(self) -> int:
        """Number of real tokens."""
        return len(self.places)

    @property
    def width(self) -> int:
        """Length of the longest sequence."""
        return max(len(s) for s in self.sequences)

    def forget_pass(self) -> None:
        """Drop the outputs of a failed pass."""
        self.item = None
        if self.twin is not None:
            self.twin.item = None


@dataclass(slots=True, eq=False)
class WorkItem:
    """An operation in progress.

    Attributes:
        index: its index in the call.
        operation: the operation.
        tenant: the adapter; None is the base model.
        loss: the loss; None if none is calculated.
        needs: what the forward must compute.
        temperature: divides the logits.
        training: whether gradients are added.
        number: number of the operation, which selects its dropout masks.
        parts: its micro-batches.
        error: why it failed.
        grad: sum of the gradients of finished micro-batches.
    """

    index: int
    operation: Operation
    tenant: Tenant | None
    loss: Any
    needs: Needs
    temperature: float
    training: bool
    number: int
    parts: list[MicroBatch] = field(default_factory=list)
    error: Exception | None = None
    grad: Tensor | None = None
    usage: Usage = field(default_factory=Usage)
    processor: Any = None
    """The processor that collates the rows."""
    composition: list[dict[str, Any]] = field(default_factory=list)
    """The passes that computed it; see `OperationResult.composition`."""

    @property
    def name(self) -> str | None:
        """Name of the adapter."""
        return None if self.tenant is None else self.tenant.name

    def reserve_gradient(self) -> None:
        """Allocate the memory of its gradients before they are added, so that adding cannot fail halfway."""
        if self.training and self.tenant is not None:
            self.tenant.reserve_gradient()
            if len(self.parts) > 1 and self.grad is None:
                self.grad = torch.zeros_like(self.tenant.flat.detach())

    @property
    def own_loss(self) -> bool:
        """Whether the loss is the adapter's own, or counts as such, so that the adapter's metrics see the passes."""
        own = self.operation.loss is None or self.operation.metrics_of is not None
        return self.tenant is not None and self.loss is not None and own


def prepare(
    index: int, operation: Operation, tenant: Tenant | None, backbone: Backbone, processor: Any,
    encode: Callable[[Any], Any], evaluates: Tenant | None = None,
) -> WorkItem:  # fmt: skip
    """Validate an operation and its rows, and return it as one micro-batch.

    Args:
        index: its index in the call.
        operation: the operation.
        tenant: the adapter; None is the base model.
        backbone: the model.
        processor: collates rows.
        encode: encodes trajectories.
        evaluates: adapter whose loss and metrics may be calculated later from a forward.
    """
    options: dict[str, Any] = {"temperature": 1.0, "return_logits": False, "task": "causal_lm", "topk_logprobs": None}
    options |= operation.options
    if unknown := sorted(options.keys() - set(_OPTIONS)):
        raise ArgumentError(f"options of an operation must be among {', '.join(_OPTIONS)}, got {unknown[0]!r}")
    check_call(options["task"], options["temperature"])
    training = operation.kind == "forward_backward"
    if operation.kind not in ("forward", "forward_backward"):
        raise ArgumentError(f"kind of an operation must be 'forward' or 'forward_backward', got {operation.kind!r}")
    if tenant is None and training:
        raise ArgumentError("the base model is frozen; a 'forward_backward' needs an adapter")
    loss = _loss_of(operation, tenant, training)
    if loss is not None:
        given = given_to([loss], operation.loss_inputs, len(operation.rows))
        operation = replace(operation, loss_inputs=given) if given is not operation.loss_inputs else operation
        check_loss_arguments(loss, operation.loss_inputs)
    elif operation.loss_inputs:
        raise ArgumentError(f"{sorted(operation.loss_inputs)[0]!r} is an argument of a loss, and no loss is calculated")
    own = operation.loss is None or operation.metrics_of is not None
    needs = _needs(loss, tenant if training else evaluates, training, options, own)
    number = operation.number if operation.number is not None or tenant is None else tenant.group.cur_step
    work = WorkItem(index, operation, tenant, loss, needs, float(options["temperature"]), training, number or 0)
    work.processor = processor
    rows = as_rows(operation.rows, encode)
    left = getattr(processor, "padding_side", "right") == "left"
    work.parts = [_micro_batch(rows, work, processor, backbone, left)]
    return work


def split(
    work: WorkItem, processor: Any, backbone: Backbone, budget: int, rows: int | None = None,
    cuts: list[int] | None = None,
) -> None:  # fmt: skip
    """Cut an operation into micro-batches, if its rows and its loss allow it.

    Args:
        work: the operation, in one micro-batch.
        processor: collates rows.
        backbone: the model.
        budget: maximum number of tokens of a micro-batch, unless a single row has more.
        rows: maximum number of rows of a micro-batch; None is no limit.
        cuts: first rows of the micro-batches, regardless of the limits.

    Raises:
        ArgumentError: `rows` is invalid, or would separate rows that the loss compares.
    """
    whole = work.parts[0]
    together = max(1, int(getattr(work.loss, "rows_together", 1)))
    if len(whole.rows) % together:
        raise ArgumentError(
            f"{loss_name(work.loss)} of adapter {work.name!r} compares groups of {together} consecutive rows, got "
            f"{len(whole.rows)} rows; give whole groups"
        )
    most = _most_rows(work, rows, together, len(whole.rows))
    splittable = getattr(work.loss, "splittable", True) and len(whole.sequences) == len(whole.rows)
    left = getattr(processor, "padding_side", "right") == "left"
    if cuts is not None:
        if len(cuts) > 1:
            bounds = [*cuts, len(whole.rows)]
            work.parts = [
                _micro_batch(whole.rows[a:b], work, processor, backbone, left, a) for a, b in pairwise(bounds)
            ]
    elif splittable and (whole.tokens > budget or len(whole.rows) > most):
        bounds, size = [0], 0
        for at in range(0, len(whole.rows), together):
            more = sum(len(s) for s in whole.sequences[at : at + together])
            if at > bounds[-1] and (size + more > budget or at + together - bounds[-1] > most):
                bounds.append(at)
                size = 0
            size += more
        bounds.append(len(whole.rows))
        work.parts = [_micro_batch(whole.rows[a:b], work, processor, backbone, left, a) for a, b in pairwise(bounds)]
    if asks_for_base(work.operation.loss_inputs):
        for part in work.parts:
            part.twin = _twin(part)
    if work.loss is not None:
        arguments = {k: v for k, v in work.operation.loss_inputs.items() if not asks_for_base({k: v})}
        sizes = [batch_size(part.batch) for part in work.parts]
        shares = share_arguments(arguments, row_inputs(work.loss), sizes, left=left)
        for part, share in zip(work.parts, shares, strict=True):
            part.loss_kwargs = share


def split_in_half(part: MicroBatch, backbone: Backbone) -> list[MicroBatch]:
    """Replace a micro-batch by two with about equally many tokens; return `[]` if its loss needs all rows together."""
    work = part.work
    together = max(1, int(getattr(work.loss, "rows_together", 1)))
    count = len(part.rows) // together
    if not getattr(work.loss, "splittable", True) or len(part.sequences) != len(part.rows) or count < 2:
        return []
    ends = list(accumulate(len(sequence) for sequence in part.sequences))
    cut = together * min(range(1, count), key=lambda at: abs(2 * ends[at * together - 1] - part.tokens))
    left = getattr(work.processor, "padding_side", "right") == "left"
    split_parts = [
        _micro_batch(rows, work, work.processor, backbone, left, part.first + first)
        for rows, first in ((part.rows[:cut], 0), (part.rows[cut:], cut))
    ]
    if part.twin is not None:
        part.loss_kwargs.pop("ref_logps", None)
        for half in split_parts:
            half.twin = _twin(half)
    if work.loss is not None:
        sizes = [batch_size(half.batch) for half in split_parts]
        shares = share_arguments(part.loss_kwargs, row_inputs(work.loss), sizes, left=left)
        for half, share in zip(split_parts, shares, strict=True):
            half.loss_kwargs = share
    at = work.parts.index(part)
    work.parts[at : at + 1] = split_parts
    return split_parts


def asks_for_base(arguments: Mapping[str, Any]) -> bool:
    """Return whether arguments ask for the base model's log-probabilities: `ref_logps="base"`."""
    reference = arguments.get("ref_logps")
    return isinstance(reference, str) and reference == "base"


def _twin(part: MicroBatch) -> MicroBatch:
    work = part.work
    operation = Operation(None, "forward", part.rows)
    base = WorkItem(work.index, operation, None, None, Needs(), work.temperature, False, 0)
    twin = MicroBatch(base, part.rows, part.batch, part.places, part.sequences, first=part.first)
    base.parts = [twin]
    return twin


def _most_rows(work: WorkItem, rows: int | None, together: int, count: int) -> int:
    if rows is None:
        return count
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < together:
        raise ArgumentError(
            f"micro_batch_size must be an integer of at least {together}, or None for the whole batch, got {rows!r}"
            + (f" ({loss_name(work.loss)} compares groups of {together} rows)" if together > 1 else "")
        )
    if rows < count and not getattr(work.loss, "splittable", True):
        raise ArgumentError(
            f"the loss {loss_name(work.loss)} compares all rows of a batch with each other, but micro_batch_size cut "
            "the batch; leave micro_batch_size out"
        )
    return rows // together * together


def _micro_batch(
    rows: Sequence[Any], work: WorkItem, processor: Any, backbone: Backbone, left: bool, first: int = 0
) -> MicroBatch:
    batch = processor(rows)
    check_batch(batch, backbone.model)
    batch = without_padding(batch, left=left)
    if extra := [k for k in batch if k in backbone.inputs and k not in _TEXT and batch[k] is not None]:
        raise DataError(f"rows must contain only text where adapters share a pass, got {extra[0]!r}")
    ids = batch["input_ids"].reshape(-1)
    if isinstance(batch, PackedBatch):
        places, lengths = batch.places, list(batch.lengths)
    else:
        mask = batch["attention_mask"].bool()
        places, lengths = mask.reshape(-1).nonzero().squeeze(-1), mask.sum(-1).tolist()
    if 0 in lengths:
        raise DataError(f"row {first + lengths.index(0)} of the batch has no tokens")
    context = context_of(backbone.model.config)
    if context is not None and max(lengths) > context:
        raise DataError(
            f"row {first + lengths.index(max(lengths))} has {max(lengths)} tokens, the model's context {context}; cut "
            "rows with max_length= of the template"
        )
    _check_places(batch, places, lengths, first)
    return MicroBatch(work, rows, batch, places, list(torch.split(ids[places], lengths)), first=first, left=left)


def _check_places(batch: Mapping[str, Any], places: Tensor, lengths: Sequence[int], first: int) -> None:
    """Refuse labels outside the tokens, and positions of tokens other than 0, 1, 2, ..."""
    labels, positions = batch.get("labels"), batch.get("position_ids")
    rows, width = batch["input_ids"].shape[:2]
    full = len(places) == rows * width
    if full and (positions is None or bool((positions == torch.arange(width)).all())):
        return
    if has_targets(labels) and not full:
        scored = (labels != IGNORE).reshape(rows * width, -1).any(-1)
        outside = scored.index_fill(0, places, False).nonzero()
        if len(outside):
            row, column = divmod(int(outside[0]), width)
            raise DataError(
                f"row {first + row} has a label at {column}, where its attention_mask has no token; make it {IGNORE}"
            )
    sizes = torch.tensor(lengths)
    begins = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    counts, columns = torch.arange(len(places)) - begins, places % width
    odd = columns - columns[begins] != counts
    if positions is not None:
        given = positions.reshape(-1)[places]
        odd |= (given != counts) & (given != columns)  # positions of rows padded on the left may count the padding
    if bool(odd.any()):
        row = first + int(torch.bucketize(odd.nonzero()[0], sizes.cumsum(0), right=True))
        raise DataError(
            f"row {row} must have one run of ones in attention_mask, and position_ids 0, 1, 2, ...; leave position_ids "
            "out, and remove masked tokens from the row"
        )


_TEXT = frozenset({"input_ids", "attention_mask", "position_ids", "labels", "loss_scale"})


def _loss_of(operation: Operation, tenant: Tenant | None, training: bool) -> Any:
    if operation.loss is not None:
        return registry().build(operation.loss, "loss", **operation.loss_options)
    return tenant.group.loss() if tenant is not None and training else None


def _needs(loss: Any, owner: Tenant | None, training: bool, options: Mapping[str, Any], own: bool) -> Needs:
    metrics: Sequence[Any] = ()
    if own and owner is not None:
        loss = loss or owner.group.loss()
        metrics = (owner.group.train_status if training else owner.group.eval_status).metrics
    needs = losses.needs_for(loss, metrics, training, options["return_logits"], options["task"], fuses=False)
    return replace(needs, top=top_of_call(options["topk_logprobs"]))


def by_row(work: WorkItem) -> list[ModelOutput]:
    """Return the outputs of a finished operation for each row, without padding."""
    outputs: list[ModelOutput] = []
    for part in work.parts:
        if part.item is None:
            continue
        shape = part.batch["input_ids"].shape[:2]
        packed = len(part.rows) < shape[0]
        sizes = map(len, part.sequences if packed else [row["input_ids"] for row in part.rows])
        for at, size in enumerate(sizes):
            start = shape[1] - size if part.left else 0
            output: dict[str, Any] = {}
            for key, value in part.item.outputs.items():
                if isinstance(value, Tensor) and value.ndim and len(value) == shape[0]:
                    wide = value.ndim > 1 and value.shape[1] == shape[1] and key != "embeddings"
                    output[key] = value[at, start : start + size] if wide else value[at]
            if part.batch.get("labels") is not None and part.batch["labels"].ndim == 3 and "logps" in output:
                output["logps"] = _own_targets(output["logps"], None if packed else part.rows[at]["labels"])
            outputs.append(output)  # type: ignore[arg-type]
    return outputs


def _own_targets(logps: Tensor, labels: Any) -> Tensor:
    """Return a row's log-probabilities `[T, K]` without padding targets; `[T]` if it has one target a token."""
    if labels is None:
        return logps
    count = torch.as_tensor(labels).shape[1:]
    return logps[:, : count[0]] if count else logps[:, 0]
