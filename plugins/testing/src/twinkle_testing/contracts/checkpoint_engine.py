"""Contract checks of checkpoint engines: repeated, complete transfers; a failure raises in the receiver."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from twinkle_testing.contracts.case import Case, Violation, require
from twinkle_testing.contracts.transfer import Side, SideFailed, SideHere, weights
from twinkle_testing.contracts.values import same, shown

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True)
class CheckpointEngineCase(Case):
    """An engine, built in one process for the trainer and in another for the sampler.

    Attributes:
        start: start method of these processes; `fork` is faster, but does not work with devices. `here` is for an
            engine within one process: both sides are threads, and the trainer raises instead of being killed.
        dtype: name of the dtype in which weights arrive, if it is not their own.
        seconds: time limit of a transfer.
        bytes_a_weight: size of the largest weight; it should be larger than the engine's bucket.
    """

    kind = "checkpoint_engine"

    start: Literal["spawn", "fork", "here"] = "spawn"
    dtype: str = ""
    seconds: float = 60.0
    bytes_a_weight: int = 1 << 20

    @contextmanager
    def sides(self) -> "Iterator[tuple[AnySide, AnySide]]":
        """Start trainer and sampler, connected by the engine."""
        trainer, sampler = self._side(), self._side()
        try:
            connect(self, trainer, sampler)
            yield trainer, sampler
        finally:
            trainer.kill()
            sampler.kill()

    def _side(self) -> "AnySide":
        if self.start == "here":
            return SideHere(self.component, dict(self.kwargs), self.seconds)
        return Side(self.component, dict(self.kwargs), self.start, self.seconds)

    def expected(self, seed: int) -> "list[tuple[str, Tensor]]":
        """Return the expected weights."""
        import torch

        sent = weights(seed, self.bytes_a_weight)
        wanted = getattr(torch, self.dtype) if self.dtype else None
        return [(n, t.to(wanted) if wanted is not None and t.is_floating_point() else t) for n, t in sent]


AnySide = Side | SideHere


def connect(case: CheckpointEngineCase, trainer: AnySide, sampler: AnySide) -> None:
    """Exchange metadata like the manager, and let both sides join the group."""
    metadata = [trainer.ask("prepare"), sampler.ask("prepare")]
    topology = case.component.build_topology(1, 1, metadata)
    fine = isinstance(topology, tuple) and len(topology) == 2 and all(isinstance(part, dict) for part in topology)
    require(fine, f"build_topology() gave {shown(topology)}; return the arguments of trainer and of sampler ranks")
    for side, part in zip((trainer, sampler), topology, strict=True):
        counts = {name: len(values) for name, values in part.items()}
        require(set(counts.values()) <= {1}, f"build_topology(1, 1) gave lists of {counts}; give one entry per rank")
        side.tell("init_process_group", {name: values[0] for name, values in part.items()})
    trainer.answer()
    sampler.answer()


def transfer(case: CheckpointEngineCase, trainer: AnySide, sampler: AnySide, seed: int) -> list[Any]:
    """Send the weights of a seed, and return the received ones."""
    sampler.tell("receive", None)
    trainer.tell("send", (seed, case.bytes_a_weight))
    trainer.answer()
    found: list[Any] = sampler.answer()
    return found


def compare(case: CheckpointEngineCase, found: list[Any], seed: int, what: str) -> None:
    """Require every weight of a seed, in order, number for number."""
    import numpy as np
    import torch

    wanted = case.expected(seed)
    names = [name for name, _, _ in found]
    require(names == [name for name, _ in wanted], f"{what} these arrived: {names}; sent were {[n for n, _ in wanted]}")
    for (name, dtype, numbers), (_, tensor) in zip(found, wanted, strict=True):
        require(dtype == str(tensor.dtype), f"{what} {name} arrived as {dtype}; it is {tensor.dtype}")
        plain = tensor.double() if tensor.is_floating_point() else tensor
        require(same(np.asarray(numbers), torch.as_tensor(plain).numpy()), f"{what} {name} arrived with other numbers")


def round_trip(case: CheckpointEngineCase) -> None:
    """Every weight arrives in order with name, dtype, shape and values, also scalar, empty and strided ones."""
    with case.sides() as (trainer, sampler):
        compare(case, transfer(case, trainer, sampler, 1), 1, "")


def repeated(case: CheckpointEngineCase) -> None:
    """A second and a third transfer send the new weights only."""
    with case.sides() as (trainer, sampler):
        for seed in (1, 2, 3):
            compare(case, transfer(case, trainer, sampler, seed), seed, f"at transfer {seed}")


def finalized(case: CheckpointEngineCase) -> None:
    """After `finalize` it can be prepared again; `finalize` may be called twice."""
    with case.sides() as (trainer, sampler):
        for seed in (1, 2):
            if seed == 2:
                for side in (trainer, sampler, trainer, sampler):
                    side.ask("finalize")
                connect(case, trainer, sampler)
            compare(case, transfer(case, trainer, sampler, seed), seed, f"at transfer {seed}")


def killed_in_the_middle(case: CheckpointEngineCase) -> None:
    """If the trainer is killed during a transfer, the sampler gets an error and never a partial result."""
    with case.sides() as (trainer, sampler):
        sampler.tell("receive", None)
        trainer.tell("send_half_and_die", (1, case.bytes_a_weight))
        trainer.wait()
        try:
            found = sampler.answer()
        except SideFailed:
            pass
        except TimeoutError as error:
            raise Violation(f"{case.seconds:g} s after the trainer was killed the sampler still waited") from error
        else:
            whole = len(case.expected(1))
            raise Violation(f"the trainer was killed, but the sampler accepted {len(found)} of {whole} weights")
    with case.sides() as (trainer, sampler):
        compare(case, transfer(case, trainer, sampler, 2), 2, "after a transfer that was killed,")


CASE = CheckpointEngineCase
CHECKS = (round_trip, repeated, finalized, killed_in_the_middle)
