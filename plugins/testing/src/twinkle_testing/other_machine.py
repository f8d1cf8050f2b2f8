"""Simulates the rounding of another machine: the rounding of every matrix product depends on its number of rows.

Libraries select kernels by the shape of a product, and kernels round differently. Code that assumes that a product of
16 rows has the same bits as these rows in a product of 64 rows fails on another machine. With `round_by_rows()` it
fails on this one: each result of `mm`, `addmm`, `bmm` and `baddbmm` on a CPU is moved by up to some units in the last
place, by a pattern that depends only on the number of rows and columns. Products of equal shape keep equal bits.
"""

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_LIBRARY: list[torch.library.Library] = []
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
VARIABLE = "TWINKLE_TEST_ROUND_BY_ROWS"
"""Environment variable with the units in the last place; the pytest plugin of the repository's tests reads it."""


def round_by_rows(units: float = 2.0) -> None:
    """Move each result by up to `units` in the last place, in all threads of this process, permanently.

    Args:
        units: size of the movement in multiples of the dtype's epsilon, relative to the larger of the element and the
            root mean square of its row.
    """
    if _LIBRARY:
        return
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    aten = torch.ops.aten

    def mm(a: Tensor, b: Tensor) -> Tensor:
        return _moved(aten.mm.out(a, b, out=_result(a, len(a), b.shape[1])), units)

    def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        out = _result(a, len(a), b.shape[1])
        return _moved(aten.addmm.out(bias, a, b, beta=beta, alpha=alpha, out=out), units)

    def bmm(a: Tensor, b: Tensor) -> Tensor:
        return _moved(aten.bmm.out(a, b, out=_result(a, len(a), a.shape[1], b.shape[2])), units)

    def baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        out = _result(a, len(a), a.shape[1], b.shape[2])
        return _moved(aten.baddbmm.out(bias, a, b, beta=beta, alpha=alpha, out=out), units)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces the override, which is the purpose
        for function in (mm, addmm, bmm, baddbmm):
            library.impl(function.__name__, function, "CPU", allow_override=True)  # type: ignore[no-untyped-call]
    _LIBRARY.append(library)


class RoundsByRows(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class is untyped
    """Applies `round_by_rows` to one `with` block, in this thread only.

    Args:
        units: see `round_by_rows`.
    """

    def __init__(self, units: float = 2.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._units = units

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and move the result if it is a product."""
        out = func(*args, **(kwargs or {}))
        return _moved(out, self._units) if func.overloadpacket.__name__ in _PRODUCTS else out


def _result(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _moved(y: Tensor, units: float) -> Tensor:
    if not y.is_floating_point() or not y.numel():
        return y
    pattern = _pattern(y.shape[-2], y.shape[-1])
    wide = y if y.dtype == torch.float64 else y.float()
    size = torch.maximum(wide.abs(), wide.square().mean(-1, keepdim=True).sqrt())
    return wide.add(size * pattern.to(wide.dtype), alpha=units * torch.finfo(y.dtype).eps).to(y.dtype)


@cache
def _pattern(rows: int, columns: int) -> Tensor:
    """Return a number in [-1, 1] for each column; the numbers differ between row counts."""
    generator = torch.Generator().manual_seed(1_000_003 * rows + columns)
    return torch.rand(columns, generator=generator, dtype=torch.float64).mul_(2).sub_(1)
