"""Learning-rate schedulers with a linear warm-up."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class _WarmupScheduler(LRScheduler):
    """A learning rate that is a factor of the number of steps made, so that a resume lands on the same value."""

    def __init__(
        self, optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, last_epoch: int = -1
    ) -> None:
        if num_warmup_steps < 0 or num_training_steps <= 0:
            raise ValueError(
                f"{type(self).__name__}: num_warmup_steps={num_warmup_steps}, num_training_steps={num_training_steps}; "
                "the first must be at least 0 and the second at least 1"
            )
        self.num_warmup_steps = num_warmup_steps
        self.num_training_steps = num_training_steps
        super().__init__(optimizer, last_epoch)

    def factor(self, step: int) -> float:
        """Return the factor on the base learning rate after `step` updates."""
        if step < self.num_warmup_steps:
            return step / self.num_warmup_steps
        left = max(1, self.num_training_steps - self.num_warmup_steps)
        return self.decay(min(1.0, (step - self.num_warmup_steps) / left))

    def decay(self, progress: float) -> float:
        """Return the factor at `progress` in [0, 1] of the time after warm-up."""
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        """Return one learning rate a parameter group."""
        return [float(base) * self.factor(self.last_epoch) for base in self.base_lrs]


class CosineWarmupScheduler(_WarmupScheduler):
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


class LinearWarmupScheduler(_WarmupScheduler):
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
