"""How many tokens go through the model at one time, so that who samples meanwhile waits only so long."""

import math
from collections.abc import Sequence

from twinkle.model.pool import Usage

_MEMORY = 2.0
"""Seconds of passes after which an earlier speed counts for a third: short passes say little of what long ones take."""
_BACKWARD = 3.0
"""How much more a token costs with its gradient, at most, as long as none was measured."""


class Pace:
    """Knows how fast the model was of late, in floating-point operations, which passes of all kinds have in common.

    Args:
        seconds: that a piece of a pass should take.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._rate: float | None = None
        self._costs: dict[bool, float] = {}  # of a token, without and with its gradient

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return self._rate is not None

    def tokens(self, training: bool) -> int:
        """Return the tokens of a piece.

        Args:
            training: gradients are wanted of some of them.
        """
        if self._rate is None:
            return 1
        cost = self._costs.get(training) or self._costs[not training] * (_BACKWARD if training else 1.0)
        return max(1, int(self._rate * self._seconds / cost))

    def measured(self, done: Sequence[tuple[bool, Usage]], seconds: float) -> None:
        """Take a pass into account.

        Args:
            done: of each of its operations, whether it had gradients, and what it cost.
            seconds: that all of them took.
        """
        flops = sum(usage.flops for _, usage in done)
        if seconds <= 0 or not flops:
            return
        for training, usage in done:
            if tokens := min(usage.tokens, usage.computed):  # those that shared a prefix will not always do so
                self._costs[training] = usage.flops / tokens
        now, share = flops / seconds, 1.0 - math.exp(-seconds / _MEMORY)
        self._rate = now if self._rate is None else self._rate + share * (now - self._rate)

    def forget(self) -> None:
        """Know nothing, as in the beginning."""
        self._rate = None
        self._costs.clear()
