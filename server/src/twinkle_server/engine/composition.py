"""How the passes of an operation were composed, as the log keeps it: with it they are composed so again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class Composition:
    """Passes in which an operation was computed, in order.

    Attributes:
        passes: what the engine recorded. Of each its number (`pass`), which grows with time and is the same for all
            operations that shared it; the rest is the engine's own.
    """

    passes: Sequence[Mapping[str, Any]]

    @property
    def first(self) -> int:
        """Number of the first pass."""
        return int(self.passes[0]["pass"])

    def dump(self) -> str:
        """Return it as the log keeps it."""
        return orjson.dumps(self.passes).decode()

    @classmethod
    def parse(cls, text: str) -> "Composition":
        """Read what `dump` wrote."""
        return cls(orjson.loads(text))
