"""How long the phases of a step take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Measures named phases, one after the other, in seconds."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time that the block takes to a phase."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - started

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return sum(self._seconds.values())

    def metrics(self) -> dict[str, float]:
        """Return the seconds of each phase, by `seconds/<phase>`."""
        return {f"seconds/{phase}": seconds for phase, seconds in self._seconds.items()}
