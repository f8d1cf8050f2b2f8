"""Arguments with a line of numbers a token, such as a teacher's logits, read at the trained positions of a batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from twinkle.errors import ArgumentError
from twinkle_torch.trained import Trained


def trained_lines(name: str, value: Any, where: Trained) -> tuple[Callable[[slice], Tensor], int]:
    """Return what gives the lines `[n, width]` of some of the trained tokens, and their width.

    Args:
        name: of the argument, for errors.
        value: `[B, T, width]`, T of the batch or more, which is read in place; or a list with a table `[n, width]` a
            row, n its trained tokens, its tokens, or T and more, of which the trained ones are copied.
        where: the trained positions.

    Raises:
        ArgumentError: it does not fit; names row and sizes.
    """
    rows, length = where.mask.shape
    if not isinstance(value, Tensor) or value.dim() != 3:
        joined = _joined(name, value, where)
        return lambda part: joined[part], joined.shape[1]
    if len(value) != rows or value.shape[1] < length:
        raise ArgumentError(
            f"{where.loss}: {name} have the shape {list(value.shape)}, the batch {rows} rows of {length} tokens; give "
            "the teacher's numbers for the same rows, one entry a token"
        )
    held, (row, column) = value.detach(), where.mask.nonzero(as_tuple=True)
    row, column = row.to(held.device), column.to(held.device) + (where.window(held.shape[1]).start or 0)
    return lambda part: held[row[part], column[part]], held.shape[2]


def _joined(name: str, value: Any, where: Trained) -> Tensor:
    """Return the entries `[N, width]` of the trained tokens of a list of rows."""
    if isinstance(value, str | dict) or not hasattr(value, "__len__") or len(value) != len(where.counts):
        found = f"{len(value)} entries" if hasattr(value, "__len__") else f"a {type(value).__name__}"
        raise ArgumentError(
            f"{where.loss}: {name} have {found}, the batch {len(where.counts)} rows; give a tensor [B, T, ...], or a "
            "list with one entry a row"
        )
    parts = [_entry(name, row, value[row], where) for row, count in enumerate(where.counts) if count]
    if len(widths := {part.shape[1] for part in parts}) > 1:
        raise ArgumentError(
            f"{where.loss}: {name} have {sorted(widths)} entries a token; give every token the same number"
        )
    return torch.cat(parts)


def _entry(name: str, row: int, entry: Any, where: Trained) -> Tensor:
    found = f"{where.loss}: {name} of row {row}"
    try:
        numbers = torch.as_tensor(entry).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"{found} are not a table of numbers ({error}); give [n, k], one line per token") from error
    if numbers.dim() != 2:
        raise ArgumentError(f"{found} have the shape {list(numbers.shape)}; give [n, k], one line a token")
    return numbers[where.pick(name, row, len(numbers)).to(numbers.device)]
