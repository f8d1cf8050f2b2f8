"""Divide, clip and AdamW over flat buffers against the same over lists of matrices: CPU time.

    OMP_NUM_THREADS=1 python benchmarks/optim_step.py [--repetitions 9]

1. One adapter of rank 16 on all linears of a model of Qwen3-0.6B's shapes: 10.1 M numbers in 392 matrices.
   - ours: `clip_and_step` over one flat buffer
   - foreach: `clip_grad_norm_` and `AdamW(foreach=True)` over the matrices, without any division
   - hosted-like: each gradient is added to an accumulator, divided and measured by a number the host waits for, one
     after the other; then `clip_grad_norm_` over what a walk through the model finds trainable, AdamW as it is by
     default, and zeroed accumulators. The walk passes all adapters that the model has: 32 (with a goal), and 1
2. Eight adapters of rank 16 on a tiny model (hidden size 128, 4 layers: 155,648 numbers in 56 matrices each).
   - ours: one `clip_and_step`
   - foreach: the eight optimizers' own `clip_grad_norm_` and step, over their matrices
   - flat: the same over eight flat buffers with `AdamW(fused=True)`; no goal, since most of it is the arithmetic itself
3. The same two with eight adapters of rank 1, where calls weigh more than numbers.

Goals: foreach >= 4 x ours and hosted-like with 32 adapters >= 7 x ours in 1, foreach >= 5 x ours in 2. The weights
after three steps are compared before any time is counted.
"""

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
from _pairs import Ratio, describe_machine, in_turn, ratio
from torch import Tensor, nn
from torch.optim import AdamW

from twinkle_transformers.flat_step import clip_and_step

