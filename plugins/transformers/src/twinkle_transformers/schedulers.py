"""Learning-rate schedulers with a linear warm-up: each is a closed form of the number of updates made."""

import math
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class _Warmup(LRScheduler):
    """A learning rate with a factor that depends only on the number of steps, so that a resume gives the same value."""

    def __init__(self, optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> None:
        _check_counts(self, num_warmup_steps=num_warmup_steps)
        self.num_warmup_steps = num_warmup_steps
        super().__init__(optimizer, last_epoch)

    def factor(self, step: int) -> float:
        """Return the factor on the base learning rate after `step` updates."""
        if step < self.num_warmup_steps:
            return step / self.num_warmup_steps
        return self.after(step - self.num_warmup_steps)

    def after(self, step: int) -> float:
        """Return the factor `step` updates after warm-up; 1 at 0."""
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        """Return one learning rate a parameter group."""
        return [float(base) * self.factor(self.last_epoch) for base in self.base_lrs]


class _WarmupDecay(_Warmup):
    """Warm-up, then a decay over the rest of a known number of steps."""

    def __init__(
        self, optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, last_epoch: int = -1
    ) -> None:
        _check_counts(self, num_warmup_steps=num_warmup_steps, num_training_steps=num_training_steps)
        self.num_training_steps = num_training_steps
        super().__init__(optimizer, num_warmup_steps, last_epoch)

    def after(self, step: int) -> float:
        """Return the factor `step` updates after warm-up; past the end it stays where it ended."""
        left = max(1, self.num_training_steps - self.num_warmup_steps)
        return self.decay(min(1.0, step / left))

    def decay(self, progress: float) -> float:
        """Return the factor at `progress` in [0, 1] of the time after warm-up."""
        raise NotImplementedError


class CosineWarmupScheduler(_WarmupDecay):
    """Linear warm-up from 0, then `0.5 (1 + cos(2 pi num_cycles progress))` (SGDR, arXiv:1608.03983, eq. 5).

    Args:
        optimizer: whose learning rates are changed.
        num_warmup_steps: updates until the full learning rate.
        num_training_steps: updates in all; after them the rate stays where it ended (0 with half a cycle).
        num_cycles: cosine waves; 0.5 falls from 1 to 0.
        last_epoch: updates already made minus one; -1 starts afresh.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        num_warmup_steps: int,
        num_training_steps: int,
        num_cycles: float = 0.5,
        last_epoch: int = -1,
    ) -> None:
        self.num_cycles = num_cycles
        super().__init__(optimizer, num_warmup_steps, num_training_steps, last_epoch)

    def decay(self, progress: float) -> float:
        """Return the cosine at `progress`."""
        return max(0.0, 0.5 * (1.0 + math.cos(2.0 * math.pi * self.num_cycles * progress)))


class LinearWarmupScheduler(_WarmupDecay):
    """Linear warm-up from 0, then linearly down to 0 at `num_training_steps`.

    Args:
        optimizer: whose learning rates are changed.
        num_warmup_steps: updates until the full learning rate.
        num_training_steps: updates in all.
        last_epoch: updates already made minus one; -1 starts afresh.
    """

    def decay(self, progress: float) -> float:
        """Return the line at `progress`."""
        return 1.0 - progress


class CosineRestartsWarmupScheduler(_WarmupDecay):
    """Linear warm-up from 0, then `num_cycles` half cosines from 1 to 0, each beginning anew at 1 (SGDR).

    Args:
        optimizer: whose learning rates are changed.
        num_warmup_steps: updates until the full learning rate.
        num_training_steps: updates in all; the rate is 0 from there on.
        num_cycles: half cosines; 1 is `CosineWarmupScheduler`.
        last_epoch: updates already made minus one; -1 starts afresh.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        num_warmup_steps: int,
        num_training_steps: int,
        num_cycles: int = 1,
        last_epoch: int = -1,
    ) -> None:
        if num_cycles < 1:
            raise ValueError(f"{type(self).__name__}: num_cycles must be at least 1, got {num_cycles}")
        self.num_cycles = num_cycles
        super().__init__(optimizer, num_warmup_steps, num_training_steps, last_epoch)

    def decay(self, progress: float) -> float:
        """Return the cosine of the cycle that `progress` is in."""
        return 0.0 if progress >= 1.0 else 0.5 * (1.0 + math.cos(math.pi * ((self.num_cycles * progress) % 1.0)))


class PolynomialWarmupScheduler(_WarmupDecay):
    """Linear warm-up from 0, then `m + (1 - m) (1 - progress)^power` with m = `min_lr_ratio`.

    Args:
        optimizer: whose learning rates are changed.
        num_warmup_steps: updates until the full learning rate.
        num_training_steps: updates in all; the rate stays at its lowest from there on.
        power: 1 is a line, 2 a parabola.
        min_lr_ratio: where it ends, as a fraction of the full learning rate.
        last_epoch: updates already made minus one; -1 starts afresh.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        num_warmup_steps: int,
        num_training_steps: int,
        power: float = 1.0,
        min_lr_ratio: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        if power <= 0:
            raise ValueError(f"{type(self).__name__}: power must be above 0, got {power}")
        self.power, self.min_lr_ratio = power, _fraction(self, "min_lr_ratio", min_lr_ratio)
        super().__init__(optimizer, num_warmup_steps, num_training_steps, last_epoch)

    def decay(self, progress: float) -> float:
        """Return the power of the remaining progress."""
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * float((1.0 - progress) ** self.power)


class ConstantWarmupScheduler(_Warmup):
    """Linear warm-up from 0, then the full learning rate.

    Args:
        optimizer: whose learning rates are changed.
        num_warmup_steps: updates until the full learning rate.
        num_training_steps: updates in all, if known: warm-up must end within them.
        last_epoch: updates already made minus one; -1 starts afresh.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        num_warmup_steps: int,
        num_training_steps: int | None = None,
        last_epoch: int = -1,
    ) -> None:
        _check_end(self, num_warmup_steps, num_training_steps)
        super().__init__(optimizer, num_warmup_steps, last_epoch)

    def after(self, step: int) -> float:
        """Return 1."""
        return 1.0


