"""The calls of `MultiLoraTransformersModel` that run the model, with rows of one adapter or of several at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from twinkle.data_format import ModelOutput
from twinkle.engine import Operation, OperationError, OperationResult
from twinkle.errors import ArgumentError, DataError, OperationsFailed, TrainingStateError
from twinkle_transformers.batches import as_rows, row_count, row_inputs
from twinkle_transformers.group import OptimizerGroup
from twinkle_transformers.losses import check_loss_arguments, given_to, loss_name, takes
from twinkle_transformers.pool.adapters import PooledAdapters, PoolLimits
from twinkle_transformers.pool.passes import ForwardPass
from twinkle_transformers.pool.pool import LoraPool
from twinkle_transformers.pool.stepping import step_together
from twinkle_transformers.pool.tenants import Tenant
from twinkle_transformers.pool.work import WorkItem, asks_for_base
from twinkle_transformers.training import AdapterTraining

Options = Mapping[str, Any]
"""Options of an operation: `temperature`, `return_logits`, `task` and `topk_logprobs`."""


@dataclass(frozen=True, slots=True)
class _StagedForward:
    """A `forward` whose graph waits for `backward`.

    Attributes:
        tenant: the adapter; another one may have got its name since.
        item: the operation.
        forward: the pass.
        state: of the adapter's weights at that time.
    """

    tenant: Tenant
    item: WorkItem
    forward: ForwardPass
    state: tuple[int, int]


class PoolCalls:
    """Turns calls into operations of a pool and gives each caller the outputs of its rows.

    Args:
        pool: runs the operations.
        adapters: the adapters by name.
        training: creates optimizer and loss where none were set.
        limits: limits of rows.
        on_nonfinite: "raise" or "skip".
    """

    def __init__(
        self, pool: LoraPool, adapters: PooledAdapters, training: AdapterTraining, limits: PoolLimits, on_nonfinite: str
    ) -> None:
        self._pool, self._adapters, self._training, self._limits = pool, adapters, training, limits
        self._on_nonfinite = on_nonfinite
        self._staged: dict[str, _StagedForward] = {}

    def forget(self, name: str) -> None:
        """Drop the graph of a removed adapter."""
        self._staged.pop(name, None)

    def drop_forward(self, name: str | None) -> None:
        """Drop the graph of an adapter's last forward; no-op if there is none."""
        self._staged.pop(self._adapters.tenant(name).name, None)

    def forward(self, name: str | None, inputs: Any, options: Options) -> ModelOutput:
        """Run rows of one adapter in one pass in training mode, and keep its graph."""
        tenant = self._adapters.tenant(name)
        group = tenant.group
        group.begin_backward()
        self._training.prepare(name, training=True)
        rows = self._encoded(group, inputs)
        item = self._pool.prepare(0, Operation(tenant.ref, "forward_backward", rows, options=options), staged=True)
        forward = self._pool.passes.forward(item.parts)
        if item.error is not None:
            raise item.error
        self._staged[tenant.name] = _StagedForward(tenant, item, forward, tenant.state)
        group.training = True
        group.train_status.passes = [part.item for part in item.parts if part.item is not None]
        return group.train_status.passes[0].outputs

    def backward(self, name: str | None) -> None:
        """Add the gradients of the last calculated loss of an adapter."""
        tenant = self._adapters.tenant(name)
        tenant.group.begin_backward()
        staged = self._staged.get(tenant.name)
        if staged is None or staged.tenant is not tenant:
            raise TrainingStateError("backward: there is no forward; call forward and calculate_loss first")
        if staged.state != tenant.state:
            raise TrainingStateError(
                f"backward: the weights of adapter {tenant.name!r} have changed since its forward; call forward and "
                "calculate_loss again"
            )
        for item in (part.item for part in staged.item.parts if part.item is not None and part.item.usable):
            if item.loss is None:
                raise TrainingStateError(
                    "backward: no loss was calculated; call calculate_loss() (or forward_backward()) first"
                )
            if not item.loss.loss_sum.requires_grad:
                loss = loss_name(tenant.group.loss_instance)
                raise TrainingStateError(f"backward: the result of {loss} has no gradient; was it detached?")
        del self._staged[tenant.name]
        self._pool.passes.backward(staged.forward)
        self._pool.collect(staged.forward)
        if isinstance(result := self._pool.finish(staged.item), OperationError):
            raise result.error

    def forward_backward(
        self, names: Any, inputs: Any, micro_batch_size: int | None, options: Options, loss_kwargs: dict[str, Any]
    ) -> Any:
        """Forward, loss and backward of rows of one adapter (`names` is its name) or of several (one name a row)."""
        if isinstance(names, str | None):
            tenant = self._adapters.tenant(names)
            self._training.prepare(names, training=True)
            rows = self._encoded(tenant.group, inputs)
            operation = Operation(tenant.ref, "forward_backward", rows, None, loss_kwargs, options)
            _, result = self._run([operation], micro_batch_size)[0]
            tenant.group.training, tenant.group.train_status.passes = True, []
            return _joined_or_raised(tenant.group, result)
        with self._pool.paging.together():
            return self._mixed(inputs, names, options, loss_kwargs, micro_batch_size, training=True)

    def forward_only(
        self, names: Any, inputs: Any, micro_batch_size: int | None, options: Options, disable_lora: bool
    ) -> Any:
        """Run rows of one adapter or of several without a graph."""
        if isinstance(names, str | None):
            tenant = self._adapters.tenant(names)
            rows = self._encoded(tenant.group, inputs)
            operation = Operation(None if disable_lora else tenant.ref, "forward", rows, None, {}, options)
            [(item, result)] = self._run([operation], micro_batch_size, evaluates=tenant)
            tenant.group.training = False
            parts = [] if item is None else item.parts
            tenant.group.eval_status.passes = [part.item for part in parts if part.item is not None]
            return _joined_or_raised(tenant.group, result)
        names = [None] * len(names) if disable_lora else names
        with self._pool.paging.together():
            return self._mixed(inputs, names, options, {}, micro_batch_size, training=False)

    def clip_grad_and_step(
        self, names: Any, max_norm: float, norm_type: float, accumulation: int | None, flush: bool
    ) -> Any:
        """Divide, clip and step one adapter, or each of a list of them."""
        arguments = (self._pool.parallel, max_norm, norm_type, self._on_nonfinite)
        options: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "flush": flush}
        if isinstance(names, str | None):
            step_together([self._adapters.tenant(names)], *arguments, **options)
            return None
        if not isinstance(names, list | tuple):
            raise ArgumentError(f"adapter_name must be a name or a list of names, got a {type(names).__name__}")
        if len(set(names)) < len(names):
            raise ArgumentError("clip_grad_and_step: adapter_name must contain each adapter once")
        with self._pool.paging.together():
            return step_together([self._adapters.tenant(name) for name in names], *arguments, **options)

    def _encoded(self, group: OptimizerGroup, inputs: Any) -> list[Any]:
        rows = as_rows(inputs, self._pool.encoder(group))
        self._limits.check_rows(rows)
        return rows

    def _run(
        self, operations: Sequence[Operation | OperationError], rows: int | None, evaluates: Tenant | None = None
    ) -> list[tuple[WorkItem | None, OperationResult | OperationError]]:
        prepared: list[tuple[WorkItem | None, Any]] = []
        for index, operation in enumerate(operations):
            if isinstance(operation, OperationError):
                prepared.append((None, operation))
                continue
            try:
                prepared.append((self._pool.prepare(index, operation, rows=rows, evaluates=evaluates), None))
            except Exception as error:  # a loss or processor may raise anything, and the other operations must go on
                name = None if operation.adapter is None else self._pool.tenants.find(operation.adapter).name
                prepared.append((None, OperationError(error, name, index)))
        self._pool.execute([item for item, _ in prepared if item is not None])
        return [(item, failed if item is None else self._pool.finish(item)) for item, failed in prepared]

    def _mixed(
        self, inputs: Any, names: Any, options: Options, loss_kwargs: Mapping[str, Any], size: int | None, *,
        training: bool,
    ) -> list[ModelOutput]:  # fmt: skip
        """Run one operation for the rows of each adapter, and return one output for each row in the caller's order."""
        names = check_names(names, inputs)
        rows = rows_by_adapter(names)
        tenants = {name: self._adapters.tenant(name) for name in rows if name is not None}
        losses: dict[str | None, Any] = {}
        for trained, tenant in tenants.items() if training else ():
            self._training.prepare(trained, training=True)
            losses[trained] = tenant.group.loss()
        loss_kwargs = given_to(list(losses.values()), loss_kwargs, len(names))
        shares = split_arguments(loss_kwargs, losses, rows) if loss_kwargs else {}
        operations: list[Operation | OperationError] = []
        for name, indices in rows.items():
            group = self._pool.base if name is None else tenants[name].group
            try:
                encoded = encode_each([inputs[index] for index in indices], self._pool.encoder(group))
                self._limits.check_rows(encoded)
            except Exception as error:  # a template may raise anything, and the other operations must go on
                operations.append(OperationError(error, name, len(operations)))
                continue
            if name is None:
                operations.append(Operation(None, "forward", encoded, options=options))
            else:
                kind: Literal["forward", "forward_backward"] = "forward_backward" if training else "forward"
                arguments = shares.get(name, {})
                operations.append(Operation(tenants[name].ref, kind, encoded, None, arguments, options))
        results = [result for _, result in self._run(operations, size)]
        for tenant in tenants.values():  # calculate_loss must not score an earlier forward
            tenant.group.training = training
            (tenant.group.train_status if training else tenant.group.eval_status).passes = []
        return outputs_by_row(rows, results, len(names))


