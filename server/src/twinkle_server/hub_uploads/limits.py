"""Limits of uploads to hubs."""

from dataclasses import dataclass
from typing import Literal

from twinkle_server.bounds import Count, Seconds


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """Limits of uploads of checkpoints.

    Attributes:
        enabled: upload checkpoints for tenants, with their own tokens.
        hubs: schemes of the hubs to which checkpoints may be uploaded.
        processes: uploads that run at the same time; those of one tenant run one after the other.
        waiting: unfinished uploads of one tenant.
        seconds: time limit of one attempt.
        attempts: attempts of an upload while the hub cannot be reached or is overloaded.
        pause: seconds before the second attempt, which grow fourfold with each further one.
        kept: seconds for which the outcome of an upload is kept.
    """

    enabled: bool = True
    hubs: tuple[Literal["hf", "ms"], ...] = ("hf", "ms")
    processes: Count = 2
    waiting: Count = 32
    seconds: Seconds = 3600.0
    attempts: Count = 3
    pause: Seconds = 10.0
    kept: Seconds = 86400.0