class InverseSqrtWarmupScheduler(_Warmup):
    """Linear warm-up from 0, then `sqrt(t / (t + step))` with t = `timescale` (arXiv:1706.03762, eq. 3).

    Args:
        optimizer: whose learning rates are changed.
        num_warmup_steps: updates until the full learning rate.
        num_training_steps: updates in all, if known: warm-up must end within them. The decay has no end.
        timescale: updates after warm-up until the rate has fallen to 1 / sqrt(2); by default `num_warmup_steps`, and
            10,000 without warm-up.
        last_epoch: updates already made minus one; -1 starts afresh.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        num_warmup_steps: int,
        num_training_steps: int | None = None,
        timescale: int | None = None,
        last_epoch: int = -1,
    ) -> None:
        _check_end(self, num_warmup_steps, num_training_steps)
        if timescale is not None and timescale < 1:
            raise ValueError(f"{type(self).__name__}: timescale must be at least 1, got {timescale}")
        self.timescale = timescale or num_warmup_steps or 10_000
        super().__init__(optimizer, num_warmup_steps, last_epoch)

    def after(self, step: int) -> float:
        """Return the inverse square root."""
        return math.sqrt(self.timescale / (self.timescale + step))


class WSDScheduler(_Warmup):
    """Warm-up, stable, decay: linear from 0, then constant, then down over the last steps (arXiv:2404.06395, sec. 4).

    Args:
        optimizer: whose learning rates are changed.
        num_warmup_steps: updates until the full learning rate.
        num_training_steps: updates in all; the rate stays at its lowest from there on.
        num_decay_steps: length of the decay; by default a tenth of `num_training_steps`, rounded up.
        decay_type: "linear" (`1 - p` at progress p), "cosine" (half a wave) or "1-sqrt" (`1 - sqrt(p)`,
            arXiv:2405.18392).
        min_lr_ratio: where it ends, as a fraction of the full learning rate.
        last_epoch: updates already made minus one; -1 starts afresh.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        num_warmup_steps: int,
        num_training_steps: int,
        num_decay_steps: int | None = None,
        decay_type: Literal["linear", "cosine", "1-sqrt"] = "linear",
        min_lr_ratio: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        if decay_type not in ("linear", "cosine", "1-sqrt"):
            raise ValueError(f"WSDScheduler: decay_type must be 'linear', 'cosine' or '1-sqrt', got {decay_type!r}")
        _check_counts(
            self,
            num_warmup_steps=num_warmup_steps,
            num_training_steps=num_training_steps,
            num_decay_steps=num_decay_steps,
        )
        decay = -(-num_training_steps // 10) if num_decay_steps is None else num_decay_steps
        if num_warmup_steps + decay > num_training_steps:
            raise ValueError(
                f"WSDScheduler: num_warmup_steps={num_warmup_steps} and num_decay_steps={decay} do not fit into "
                f"num_training_steps={num_training_steps}"
            )
        self.num_training_steps, self.num_decay_steps, self.decay_type = num_training_steps, decay, decay_type
        self.min_lr_ratio = _fraction(self, "min_lr_ratio", min_lr_ratio)
        super().__init__(optimizer, num_warmup_steps, last_epoch)

    def after(self, step: int) -> float:
        """Return 1 before the decay, and its curve in the decay."""
        left = self.num_training_steps - self.num_warmup_steps - step
        if left > self.num_decay_steps:
            return 1.0
        progress = 1.0 - max(0, left) / self.num_decay_steps if self.num_decay_steps else float(left <= 0)
        falling = {
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
            "1-sqrt": 1.0 - math.sqrt(progress),
        }[self.decay_type]
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * falling


def _check_counts(scheduler: object, **counts: Any) -> None:
    """Refuse invalid numbers of steps; None means that a number was not given."""
    for name, value in counts.items():
        least = 1 if name == "num_training_steps" else 0
        if value is not None and (isinstance(value, bool) or not hasattr(value, "__index__") or value < least):
            raise ValueError(
                f"{type(scheduler).__name__}: {name} must be an integer of at least {least}, got {value!r}"
            )


def _check_end(scheduler: object, num_warmup_steps: int, num_training_steps: int | None) -> None:
    _check_counts(scheduler, num_warmup_steps=num_warmup_steps, num_training_steps=num_training_steps)
    if num_training_steps is not None and num_training_steps < max(1, num_warmup_steps):
        raise ValueError(
            f"{type(scheduler).__name__}: num_training_steps={num_training_steps} ends before the warm-up of "
            f"{num_warmup_steps} steps"
        )


def _fraction(scheduler: object, name: str, value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{type(scheduler).__name__}: {name} must be between 0 and 1, got {value}")
    return value
