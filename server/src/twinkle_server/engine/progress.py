"""How far a turn of passes is, reported while it runs: a single operation may take many passes."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from twinkle_server.engine import messages
from twinkle_server.engine.messages import Message
from twinkle_server.engine.queues import Task

EVERY: Final = 0.5
"""Seconds of passes between two reports of a turn."""


class Progress:
    """Counts the passes of a turn, and estimates the tokens that they have computed.

    The engine tells when a pass has ended, but not what was in it. A pass is taken to have as many tokens as those of
    the last turn with several passes had on average, at first the limit. The report of the whole turn has the exact
    numbers, and says which part of them was reported before.

    Args:
        clock: returns seconds without those of sampling.
        report: sends a message to the service.
        pass_tokens: maximum number of tokens of a pass.
    """

    def __init__(self, clock: Callable[[], float], report: Callable[[Message], None], pass_tokens: int) -> None:
        self._clock, self._report = clock, report
        self._size = float(pass_tokens)
        self.begin(())

    def begin(self, tasks: Sequence[Task]) -> None:
        """Begin a turn with these tasks; none of them is taken out of it."""
        self._tasks = tasks
        self._tokens = sum(task.tokens for task in tasks)
        self._passes = 0
        self._since = self._clock()
        self._reported: dict[str, Any] = {"seconds": 0.0, "passes": 0, "tokens": 0}
        self._reported_tenants: Counter[str] = Counter()

    def runs(self) -> None:
        """Count the first pass of a call of the engine."""
        self._passes += 1

    def between(self) -> None:
        """Count a pass that follows another, and report when it is time to."""
        done, seconds = self._passes, self._clock() - self._since
        self._passes += 1
        if self._tasks and seconds - self._reported["seconds"] >= EVERY:
            self._send(done, seconds)

    def end(self, tokens: int) -> dict[str, Any]:
        """End the turn; return what its report says beside its own numbers.

        Args:
            tokens: of the operations that ran.
        """
        passes, reported = max(1, self._passes), self._reported
        if passes > 1 and tokens:
            self._size = tokens / passes
        self.begin(())
        return {"passes": passes, "reported": reported}

    def _send(self, passes: int, seconds: float) -> None:
        done = min(float(self._tokens), passes * self._size)
        total = {"seconds": seconds, "passes": passes, "tokens": int(done)}
        tenants: Counter[str] = Counter()
        for task in self._tasks:
            if not task.replay:  # the tokens of a replay were counted before
                tenants[task.tenant] += int(done * task.tokens / self._tokens)
        head = {name: value - self._reported[name] for name, value in total.items()}
        self._report(Message(messages.PROGRESS, head | {"tenants": dict(tenants - self._reported_tenants)}))
        self._reported, self._reported_tenants = total, tenants
