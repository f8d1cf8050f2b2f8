"""Contract checks of kernels: numbers and gradients of the replaced function, in every dtype and layout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twinkle_testing.contracts.case import Case, NotApplicable, Violation, require
from twinkle_testing.contracts.values import leaves, left_alone, same, shown

if TYPE_CHECKING:
    from torch import Tensor

_TOLERANCES = {"torch.float64": 1e-9, "torch.float32": 1e-5, "torch.bfloat16": 2e-2, "torch.float16": 5e-3}


@dataclass(kw_only=True)
class KernelCase(Case):
    """A kernel, the function or layer that it replaces, and the arguments of both.

    Attributes:
        reference: the function or module that the kernel replaces.
        arguments: positional arguments of a call, or a function that returns them; floats are differentiated.
        call: takes the built component and returns the function to call; by default the component itself.
        dtypes: names of the supported dtypes.
        differentiable: whether it has a backward.
        tolerance: relative and absolute tolerance of the comparison; by default depends on the dtype.
    """

    kind = "kernel"

    reference: Callable[..., Any] | None = None
    arguments: Sequence[Any] | Callable[[], Sequence[Any]] = ()
    call: Callable[[Any], Callable[..., Any]] | None = None
    dtypes: Sequence[str] = ("float32",)
    differentiable: bool = True
    tolerance: float | None = field(default=None)

    def unfit(self) -> str:
        """Require a reference to compare with."""
        missing = "its example has no reference= (the function that it replaces) and arguments= (the arguments of both)"
        return super().unfit() or ("" if self.reference is not None and self.arguments else missing)

    def ready(self) -> Callable[..., Any]:
        """Return the function to call."""
        built = self.build()
        return self.call(built) if self.call else built

    def given(self, dtype: str = "float32") -> list[Any]:
        """Return fresh arguments, floats in `dtype`."""
        import torch

        values = self.arguments() if callable(self.arguments) else self.arguments
        wanted = getattr(torch, dtype)
        return [_fresh(value, wanted) for value in values]

    def near(self, found: Any, expected: Any, dtype: str, what: str) -> None:
        """Require numbers within the tolerance of the dtype."""
        tolerance = self.tolerance if self.tolerance is not None else _TOLERANCES[f"torch.{dtype}"]
        for one, two in zip(_tensors(found), _tensors(expected), strict=True):
            require(one.shape == two.shape, f"{what} has the shape {list(one.shape)}, the reference {list(two.shape)}")
            require(one.dtype == two.dtype, f"{what} is {one.dtype}, the reference's {two.dtype}")
            far = float((one.double() - two.double()).abs().max()) if one.numel() else 0.0
            require(same(one, two, tolerance=tolerance), f"{what} in {dtype} is up to {far:.3g} from the reference")


def numbers(case: KernelCase) -> None:
    """Its results equal those of the replaced layer or function, in each supported dtype."""
    for dtype in case.dtypes:
        arguments = case.given(dtype)
        case.near(case.ready()(*arguments), _reference(case)(*case.given(dtype)), dtype, "the result")


def gradients(case: KernelCase) -> None:
    """Its gradients equal those of the replaced layer or function."""
    import torch

    if not case.differentiable:
        raise NotApplicable("its example says differentiable=False")
    for dtype in case.dtypes:
        found = []
        for function in (case.ready(), _reference(case)):
            arguments = [_leaf(value) for value in case.given(dtype)]
            wanted = [value for value in arguments if getattr(value, "requires_grad", False)]
            results = [r for r in _tensors(function(*arguments)) if r.requires_grad]
            require(results, "the result has no gradient")
            total = torch.stack(
                [(r * torch.linspace(0.5, 1.5, r.numel(), dtype=r.dtype).reshape(r.shape)).sum() for r in results]
            ).sum()
            parts = torch.autograd.grad(total, wanted, allow_unused=True)
            found.append([torch.zeros_like(w) if p is None else p for w, p in zip(wanted, parts, strict=True)])
        case.near(found[0], found[1], dtype, "a gradient")


def any_layout(case: KernelCase) -> None:
    """Arguments that are not contiguous in memory give the same numbers."""
    dtype = case.dtypes[0]
    strided = [_strided(value) for value in case.given(dtype)]
    case.near(case.ready()(*strided), _reference(case)(*case.given(dtype)), dtype, "the result for strided arguments")


def arguments_left_alone(case: KernelCase) -> None:
    """It does not change its arguments."""
    kernel = case.ready()
    left_alone(lambda given: kernel(*given), case.given(case.dtypes[0]), "an argument")


def deterministic(case: KernelCase) -> None:
    """The same arguments give the same numbers, bit for bit."""
    kernel, dtype = case.ready(), case.dtypes[0]
    first, second = (list(_tensors(kernel(*case.given(dtype)))) for _ in range(2))
    require(same(first, second), "two calls gave different numbers")


CASE = KernelCase
CHECKS = (numbers, gradients, any_layout, arguments_left_alone, deterministic)


def _reference(case: KernelCase) -> Callable[..., Any]:
    if case.reference is None:
        raise NotApplicable("its example gives no reference=")
    return case.reference


def _fresh(value: Any, dtype: Any) -> Any:
    if not hasattr(value, "is_floating_point"):
        return value
    copied = value.detach().clone()
    return copied.to(dtype) if copied.is_floating_point() else copied


def _leaf(value: Any) -> Any:
    floats = hasattr(value, "is_floating_point") and value.is_floating_point()
    return value.requires_grad_() if floats else value


def _strided(value: Any) -> Any:
    import torch

    if not hasattr(value, "is_floating_point") or value.dim() == 0:
        return value
    wide = torch.stack([value, torch.full_like(value, 7)], dim=-1)
    return wide[..., 0]


def _tensors(result: Any) -> list["Tensor"]:
    found = [leaf for leaf in leaves(result) if hasattr(leaf, "is_floating_point")]
    if not found:
        raise Violation(f"it returned {shown(result)}; there is no tensor in it")
    return found
