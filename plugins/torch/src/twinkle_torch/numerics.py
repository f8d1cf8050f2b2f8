"""Decides by measurement whether a fast path computes what the plain path computes, on this model, dtype and machine.

A fast path that packs several sequences into one pass can be wrong in two ways. Sequences may influence each other: a
change of one of them changes others. Or a sequence is computed wrongly (positions, masks) and differs from the plain
path. A constant tolerance cannot decide either, because rounding differs by orders of magnitude between models, tokens,
dtypes and processors. The bound is therefore the rounding measured on the same tokens. If that bound is too wide to
decide, as in bfloat16, both paths run in float64.

Two dispatch modes run the same code with added noise of the size of rounding, or in float64. They act on every operator
inside their `with` block, in this thread, forward and backward, without changing or copying the model.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from twinkle.errors import SettingsError

_ROUNDS = frozenset({
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "_grouped_mm", "linear", "convolution", "native_layer_norm",
    "native_group_norm", "mean", "embedding",
})  # fmt: skip
"""Operators whose results depend on the order of a sum, and `embedding`, so that every model has at least one."""
_ROUNDS_TOO = "_scaled_dot_product"


class RoundingNoise(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class is untyped
    r"""Adds noise of one rounding error to the result of every product, reduction and attention operator.

    For a result row y with root mean square s, each element becomes `y + eps * (|y| + s) * u` with u uniform in
    [-1, 1] and `eps` of y's dtype. This is the size of differences between kernels (other instruction set, number of
    rows or blocking): the error of a dot product is bounded by the sizes of its terms, not by the size
    of its result (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).

    Args:
        seed: seed of the noise.
        units: size of the noise in rounding errors.
    """

    def __init__(self, seed: int, units: float = 1.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._units = units
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and add noise to its result."""
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
        kept_bytes: bytes of converted weights to keep until the block ends; further weights are converted again
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
            # A view of a caller's buffer must stay a view, because it may be written to.
            return func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == "embedding":
            # Convert the selected rows only: the table is a model's largest weight.
            return _wider(func(*args, **(kwargs or {})))
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
    """Measure the effect of rounding on each row of a result: the largest difference of several noisy runs.

    Args:
        call: computes the result `[T, H]`; deterministic.
        draws: number of noisy runs.
        first: the result without noise, if known.

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


FAST_PATHS = ("packing", "prefixes", "steps", "fused")
"""Paths that `TWINKLE_DISABLE_FAST_PATHS` can turn off: several sequences in one row; prefixes that are computed once;
sampling step by step with requests joining at any time; adapters of several tenants in one pass."""
DISABLE = "TWINKLE_DISABLE_FAST_PATHS"

TOKEN_FACTOR = 16.0
"""Largest difference of a token, in units of its measured rounding. Measured differences between correct paths were at
most 1.4 units, float32 against float64 4.7 units (SmolLM2-135M, AMD with AVX2); a leaking mask gives 1,000 and more."""
MEAN_FACTOR = 4.0
"""Largest root mean square of the differences of all tokens, in the same units."""
_SHARP = 0.05
"""A bound above this relative difference cannot distinguish a leak from rounding."""
_ROUTED_SHARE = 0.75
"""Share of tokens within the bound where tokens choose experts: rounding may send one to another expert."""

Given = TypeVar("Given")
_ERRORS = (ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The measurement of a fast path, and the decision.

    Attributes:
        path: name of the fast path.
        exact: whether it computes the same as the plain path, so that it may be used.
        method: basis of the decision: "equal bits", "rounding", "float64", "disabled", "structure" (the model lacks a
            property that the path needs) or "undecided".
        reason: why the path is off; empty if it is on.
        difference: largest relative difference of a token to the plain path.
        moved: largest relative change of a token after a change of a sequence that it must not depend on.
        rounding: measured rounding of the token that differs most in units of it.
        dtype: dtype of the model's results, or of autocast if that is on.
        units: largest difference or change of a token in units of its own rounding; `TOKEN_FACTOR` is the limit, unless
            tokens choose experts.
    """

    path: str
    exact: bool
    method: str
    reason: str = ""
    difference: float = 0.0
    moved: float = 0.0
    rounding: float = 0.0
    dtype: str = ""
    units: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes by name, and the one line of `str()` as `summary`, for JSON."""
        return {**asdict(self), "summary": str(self)}

    def __str__(self) -> str:
        """Return one line: what is on or off, and the numbers."""
        if not self.exact:
            return f"{self.path} off: {self.reason}"
        if self.method == "equal bits":
            return f"{self.path} on: equal bits in {self.dtype}"
        differs = f"{self.path} on ({self.method}, {self.dtype}): differs by {max(self.difference, self.moved):.1e}"
        if self.units > TOKEN_FACTOR:
            return f"{differs}; some tokens by {self.units:.0f} times their rounding, which chooses other experts there"
        return f"{differs}, at most {self.units:.1f} times the rounding of a token (limit {TOKEN_FACTOR:g})"


def disabled(path: str) -> bool:
    """Return whether `TWINKLE_DISABLE_FAST_PATHS` turns a fast path off: its name in a list with commas, or `all`.

    Raises:
        SettingsError: the variable holds a name that is no fast path.
    """
    names = [name.strip() for name in os.environ.get(DISABLE, "").split(",") if name.strip()]
    if unknown := [name for name in names if name not in (*FAST_PATHS, "all")]:
        raise SettingsError(
            f"{DISABLE} must list some of {', '.join(FAST_PATHS)}, or be `all`; got {', '.join(unknown)}"
        )
    return path in names or "all" in names


def turned_off(path: str) -> Evidence | None:
    """Return the evidence of a path that `TWINKLE_DISABLE_FAST_PATHS` turns off; None for a path that it leaves on."""
    return Evidence(path, False, "disabled", f"{path} is disabled by {DISABLE}") if disabled(path) else None


def probe_tokens(count: int, vocabulary: int, *, changed: bool = False) -> list[int]:
    """Return token ids that are spread over the lower half of a vocabulary, where special tokens are rare.

    Args:
        count: number of tokens.
        vocabulary: size of the vocabulary.
        changed: return other tokens for every position.
    """
    span = max(vocabulary // 2, 2)
    shift = max(span // 2, 1) if changed else 0
    return [min((101 + 7919 * i + shift) % span + 1, vocabulary - 1) for i in range(count)]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode for the duration of a block, and each of its parts back as it was."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def judge(
    path: str,
    fast: Callable[[Given], Tensor],
    plain: Callable[[Given], Tensor],
    given: Given,
    changes: Sequence[tuple[Given, Sequence[int]]] = (),
    *,
    routed: bool = False,
) -> Evidence:
    """Measure whether a fast path is exact, without gradients.

    Args:
        path: name of the fast path.
        fast: computes `[T, H]` by the fast path; deterministic.
        plain: computes the same by the plain path.
        given: what both compute from.
        changes: other inputs of the same shape, each with the rows of the result that must not move.
        routed: whether tokens choose experts.

    Returns:
        The evidence. An error of either path becomes its reason; running out of memory is raised.
    """
    with torch.no_grad():
        try:
            return _Trial(path, fast, plain, given, changes, routed).decide()
        except _ERRORS as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return Evidence(path, False, "structure", str(error) or type(error).__name__)


@dataclass(frozen=True)
class _Trial(Generic[Given]):
    """A fast path, its plain path and what both compute from; see `judge`."""

    path: str
    fast: Callable[[Given], Tensor]
    plain: Callable[[Given], Tensor]
    given: Given
    changes: Sequence[tuple[Given, Sequence[int]]]
    routed: bool

    def decide(self) -> Evidence:
        """Try the cheapest evidence first: equal bits, then measured rounding, then float64."""
        ours, theirs = self.fast(self.given), self.plain(self.given)
        if ours.shape != theirs.shape:
            shapes = f"{tuple(ours.shape)} instead of {tuple(theirs.shape)}"
            return Evidence(self.path, False, "structure", f"its results have the shape {shapes}")
        found = self._measure(ours, theirs)
        if not found.units.any():
            return found.evidence(self.path, "equal bits")
        if not bool(ours.isfinite().all()):
            return found.evidence(self.path, "rounding", "its results are not finite")
        found.rounding = measured_rounding(lambda: self.plain(self.given), first=theirs)
        sharp = float(found.rounding.max()) * TOKEN_FACTOR <= _SHARP
        if found.within and (sharp or float(found.most.max()) <= torch.finfo(ours.dtype).eps):
            return found.evidence(self.path, "rounding")
        return self._decide_in_float64(found, ours, theirs)

    def _measure(self, ours: Tensor, theirs: Tensor, *, moves: bool = True) -> "_Measured":
        moved = torch.zeros(len(ours), dtype=torch.float64)
        for other, rows in self.changes if moves else ():
            where = list(rows)
            moved[where] = torch.maximum(moved[where], distance(self.fast(other), ours)[where])
        rounding = torch.full_like(moved, torch.finfo(ours.dtype).eps)
        return _Measured(distance(ours, theirs), moved, rounding, _dtype_of(ours))

    def _repeats(self, ours: Tensor) -> bool:
        """Return whether the fast path gives the same bits again: what moves then, moves because of its inputs."""
        return torch.equal(self.fast(self.given), ours)

    def _decide_in_float64(self, found: "_Measured", narrow: Tensor, theirs: Tensor) -> Evidence:
        try:
            # Autocast would convert weights to half precision again, and keep converted ones for later calls.
            with torch.autocast(theirs.device.type, enabled=False), InFloat64():
                ours, reference = self.fast(self.given), self.plain(self.given)
                wide = self._measure(ours, reference, moves=bool(found.moved.any()))
                wide.rounding = measured_rounding(lambda: self.fast(self.given), draws=1, first=ours)
        except _ERRORS as error:  # also out of memory: the path is off, and the model can be used without it
            why = f"{found.fault}, which does not tell a fault from rounding, and it does not run in float64: {error}"
            return found.evidence(self.path, "undecided", why)
        if not wide.within:
            return wide.evidence(self.path, "float64", f"{wide.fault} in float64")
        if not self.routed and found.moved.any() and not wide.moved.any() and self._repeats(narrow):
            # Rounding depends on shapes, which are the same: a row that moves at all has seen what was changed.
            moved = f"a token moves by {float(found.moved.max()):.1e} when another one changes, in float64 by nothing"
            why = f"its sequences see each other with the kernels of {found.dtype}: {moved}"
            return found.evidence(self.path, "float64", why)
        # The path is right. What remains are the kernels of this dtype, whose own error is known now.
        found.rounding = torch.maximum(found.rounding, distance(theirs, reference) / MEAN_FACTOR)
        near = float((found.units <= TOKEN_FACTOR).double().mean())
        if found.within or (self.routed and near >= _ROUTED_SHARE):
            return found.evidence(self.path, "float64")
        why = f"it is right in float64, but not with the kernels of {found.dtype}: {found.fault}"
        return found.evidence(self.path, "float64", why)


def _dtype_of(result: Tensor) -> str:
    kind = result.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else result.dtype
    return str(dtype).removeprefix("torch.")


@dataclass
class _Measured:
    """Differences, movements and rounding of a result's rows, float64 `[T]` each, and the result's dtype."""

    difference: Tensor
    moved: Tensor
    rounding: Tensor
    dtype: str

    @property
    def most(self) -> Tensor:
        """The larger of difference and movement."""
        return torch.maximum(self.difference, self.moved)

    @property
    def units(self) -> Tensor:
        """The same in units of rounding."""
        return self.most / self.rounding

    @property
    def within(self) -> bool:
        """Whether rounding explains every row, and all of them together."""
        return float(self.units.max()) <= TOKEN_FACTOR and float(self.units.square().mean().sqrt()) <= MEAN_FACTOR

    @property
    def fault(self) -> str:
        """The row that differs most, in words."""
        leaks = self.moved / self.rounding
        leaking = float(leaks.max()) > TOKEN_FACTOR
        worst = int((leaks if leaking else self.units).argmax())
        known = f"rounding is {float(self.rounding[worst]):.1e}"
        if leaking:
            moved = f"a token moves by {float(self.moved[worst]):.1e} when another sequence changes"
            return f"its sequences see each other: {moved} ({known})"
        return f"a token differs from the plain path by {float(self.difference[worst]):.1e} ({known})"

    def evidence(self, path: str, method: str, reason: str = "") -> Evidence:
        """Return what was measured; a path without a reason against it is exact."""
        numbers = (
            float(self.difference.max()),
            float(self.moved.max()),
            float(self.rounding[int(self.units.argmax())]),
        )
        return Evidence(path, not reason, method, reason, *numbers, self.dtype, float(self.units.max()))
