"""Delivering one message: attempts with growing pauses, within a time, ending in a log line and never in an error."""

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from twinkle import get_logger
from twinkle.errors import ArgumentError
from twinkle.notifier import without

_FIRST_PAUSE = 0.5  # seconds; each further pause is twice as long
_LONGEST_PAUSE = 10.0
_random = random.SystemRandom()  # the generators of the training are not ours to turn


class Refused(Exception):
    """The service refuses the message, and a retry would not help; the message says why."""


class NotNow(Exception):
    """The message could not be delivered this time; the message of the error says why.

    Attributes:
        after: seconds to wait before the next attempt, if the service states them.
    """

    def __init__(self, why: str, after: float | None = None) -> None:
        super().__init__(why)
        self.after = after


class Delivery:
    """How long and how often a notifier tries.

    Args:
        timeout: seconds to wait for the service in one attempt.
        retries: attempts after the first.
        time_limit: seconds for all attempts and pauses together; none begins after it.

    Raises:
        ArgumentError: a number does not fit.
    """

    def __init__(self, who: str, timeout: float, retries: int, time_limit: float) -> None:
        for name, value in (("timeout", timeout), ("time_limit", time_limit)):
            if not _is_number(value) or not 0 < value < math.inf:
                raise ArgumentError(f"{who}: {name} is {value!r}; it is a number of seconds above 0")
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise ArgumentError(f"{who}: retries is {retries!r}; it is a whole number from 0 on")
        self._who = who
        self._timeout, self._retries, self._time_limit = float(timeout), retries, float(time_limit)

    def __call__(self, send: Callable[[float], None], *, to: str, secrets: Sequence[str]) -> None:
        """Call `send(seconds)` until it returns; where it never does, log why.

        Args:
            send: makes one attempt within a number of seconds; raises `Refused`, `NotNow` or another error.
            to: how the log calls the receiver.
            secrets: texts that are kept out of the log.
        """
        end = time.monotonic() + self._time_limit
        attempt, why = 0, ""
        while True:
            attempt += 1
            try:
                return send(min(self._timeout, max(0.1, end - time.monotonic())))
            except NotNow as problem:
                why = str(problem)
                pause = _pause(attempt) if problem.after is None else problem.after
            except Refused as problem:
                why = str(problem)
                break
            except Exception as problem:  # nothing may reach the run, and an unknown text might show a secret
                why = type(problem).__name__
                break
            if attempt > self._retries or time.monotonic() + pause >= end:
                break
            time.sleep(pause)
        attempts = "1 attempt" if attempt == 1 else f"{attempt} attempts"
        redacted = without(why, sorted(secrets, key=len, reverse=True))
        get_logger().warning("%s: a message to %s is lost after %s: %s", self._who, to, attempts, redacted)

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments, but for the first."""
        return {"timeout": self._timeout, "retries": self._retries, "time_limit": self._time_limit}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _pause(attempt: int) -> float:
    """Return the seconds to wait after the `attempt`-th failure, by chance, so that many runs do not call at once."""
    longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** (attempt - 1))
    return longest * (0.5 + 0.5 * _random.random())
