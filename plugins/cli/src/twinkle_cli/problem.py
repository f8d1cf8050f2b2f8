"""One thing that `twinkle plugins doctor` found."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and what to do about it (empty where `what` says it).

    Attributes:
        kind: what sort of thing.
        what: the thing itself.
        remedy: what to do.
        optional: it is wrong only for whoever wants to use it: an extra that is not installed.
    """

    kind: str
    what: str
    remedy: str = ""
    optional: bool = False
