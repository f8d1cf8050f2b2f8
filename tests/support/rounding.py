"""What rounding does on this machine, measured; and a processor on which each product rounds by its number of rows."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from pools import distance
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FACTOR = 4.0
"""Two results of float32 that should be equal may be this many times as far apart as one was from float64: each has an
error of its own, and that of other row counts may be about twice the one that was measured."""

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addmm_", "baddbmm_"})
_STEPS = 7


class RoundsByRows(TorchDispatchMode):
    """Moves the result of each product by 0 to 6 units in the last place, a function of its number of rows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _PRODUCTS:
            found.mul_(1.0 + torch.finfo(found.dtype).eps * (found.shape[-2] % _STEPS))
        return found


def measured_rounding(compute: Callable[..., Sequence[Tensor]]) -> list[float]:
    """Return how far rounding moves each tensor that a computation returns, relative to its norm.

    That is the larger of two distances from float64: of float32 as it is here, and of float32 where products round by
    their number of rows.

    Args:
        compute: takes `dtype=torch.float64`, or nothing for float32; returns tensors.
    """
    exact = compute(dtype=torch.float64)
    plain = compute()
    with RoundsByRows():
        moved = compute()
    return [max(distance(p, e), distance(m, e)) for p, m, e in zip(plain, moved, exact, strict=True)]


def rounds_alike(weights: Sequence[Tensor], few: int, many: int) -> bool:
    """Whether rows have the same bits among `few` rows and among `many` in products with matrices, here and now.

    A property of processor, library and shapes: it holds for products of one kernel, and those of other row counts may
    go through another.
    """
    draw = torch.Generator().manual_seed(0)
    for weight in weights:
        for matrix in (weight.detach(), weight.detach().t()):
            rows = torch.randn(many, matrix.shape[1], generator=draw, dtype=matrix.dtype)
            if not torch.equal((rows @ matrix.t())[:few], rows[:few] @ matrix.t()):
                return False
    return True


@pytest.fixture
def rounds_by_rows() -> Iterator[None]:
    """Let products round so for a test."""
    with RoundsByRows():
        yield
