"""Whether what the engine computed last worked, and not who asked for it: what `/readyz` says of the engine's work."""

import time
from collections.abc import Callable

from twinkle_server.operations import PASSES, Category, Kind

FORGOTTEN = 60.0
"""Seconds after which a failure says nothing any more: a probe that keeps work away must not wait for work."""
_SHOWN: dict[str, str] = {"pass": "pass", "optim_step": "optimizer step", "sample": "sampling step"}


class LastPass:
    """Turns of the engine, each known by how its operations ended.

    A turn in which something was done has worked, whatever else failed in it; one in which everything failed as the
    service's fault has failed. What fails as a user's fault says nothing of the engine. Saving, loading and creating
    are not counted: what they fail of lies in files and in how much fits.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turns: dict[str, set[bool]] = {}  # of the turns under way, by kind: whether there were such as worked
        self._failed: dict[str, float] = {}

    def ended(self, kind: Kind, category: Category | None) -> None:
        """Take into account how an operation of the turn under way ended; None is well."""
        name = "pass" if kind in PASSES else kind
        if name in _SHOWN and category in (None, "server"):
            self._turns.setdefault(name, set()).add(category is None)

    def passed(self, name: str) -> None:
        """Take into account that a turn is over.

        Args:
            name: "pass" or a kind of operation, as the message `passed` has it.
        """
        ended = self._turns.pop(name, set())
        if True in ended:
            self._failed.pop(name, None)
        elif ended:
            self._failed[name] = self._clock()

    def begin_anew(self) -> None:
        """Forget it all: there is a new engine."""
        self._turns.clear()
        self._failed.clear()

    @property
    def trouble(self) -> str | None:
        """What failed last and has not worked since; None if nothing did."""
        for name, since in self._failed.items():
            if self._clock() - since < FORGOTTEN:
                return f"the last {_SHOWN[name]} failed as a whole; the log says why"
        return None
