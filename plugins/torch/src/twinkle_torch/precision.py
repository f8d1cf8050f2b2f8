"""Two ways to run the same torch code at another precision: with noise of the size of rounding, and in float64.

Both are dispatch modes: they act on every operator that runs inside their `with` block, in this thread, forward and
backward. Neither changes the model, and neither needs a copy of its weights.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_ROUNDS = frozenset({
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "_grouped_mm", "linear", "convolution", "native_layer_norm",
    "native_group_norm", "mean", "embedding",
})  # fmt: skip
"""Operators whose results depend on the order of a sum, and `embedding`, so that every model has at least one."""
_ROUNDS_TOO = "_scaled_dot_product"


class RoundingNoise(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class is untyped
    r"""Adds noise of one rounding error to the result of every product, reduction and attention operator.

    For a result row y with root mean square s, each element becomes `y + eps * (|y| + s) * u` with u uniform in
    [-1, 1] and `eps` of y's dtype. That is the size by which another kernel (other instruction set, other number of
    rows, other blocking) may differ: the error of a dot product is bounded by the sizes of its terms, not by the size
    of its result (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).

    Args:
        seed: of the noise, which depends on nothing else.
        units: size of the noise in rounding errors.
    """

    def __init__(self, seed: int, units: float = 1.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._units = units
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and add noise to what it computed."""
        out = func(*args, **(kwargs or {}))
        if not _rounds(func):
            return out
        first, *rest = out if isinstance(out, tuple) else (out,)
        if not isinstance(first, Tensor) or not first.is_floating_point():
            return out
        noisy = self._noisy(first)
        if func._schema.is_mutable:
            first.copy_(noisy)
            return out
        return (noisy, *rest) if isinstance(out, tuple) else noisy

    def _noisy(self, y: Tensor) -> Tensor:
        wide = y if y.dtype == torch.float64 else y.float()
        size = wide.abs() + wide.square().mean(-1, keepdim=True).sqrt() if y.ndim else wide.abs()
        noise = torch.rand(wide.shape, generator=self._generator, dtype=wide.dtype).mul_(2).sub_(1).to(y.device)
        return (wide + self._units * torch.finfo(y.dtype).eps * size * noise).to(y.dtype)


def _rounds(func: Any) -> bool:
    name = func.overloadpacket.__name__
    return name in _ROUNDS or name.startswith(_ROUNDS_TOO) or func.namespace not in ("aten", "prim", "prims")


class InFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operator in float64: each floating-point argument is converted when the operator needs it.

    Operators that have no float64 kernel raise their own error.

    Args:
        kept_bytes: bytes of converted weights that are kept until the block ends; further weights are converted again
            at each use, so that only one of those exists in float64 at a time.
    """

    def __init__(self, kept_bytes: int = 2 << 30) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._free = kept_bytes
        self._kept: dict[Tensor, Tensor] = {}

    def __exit__(self, *exception: Any) -> None:
        """Leave the block, and drop the converted weights."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._kept.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator on float64 copies of its arguments."""
        if _is_view(func) and not any(isinstance(value, nn.Parameter) for value in args):
            return func(*args, **(kwargs or {}))  # a view of a caller's buffer must stay one: it may be written to
        if func.overloadpacket.__name__ == "embedding":
            return _wider(func(*args, **(kwargs or {})))  # rows are copied as they are; the table is a model's largest
        given, named = tree_map(self._widened, args), tree_map(self._widened, kwargs or {})
        compute = _grouped_mm if func.overloadpacket.__name__ == "_grouped_mm" else func
        out = tree_map(_wider, compute(*given, **named))
        if func._schema.is_mutable:
            return self._write_back(func, args, given, out)
        return out

    def _widened(self, value: Any) -> Any:
        if not isinstance(value, nn.Parameter) or value.dtype == torch.float64 or not value.is_floating_point():
            return _wider(value)
        if value not in self._kept:
            wide = value.detach().double()
            if wide.nbytes > self._free:
                return wide
            self._free -= wide.nbytes
            self._kept[value] = wide
        return self._kept[value]

    @staticmethod
    def _write_back(func: Any, args: tuple[Any, ...], given: tuple[Any, ...], out: Any) -> Any:
        """Write results of an in-place operator into arguments that were converted, and return those."""
        for argument, before, after in zip(func._schema.arguments, args, given, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(before, Tensor) and before is not after:
                before.copy_(after)
                if out is after:
                    out = before
        return out


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, **rest: Any) -> Tensor:
    """Compute `torch._grouped_mm`, which has no float64 kernel, one group after the other."""
    if offs is None:
        out = torch.bmm(a, b)
    else:
        starts = [0, *offs.tolist()]
        spans = list(pairwise(starts))
        if a.ndim == 2 and b.ndim == 3:
            parts = [a[start:stop] @ b[group] for group, (start, stop) in enumerate(spans)]
            out = torch.cat([*parts, a.new_zeros(len(a) - starts[-1], b.shape[-1])])
        elif a.ndim == 3:
            out = torch.cat([a[group] @ b[:, start:stop] for group, (start, stop) in enumerate(spans)], 1)
        else:
            out = torch.stack([a[:, start:stop] @ b[start:stop] for start, stop in spans])
    return out if bias is None else out + bias


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _wider(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() and value.dtype != torch.float64 else value
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def distance(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return |ours - theirs| / |theirs| of each row, float64 `[T]`; infinite where something is not finite.

    Args:
        ours: `[T, H]`.
        theirs: `[T, H]`, the reference.
    """
    wide = theirs.detach().double()
    error = (ours.detach().double() - wide).norm(dim=-1)
    relative = error / wide.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
    return torch.where(error == 0, error, relative).nan_to_num(torch.inf, torch.inf).cpu()


def measured_rounding(call: Callable[[], Tensor], *, draws: int = 2, first: Tensor | None = None) -> Tensor:
    """Return how far rounding moves each row of a result on this model: the largest of several noisy runs.

    Args:
        call: computes the result `[T, H]`; deterministic.
        draws: number of noisy runs.
        first: the result without noise, where it is known.

    Returns:
        Relative distances, float64 `[T]`, at least the epsilon of the result's dtype.
    """
    exact = call() if first is None else first
    rounding = torch.full((len(exact),), torch.finfo(exact.dtype).eps, dtype=torch.float64)
    for seed in range(draws):
        with RoundingNoise(seed):
            noisy = call()
        rounding = torch.maximum(rounding, distance(noisy, exact))
    return rounding
