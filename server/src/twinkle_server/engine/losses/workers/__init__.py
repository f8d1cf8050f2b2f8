"""Losses of plugins, computed in processes of their own, so that one that hangs or crashes costs its tenant only."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What the losses of plugins may take.

    Attributes:
        seconds: that the loss of one operation may take, all its micro-batches together.
        memory: bytes that a worker may allocate beyond those that it begins with.
        start: seconds that the import of a plugin may take.
        warm: idle workers that are kept.
    """

    seconds: float = 10.0
    memory: int = 2**30
    start: float = 60.0
    warm: int = 8