def _joined_or_raised(group: OptimizerGroup, result: OperationResult | OperationError) -> ModelOutput:
    if isinstance(result, OperationError):
        raise result.error
    return join_outputs(result, left=group.pads_left())


def rows_by_adapter(names: Sequence[str | None]) -> dict[str | None, list[int]]:
    """Return the indices of each adapter's rows, with adapters in the order of their first row."""
    rows: dict[str | None, list[int]] = {}
    for row, name in enumerate(names):
        rows.setdefault(name, []).append(row)
    return rows


def check_names(names: Any, inputs: Any) -> list[str | None]:
    """Check that there is one name for each row.

    Raises:
        ArgumentError: the names are not a list, or not as many as the rows.
    """
    if not isinstance(names, list | tuple):
        raise ArgumentError(f"adapter_name is a {type(names).__name__}; give a name, or a list with one name a row")
    if not isinstance(inputs, list | tuple):
        raise ArgumentError(
            f"adapter_name is a list, and inputs a {type(inputs).__name__}; give a list of as many rows"
        )
    names = list(names)
    if len(names) != len(inputs):
        raise ArgumentError(f"adapter_name must have one name a row, got {len(names)} names and {len(inputs)} rows")
    if odd := [name for name in names if not isinstance(name, str | None)]:
        raise ArgumentError(
            f"adapter_name must contain names, or None for the base model, got a {type(odd[0]).__name__}"
        )
    checked: list[str | None] = names
    return checked


