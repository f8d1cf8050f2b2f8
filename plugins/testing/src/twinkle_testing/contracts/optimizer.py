"""Contract checks of optimizers: torch's protocol, state that resumes bit for bit, idle parameters unchanged."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinkle_testing.contracts.case import Case, require
from twinkle_testing.contracts.values import same, shown

if TYPE_CHECKING:
    from torch import Tensor, nn

_STEPS = 4


@dataclass(kw_only=True)
class OptimizerCase(Case):
    """An optimizer and the parameters that it updates.

    Attributes:
        sparse: whether it needs sparse gradients (such as those of an embedding).
        lr: the learning rate that the checks use.
        steps: steps within which the loss of a small least-squares problem must have fallen.
    """

    kind = "optimizer"

    sparse: bool = False
    lr: float = 0.01
    steps: int = 30

    def module(self) -> "nn.Module":
        """Return the small network to train, the same each time."""
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            if self.sparse:
                return torch.nn.Sequential(torch.nn.Embedding(6, 4, sparse=True))
            return torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))

    def of(self, parameters: Any, **more: Any) -> Any:
        """Return the optimizer of some parameters or groups."""
        if isinstance(self.component, type):
            return self.component(parameters, **{"lr": self.lr, **self.kwargs, **more})
        return self.component(parameters, **more)

    def build(self, **more: Any) -> Any:
        """Return the optimizer of the small net."""
        return self.of(self.module().parameters(), **more)

    def closure(self, module: "nn.Module", optimizer: Any) -> Callable[[], "Tensor"]:
        """Return the function that computes loss and gradients of the small problem."""
        import torch

        draw = torch.Generator().manual_seed(1)
        if self.sparse:
            inputs, target = torch.arange(6), torch.randn((6, 4), generator=draw)
        else:
            inputs, target = torch.randn((16, 5), generator=draw), torch.randn((16, 3), generator=draw)

        def compute() -> "Tensor":
            optimizer.zero_grad()
            loss: Tensor = (module(inputs) - target).square().mean()
            loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
            return loss

        return compute


def improves(case: OptimizerCase) -> None:
    """Its steps reduce the loss of a small least-squares problem, which stays finite."""
    module = case.module()
    optimizer = case.of(module.parameters())
    compute = case.closure(module, optimizer)
    before = float(compute().detach())
    for _ in range(case.steps):
        optimizer.step(compute)
    after = float(compute().detach())
    require(after < before, f"after {case.steps} steps the loss is {after:.6g}; it was {before:.6g}")


def protocol(case: OptimizerCase) -> None:
    """It has torch's methods and parameter groups with a learning rate each."""
    optimizer = case.build()
    for name in ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"):
        require(callable(getattr(optimizer, name, None)), f"it has no method {name}()")
    groups = getattr(optimizer, "param_groups", None)
    require(isinstance(groups, list) and groups, f"param_groups is {shown(groups)}; it must be a list of dicts")
    for group in groups or []:
        require(
            "params" in group and "lr" in group, f"a parameter group has {', '.join(group)}; it needs params and lr"
        )


def zero_grad(case: OptimizerCase) -> None:
    """`zero_grad` leaves no gradient behind."""
    module = case.module()
    optimizer = case.of(module.parameters())
    case.closure(module, optimizer)()
    optimizer.zero_grad()
    left = [name for name, p in module.named_parameters() if p.grad is not None and bool(p.grad.to_dense().any())]
    require(not left, f"after zero_grad() these have a gradient: {', '.join(left)}")


def round_trip(case: OptimizerCase) -> None:
    """With its state loaded into a new one, training continues bit for bit, also through a file."""
    import torch

    unbroken = case.module()
    whole = case.of(unbroken.parameters())
    _steps(case, unbroken, whole, 2 * _STEPS)
    module = case.module()
    first = case.of(module.parameters())
    _steps(case, module, first, _STEPS)
    file = case.folder / "optimizer.pt"
    torch.save(first.state_dict(), file)
    second = case.of(module.parameters())
    second.load_state_dict(torch.load(file, weights_only=True))
    _steps(case, module, second, _STEPS)
    require(
        _equal(module, unbroken),
        f"{_STEPS} steps, its state saved and loaded, {_STEPS} more are not {2 * _STEPS} steps",
    )


def without_gradient(case: OptimizerCase) -> None:
    """A parameter without gradient is not changed."""
    import torch

    module = case.module()
    idle = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = case.of([*module.parameters(), idle])
    _steps(case, module, optimizer, 2)
    require(bool((idle == 1).all()), f"a parameter that had no gradient became {idle.detach().tolist()}")


def learning_rate(case: OptimizerCase) -> None:
    """It uses learning rates that a scheduler changes between steps: with 0, gradients have no effect."""
    module = case.module()
    optimizer = case.of(module.parameters())
    _steps(case, module, optimizer, 1)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.0  # the same type, a number or a tensor
    before = [p.detach().clone() for p in module.parameters()]
    _steps(case, module, optimizer, 1)
    moved = max(float((a - b.detach()).abs().max()) for a, b in zip(before, module.parameters(), strict=True))
    require(moved == 0, f"with a learning rate of 0 a step moved a parameter by {moved:.3g}")


def deterministic(case: OptimizerCase) -> None:
    """Two runs from the same start end with the same parameters, independent of the random generators."""
    import torch

    ends = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        module = case.module()
        _steps(case, module, case.of(module.parameters()), _STEPS)
        ends.append(module)
    require(_equal(*ends), "two runs from the same start ended at different parameters")


CASE = OptimizerCase
CHECKS = (protocol, improves, zero_grad, round_trip, without_gradient, learning_rate, deterministic)


def _steps(case: OptimizerCase, module: "nn.Module", optimizer: Any, count: int) -> None:
    compute = case.closure(module, optimizer)
    for _ in range(count):
        compute()
        optimizer.step(compute)


def _equal(one: "nn.Module", two: "nn.Module") -> bool:
    return same(dict(one.state_dict()), dict(two.state_dict()))
