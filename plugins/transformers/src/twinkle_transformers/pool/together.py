"""One call with rows of several adapters: sorted into operations, and answered row by row in the caller's order."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twinkle.data_format import ModelOutput
from twinkle.engine import OperationError, OperationResult
from twinkle.errors import ArgumentError, DataError, OperationsFailed
from twinkle_registry import check_keywords
from twinkle_transformers.pool.work import asks_for_base
from twinkle_transformers.rows import as_rows, row_count, row_inputs
from twinkle_transformers.scoring import check_loss_arguments, loss_name


def sort_rows(names: Sequence[str | None]) -> dict[str | None, list[int]]:
    """Return the numbers of each adapter's rows, adapters in the order in which they first come."""
    found: dict[str | None, list[int]] = {}
    for row, name in enumerate(names):
        found.setdefault(name, []).append(row)
    return found


def check_names(names: Any, inputs: Any) -> list[str | None]:
    """Check that there is one name for each row.

    Raises:
        ArgumentError: the names are no list, or there is another number of rows.
    """
    if not isinstance(names, list | tuple):
        raise ArgumentError(f"adapter_name is a {type(names).__name__}; give a name, or a list with one name a row")
    if not isinstance(inputs, list | tuple):
        raise ArgumentError(
            f"adapter_name is a list, and inputs a {type(inputs).__name__}; give a list of as many rows"
        )
    names = list(names)
    if len(names) != len(inputs):
        raise ArgumentError(f"adapter_name has {len(names)} names, inputs {len(inputs)} rows; give one name a row")
    if odd := [name for name in names if not isinstance(name, str | None)]:
        raise ArgumentError(f"adapter_name holds a {type(odd[0]).__name__}; give names, or None for the base model")
    found: list[str | None] = names
    return found


def encode_each(rows: Sequence[Any], encode: Callable[[Any], Any]) -> list[Any]:
    """Return one encoded row for each row.

    Raises:
        DataError: a template cut a conversation into several rows.
    """
    found = []
    for number, row in enumerate(rows):
        encoded = as_rows([row], encode)
        if len(encoded) != 1:
            raise DataError(
                f"row {number}: its template makes {len(encoded)} rows of it; where each row names its adapter, "
                "encode first (dataset.encode()) or choose another truncation"
            )
        found += encoded
    return found


def share(arguments: Mapping[str, Any], losses: Mapping[str | None, Any], rows: Mapping[str | None, list[int]]) -> dict[
    str | None, dict[str, Any]
]:  # fmt: skip
    """Return each adapter's share of a call's loss arguments.

    What has one entry a row is cut; entries of None mean that these rows have none. The rest goes whole to every loss
    that takes it.

    Raises:
        ArgumentError: an argument that no loss takes, or with another number of entries than rows.
    """
    total = sum(map(len, rows.values()))
    per_row: dict[str, int] = {}
    for loss in losses.values():
        per_row |= row_inputs(loss)
    found: dict[str | None, dict[str, Any]] = {name: {} for name in rows}
    for key, value in arguments.items():
        takers = 0
        if key in per_row and value is not None and not asks_for_base({key: value}):
            if per_row[key] > 1:
                raise ArgumentError(
                    f"{key} has one entry for {per_row[key]} rows; where each row names its adapter, give the argument "
                    "that has one a row"
                )
            row_count(key, value, total)
            for name, mine in rows.items():
                part = _rows_of(value, mine, f"{key} of adapter {name!r}")
                if part is not None and name in losses and not _takes(losses[name], key):
                    whose = f"{loss_name(losses[name])} of adapter {name!r}"
                    raise ArgumentError(f"{key}: {whose} takes none; give None for its rows {mine}")
                if part is not None:
                    found[name][key] = part
            continue
        for name, loss in losses.items():
            if _takes(loss, key):
                found[name][key] = value
                takers += 1
        if not takers:
            for loss in losses.values():
                check_loss_arguments(loss, {key: value}, partial=True)  # says which name is near
            names = sorted({loss_name(loss) for loss in losses.values()})
            raise ArgumentError(f"none of the losses {', '.join(names)} takes an argument {key!r}")
    return found


def _takes(loss: Any, key: str) -> bool:
    try:
        check_keywords(loss, {key: None}, args=(None, None), what="", partial=True)
    except ArgumentError:
        return False
    return True


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


def answers(
    rows: Mapping[str | None, list[int]], results: Sequence[OperationResult | OperationError], total: int
) -> list[ModelOutput]:
    """Return one output a row, in the caller's order.

    Raises:
        OperationsFailed: an operation failed; the outputs of the others are in its `outputs`.
    """
    found: list[ModelOutput | None] = [None] * total
    errors: list[Exception] = []
    told: list[str] = []
    for (name, mine), result in zip(rows.items(), results, strict=True):
        if isinstance(result, OperationError):
            whose = "the base model" if name is None else f"adapter {name!r}"
            result.error.add_note(f"in {whose}: its rows 0, 1, ... are the rows {mine} of the call")
            errors.append(result.error)
            told.append(f"{whose} (rows {mine} of the call): {result.error}")
            continue
        for row, output in zip(mine, result.outputs, strict=True):
            found[row] = output
    if errors:
        rest = "; the others are done" if len(errors) < len(rows) else ""
        what = f"{len(errors)} of {len(rows)} operations failed{rest}. " + "; ".join(told)
        raise OperationsFailed(what, errors, found)
    return found  # type: ignore[return-value]


def joined(result: OperationResult, *, left: bool) -> ModelOutput:
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
