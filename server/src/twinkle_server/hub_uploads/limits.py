"""Limits of uploads to hubs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """Limits of uploads of checkpoints.

    Attributes:
        hubs: schemes of the hubs to which checkpoints may be uploaded; none turns uploads off.
        processes: uploads that run at the same time; those of one tenant run one after the other.
        waiting: unfinished uploads of one tenant.
        seconds: time limit of one attempt.
        attempts: attempts of an upload while the hub cannot be reached or is overloaded.
        pause: seconds before the second attempt, which grow fourfold with each further one.
        kept: seconds for which the outcome of an upload is kept.
    """

    hubs: tuple[str, ...] = ("hf", "ms")
    processes: int = 2
    waiting: int = 32
    seconds: float = 3600.0
    attempts: int = 3
    pause: float = 10.0
    kept: float = 86400.0