def encode_each(rows: Sequence[Any], encode: Callable[[Any], Any]) -> list[Any]:
    """Return one encoded row for each row.

    Raises:
        DataError: a template cut a conversation into several rows.
    """
    features = []
    for number, row in enumerate(rows):
        encoded = as_rows([row], encode)
        if len(encoded) != 1:
            raise DataError(
                f"row {number}: its template makes {len(encoded)} rows of it; where each row names its adapter, "
                "encode first (dataset.encode()) or choose another truncation"
            )
        features += encoded
    return features


def split_arguments(
    arguments: Mapping[str, Any], losses: Mapping[str | None, Any], rows: Mapping[str | None, list[int]]
) -> dict[str | None, dict[str, Any]]:
    """Return each adapter's share of a call's loss arguments.

    Arguments with one entry a row are cut; None as an entry means that the row has none. Other arguments go to every
    loss that takes them.

    Raises:
        ArgumentError: an argument that no loss takes, or with another number of entries than rows.
    """
    total = sum(map(len, rows.values()))
    per_row: dict[str, int] = {}
    for loss in losses.values():
        per_row |= row_inputs(loss)
    shares: dict[str | None, dict[str, Any]] = {name: {} for name in rows}
    for key, value in arguments.items():
        takers = 0
        if key in per_row and value is not None and not asks_for_base({key: value}):
            if per_row[key] > 1:
                raise ArgumentError(
                    f"{key} has one entry for {per_row[key]} rows; where each row names its adapter, give the argument "
                    "that has one a row"
                )
            row_count(key, value, total)
            for name, indices in rows.items():
                part = _rows_of(value, indices, f"{key} of adapter {name!r}")
                if part is not None and name in losses and not takes(losses[name], key):
                    whose = f"{loss_name(losses[name])} of adapter {name!r}"
                    raise ArgumentError(f"{key}: {whose} takes none; give None for its rows {indices}")
                if part is not None:
                    shares[name][key] = part
            continue
        for name, loss in losses.items():
            if takes(loss, key):
                shares[name][key] = value
                takers += 1
        if not takers:
            for loss in losses.values():
                check_loss_arguments(loss, {key: value}, partial=True)  # says which name is near
            names = sorted({loss_name(loss) for loss in losses.values()})
            raise ArgumentError(f"none of the losses {', '.join(names)} takes an argument {key!r}")
    return shares