Shape = tuple[int, ...]
Call = Callable[[], object]
BOUND, TOLERANCE, WARM_STEPS = 1.0, 1e-6, 3
DENOMINATORS = (2.0, 0.5)
"""In turn, so that the gradients that stay between repetitions are divided by something each time and never vanish."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its tables; exit code 1 when weights differ or a goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=9)
    repetitions = parser.parse_args(arguments).repetitions
    torch.set_num_threads(1)
    print(describe_machine(["torch"]))
    large, tiny = shapes(1024, 2048, 1024, 3072, 28, 16), shapes(128, 128, 64, 384, 4, 16)
    thin = shapes(128, 128, 64, 384, 4, 1)
    goals = {"foreach": 4.0, "hosted-like, 32": 7.0, "hosted-like, 1": None}
    return max(
        compare("one adapter", [large], goals, repetitions),
        compare("eight tiny adapters", [tiny] * 8, {"foreach": 5.0, "flat": None}, repetitions),
        compare("eight tiny adapters of rank 1", [thin] * 8, {"foreach": None, "flat": None}, repetitions),
    )


def shapes(hidden: int, heads: int, groups: int, wide: int, layers: int, rank: int) -> list[Shape]:
    """Return the shapes of A and B of all linears of a gated transformer."""
    attention = [(hidden, heads), (hidden, groups), (hidden, groups), (heads, hidden)]
    mlp = [(hidden, wide), (hidden, wide), (wide, hidden)]
    return [shape for inner, outer in (attention + mlp) * layers for shape in ((rank, inner), (outer, rank))]


class Flat:
    """Each adapter is one flat buffer with a fused optimizer."""

    def __init__(self, adapters: Sequence[Sequence[Shape]]) -> None:
        matrices = [random_matrices(adapter, index) for index, adapter in enumerate(adapters)]
        self.flats = [nn.Parameter(torch.cat([weight.flatten() for weight, _ in pairs])) for pairs in matrices]
        for parameter, pairs in zip(self.flats, matrices, strict=True):
            parameter.grad = torch.cat([grad.flatten() for _, grad in pairs])
        self.optimizers = [AdamW([parameter], fused=True) for parameter in self.flats]
        self.steps = 0

    def weights(self) -> Tensor:
        """Return all numbers in one vector."""
        return torch.cat([parameter.detach() for parameter in self.flats])

    def together(self) -> None:
        """Step all in one call."""
        denominator = DENOMINATORS[self.steps % 2]
        self.steps += 1
        count = len(self.flats)
        clip_and_step(self.optimizers, [denominator] * count, [BOUND] * count)

    def apart(self) -> None:
        """Step each by itself."""
        for parameter, optimizer in zip(self.flats, self.optimizers, strict=True):
            nn.utils.clip_grad_norm_([parameter], BOUND)
            optimizer.step()


class Lists:
    """Each adapter is a list of matrices."""

    def __init__(self, adapters: Sequence[Sequence[Shape]], foreach: bool | None = True) -> None:
        self.lists: list[list[nn.Parameter]] = []
        for index, adapter in enumerate(adapters):
            self.lists.append([])
            for weight, grad in random_matrices(adapter, index):
                self.lists[-1].append(nn.Parameter(weight))
                self.lists[-1][-1].grad = grad
        self.optimizers = [AdamW(parameters, foreach=foreach) for parameters in self.lists]

    def weights(self) -> Tensor:
        """Return all numbers in one vector."""
        return torch.cat([parameter.detach().flatten() for parameters in self.lists for parameter in parameters])

    def step(self) -> None:
        """Clip and step each adapter."""
        for parameters, optimizer in zip(self.lists, self.optimizers, strict=True):
            nn.utils.clip_grad_norm_(parameters, BOUND)
            optimizer.step()


class HostedLike(Lists):
    """As an open hosted trainer does it: matrix by matrix, with accumulators apart from the gradients."""

    def __init__(self, adapters: Sequence[Sequence[Shape]], registered: int) -> None:
        super().__init__(adapters, foreach=None)
        self.model = skeleton(self.lists[0], registered)
        self.fresh = [[p.grad.clone() for p in parameters if p.grad is not None] for parameters in self.lists]
        self.sums = [[torch.zeros_like(grad) for grad in grads] for grads in self.fresh]

    def step(self) -> None:
        """Accumulate, divide, measure, clip, step and zero."""
        for parameters, fresh, sums in zip(self.lists, self.fresh, self.sums, strict=True):
            for total, grad in zip(sums, fresh, strict=True):
                total.add_(grad)
            squares = 0.0
            for parameter, total in zip(parameters, sums, strict=True):
                parameter.grad = total / 1.0
                squares += parameter.grad.norm().item() ** 2
        trained = [p for p in self.model.parameters() if p.requires_grad and p.grad is not None]
        nn.utils.clip_grad_norm_(trained, BOUND)
        self.optimizers[0].step()
        for total in (total for sums in self.sums for total in sums):
            total.zero_()


def skeleton(matrices: Sequence[nn.Parameter], registered: int) -> nn.Module:
    """Return modules nested as PEFT nests them, which hold `matrices` as adapter 0 and others without numbers."""
    others = {str(index): nn.Linear(1, 1, bias=False, device="meta") for index in range(registered)}
    linears = nn.ModuleList()
    for pair in zip(matrices[::2], matrices[1::2], strict=True):
        linear: list[nn.Module] = [nn.Linear(1, 1, bias=False, device="meta").requires_grad_(False)]
        for matrix in pair:
            modules = {key: copy.deepcopy(other) for key, other in others.items()}
            modules["0"].weight = matrix
            linear.append(nn.ModuleDict(modules))
        linear.append(nn.ModuleDict({key: nn.Identity() for key in others}))  # PEFT's dropout
        linears.append(nn.ModuleList(linear))
    return linears


def random_matrices(adapter: Sequence[Shape], seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return a weight and a gradient for each shape."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator) * 0.01) for shape in adapter
    ]


def compare(title: str, adapters: Sequence[Sequence[Shape]], goals: dict[str, float | None], repetitions: int) -> int:
    """Compare weights after some steps, then time."""
    numbers = sum(rows * columns for adapter in adapters for rows, columns in adapter)
    matrices = sum(map(len, adapters))
    ours = Flat(adapters)
    others = {name: CONTESTANTS[name](adapters) for name in goals}
    runs: dict[str, Call] = {name: other.apart if isinstance(other, Flat) else other.step
                             for name, other in others.items()}  # fmt: skip
    error = 0.0
    for _ in range(WARM_STEPS):
        clip_and_step(ours.optimizers, [1.0] * len(adapters), [BOUND] * len(adapters))
        for run in runs.values():
            run()
    for other in others.values():
        error = max(error, float((ours.weights() - other.weights()).norm() / other.weights().norm()))
    print(f"\n{title}: {numbers:,} numbers in {matrices} matrices; weights differ by {error:.1e}")
    if not error <= TOLERANCE:
        print("weights differ: no time is counted")
        return 1
    seconds = in_turn({"ours": ours.together, **runs}, repetitions, warm=True)
    print("| | CPU ms | x ours | goal |\n| --- | --- | --- | --- |")
    print(f"| ours | {median(seconds['ours']) * 1e3:.3f} | | |")
    missed = 0
    for name, goal in goals.items():
        found: Ratio = ratio(seconds[name], seconds["ours"])
        print(f"| {name} | {median(seconds[name]) * 1e3:.3f} | {found} | {'' if goal is None else f'>= {goal}'} |")
        missed |= goal is not None and found.median < goal
    return int(missed)


CONTESTANTS: dict[str, Callable[[Sequence[Sequence[Shape]]], Flat | Lists]] = {
    "foreach": Lists,
    "hosted-like, 32": partial(HostedLike, registered=32),
    "hosted-like, 1": partial(HostedLike, registered=1),
    "flat": Flat,
}

if __name__ == "__main__":
    sys.exit(main())
