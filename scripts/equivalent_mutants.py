"""Mutants of the store and the runtime that change nothing that is promised, each with the reason."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Equivalent:
    """Mutants of one line.

    Attributes:
        function: qualified name of the function or class around it.
        source: text of the line, or its beginning.
        what: was changed; "" is whatever can be changed there.
        reason: why nothing that is promised changes.
    """

    function: str
    source: str
    what: str
    reason: str

    def matches(self, mutant: Any) -> bool:
        """Return whether a mutant is meant."""
        return (
            mutant.function == self.function
            and mutant.source.startswith(self.source)
            and self.what in ("", mutant.what)
        )


EQUIVALENT: tuple[Equivalent, ...] = ()