def _rows_of(value: Any, rows: list[int], what: str) -> Any:
    """Return the entries of some rows; None if all of them are None."""
    if isinstance(value, Mapping):
        return {key: _rows_of(part, rows, what) if hasattr(part, "__len__") else part for key, part in value.items()}
    if isinstance(value, Tensor):
        return value[torch.tensor(rows, device=value.device)]
    if hasattr(value, "dtype"):
        return value[rows]
    part = [value[row] for row in rows]
    if all(entry is None for entry in part):
        return None
    if all(isinstance(entry, str) and entry == "base" for entry in part):
        return "base"
    if any(entry is None for entry in part):
        none = [row for row, entry in zip(rows, part, strict=True) if entry is None]
        raise ArgumentError(
            f"{what} is None for the rows {none} and not for the others; give an entry for each of its rows {rows}, or "
            "None for all"
        )
    return part


def outputs_by_row(
    rows: Mapping[str | None, list[int]], results: Sequence[OperationResult | OperationError], total: int
) -> list[ModelOutput]:
    """Return one output a row, in the order of the call.

    Raises:
        OperationsFailed: an operation failed; the outputs of the others are in its `outputs`.
    """
    outputs: list[ModelOutput | None] = [None] * total
    errors: list[Exception] = []
    messages: list[str] = []
    for (name, indices), result in zip(rows.items(), results, strict=True):
        if isinstance(result, OperationError):
            whose = "the base model" if name is None else f"adapter {name!r}"
            result.error.add_note(f"in {whose}: its rows 0, 1, ... are the rows {indices} of the call")
            errors.append(result.error)
            messages.append(f"{whose} (rows {indices} of the call): {result.error}")
            continue
        for row, output in zip(indices, result.outputs, strict=True):
            outputs[row] = output
    if errors:
        rest = "; the others are done" if len(errors) < len(rows) else ""
        what = f"{len(errors)} of {len(rows)} operations failed{rest}. " + "; ".join(messages)
        raise OperationsFailed(what, errors, outputs)
    return outputs  # type: ignore[return-value]


def join_outputs(result: OperationResult, *, left: bool) -> ModelOutput:
    """Return the outputs of all rows as tensors `[B, T, ...]`, padded on the right or on the left, and the loss."""
    output: dict[str, Any] = {}
    width = max((len(row["logps"]) for row in result.outputs if "logps" in row), default=0)
    for key in result.outputs[0]:
        values: list[Any] = [row[key] for row in result.outputs]  # type: ignore[literal-required]
        if not isinstance(values[0], Tensor):
            continue
        if key == "embeddings" or (key == "logits" and values[0].ndim == 1):
            output[key] = torch.stack(values)
            continue
        width = max(len(value) for value in values)
        fill = -100 if key == "predictions" else 0
        output[key] = torch.stack([_pad(value, width, fill, left) for value in values])
    if result.loss_sum is not None:
        output["loss"] = result.loss_sum / result.denominator if result.denominator else 0.0
        output["num_tokens"] = result.denominator
    return output  # type: ignore[return-value]


def _pad(value: Tensor, width: int, fill: int, left: bool) -> Tensor:
    missing = width - len(value)
    sides = [missing, 0] if left else [0, missing]
    return value if not missing else nn.functional.pad(value, [0, 0] * (value.ndim - 1) + sides, value=fill)
