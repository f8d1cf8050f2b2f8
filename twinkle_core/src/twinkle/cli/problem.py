"""One thing that `twinkle plugins doctor` found."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and what to do about it (empty where `what` says it)."""

    kind: str
    what: str
    remedy: str = ""
