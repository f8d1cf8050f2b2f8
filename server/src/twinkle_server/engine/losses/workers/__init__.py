"""Worker processes for losses of plugins, so that a loss that hangs or crashes affects only its tenant."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of worker processes.

    Attributes:
        seconds: time limit of the loss of one operation, all its micro-batches together.
        memory: bytes that a worker may allocate after its start.
        start: time limit of the import of a plugin in seconds.
        warm: maximum number of idle workers that are kept.
    """

    seconds: float = 10.0
    memory: int = 2**30
    start: float = 60.0
    warm: int = 8
