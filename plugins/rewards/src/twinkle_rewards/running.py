"""Calls one reward of a group in a thread or in another process, with a time limit."""

import asyncio
import functools
import inspect
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle_rewards.worker import Worker, WorkerBroken, WorkerError

_CANCEL_SECONDS = 0.5  # what an `async` reward that was late may need to be cancelled


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a row has no score."""

    why: str
    cause: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The scores of a call, or the reason of a missing score, one per row."""

    scores: list[float | Failed]
    seconds: float


class Member:
    """A reward with the thread of its last call.

    Args:
        reward: the component.
        isolated: whether it runs in a separate process.
    """

    def __init__(self, reward: Any, isolated: bool) -> None:
        self.reward = reward
        self._worker = Worker(prepare=functools.partial(_arrived, reward)) if isolated else None
        self._thread: threading.Thread | None = None
        self._found: list[Outcome] = []
        self._late = False
        self._seconds, self._end = 0.0, 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {"reward": self.reward, "isolated": self._worker is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def start(self, rows: list[Any], kwargs: Mapping[str, Any], seconds: float) -> None:
        """Begin a call, unless the last one is still on its way."""
        if self._thread is not None:
            self._thread.join(_CANCEL_SECONDS)
            self._late = self._thread.is_alive()
        if self._late:
            return
        found: list[Outcome] = []  # of this call alone: one that is late still writes into its own
        began = time.monotonic()
        self._found, self._seconds, self._end = found, seconds, began + seconds

        def run() -> None:
            scores = self._scores(rows, kwargs, began + seconds)
            found.append(Outcome(scores, time.monotonic() - began))

        self._thread = threading.Thread(target=run, name=f"reward {self.reward!r:.40}", daemon=True)
        self._thread.start()

    def finish(self, count: int) -> Outcome:
        """Wait for the call, no longer than its time, and return its outcome for `count` rows."""
        if self._late:
            return Outcome([Failed("an earlier call still runs beside; it was not called")] * count, 0.0)
        if self._thread is not None:
            self._thread.join(None if self._worker else max(0.0, self._end - time.monotonic()))
        if self._found:
            return self._found[0]
        return Outcome([Failed(f"it took longer than {self._seconds:g} s; its thread runs on")] * count, self._seconds)

    def _scores(self, rows: list[Any], kwargs: Mapping[str, Any], end: float) -> list[float | Failed]:
        try:
            return checked(self._call(rows, kwargs, end), len(rows))
        except (
            BaseException
        ) as error:  # any error of a reward, including SystemExit: it must not end the thread silently
            if isinstance(error, TimeoutError) and time.monotonic() >= end:  # ours, and none that the reward raises
                return [Failed(str(error) or "it took too long", error)] * len(rows)
            if len(rows) < 2 or isinstance(error, WorkerBroken) or getattr(self.reward, "compares_rows", False):
                return [Failed(_said(error), error)] * len(rows)
        return [self._scores([row], _of_row(kwargs, place, len(rows)), end)[0] for place, row in enumerate(rows)]

    def _call(self, rows: list[Any], kwargs: Mapping[str, Any], end: float) -> Any:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time was over before this row")
        if self._worker is None:
            return call(self.reward, rows, dict(kwargs), left)
        plain = [{key: value for key, value in row.items() if not hasattr(value, "shape")} for row in rows]
        return self._worker.call(call, self.reward, plain, dict(kwargs), left, seconds=left)


def _arrived(reward: Any) -> None:
    """Do nothing: by now the other process has imported the reward, before its time counts."""


def call(reward: Any, rows: Sequence[Any], kwargs: dict[str, Any], seconds: float) -> Any:
    """Call a reward, and wait for what an `async` one gives."""
    found = reward(rows, **kwargs)
    if not inspect.isawaitable(found):
        return found.tolist() if hasattr(found, "tolist") else found

    async def wait() -> Any:
        return await asyncio.wait_for(found, seconds)

    return asyncio.run(wait())


def checked(found: Any, count: int) -> list[float | Failed]:
    """Return scores as numbers; a score that is not a finite number is a failure of its row."""
    if isinstance(found, str | Mapping) or not isinstance(found, Sequence) or len(found) != count:
        what = f"{len(found)} scores" if isinstance(found, list | tuple) else f"{found!r:.60}"
        return [Failed(f"it gave {what} for {count} rows; a reward returns one number a row")] * count
    return [_checked(score) for score in found]


def _checked(score: Any) -> float | Failed:
    plain = score.item() if hasattr(score, "item") else score
    if not isinstance(plain, int | float) or not math.isfinite(plain):
        return Failed(f"its score is {plain!r:.60}, no finite number")
    return float(plain)


def _of_row(kwargs: Mapping[str, Any], place: int, count: int) -> dict[str, Any]:
    """Return the arguments of one row: lists have one entry a row."""
    per_row = {k: isinstance(v, list | tuple) and len(v) == count for k, v in kwargs.items()}
    return {key: [value[place]] if per_row[key] else value for key, value in kwargs.items()}


def _said(error: BaseException) -> str:
    text = str(error) if isinstance(error, WorkerError) else f"it raised {type(error).__name__}: {error}"
    return text[:300]
