"""What tests make the ledger do: take its time, die, hang, fail. A datum, or a prompt, is named by its first token."""

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from twinkle_server.engine.backend import Fatal

_PART = 1024


@dataclass(frozen=True, slots=True)
class Chaos:
    """How the ledger behaves; the lists hold first tokens.

    Attributes:
        vocabulary: number of token ids.
        context: tokens of a row.
        seconds_per_token: that a pass takes.
        seconds_per_step: that an optimizer step takes.
        seconds_per_decode: that a decode step takes.
        die: these kill the process.
        die_once: these do, the first time on this data directory.
        hang: these never end.
        fatal: these raise `Fatal`.
        error: these raise an error of their own.
        whole: these make the whole pass raise an error, whoever shares it.
        memory: with these in it, a whole pass has no memory.
        tokens_in_memory: a pass of more has no memory.
        memory_every: each so many-th pass has none; 0 is never.
    """

    vocabulary: int = 2**31 - 1
    context: int = 2**20
    seconds_per_token: float = 0.0
    seconds_per_step: float = 0.0
    seconds_per_decode: float = 0.0
    die: Collection[int] = ()
    die_once: Collection[int] = ()
    hang: Collection[int] = ()
    fatal: Collection[int] = ()
    error: Collection[int] = ()
    whole: Collection[int] = ()
    memory: Collection[int] = ()
    tokens_in_memory: int = 2**62
    memory_every: int = 0

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> "Chaos":
        """Read `BackendOptions.extra`.

        Raises:
            ValueError: it says something that the ledger does not know.
        """
        known = [entry.name for entry in fields(cls)]
        if unknown := sorted(set(extra) - set(known)):
            raise ValueError(f"the ledger knows no option {', '.join(unknown)}; it knows {', '.join(known)}")
        return cls(**extra)

    def spend(self, tokens: int, between: Callable[[], None]) -> None:
        """Take the time of a pass, in parts, and call `between` between them."""
        while tokens > 0 and self.seconds_per_token > 0:
            part = min(tokens, _PART)
            time.sleep(part * self.seconds_per_token)
            tokens -= part
            if tokens:
                between()

    def strike(self, token: int, data: Path) -> None:
        """Do what a datum of that first token does to a process before it is looked at."""
        if token in self.die_once:
            mark = data / f"ledger-died-of-{token}"
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        if token in self.die:
            os.kill(os.getpid(), signal.SIGKILL)
        while token in self.hang:
            time.sleep(60.0)
        if token in self.fatal:
            raise Fatal(f"the ledger was told that {token} is fatal")
        if token in self.whole:
            raise RuntimeError(f"the ledger was told that {token} breaks a pass")
        if token in self.memory:
            raise MemoryError(f"the ledger was told that there is no memory for {token}")
