"""Training and sampling on one thread: whose turn it is, decode steps inside long passes, and what each took."""

import time
from collections.abc import Callable, Collection
from typing import Any

from twinkle_server.engine import messages
from twinkle_server.engine.messages import Message
from twinkle_server.engine.sample_queue import Sampling
from twinkle_server.engine.scheduler import Alternation

_REPORT_EVERY = 0.5  # seconds of decoding that are told in one PASSED


class TimeSharing:
    """Shares the thread's time.

    Args:
        sampling: the requests.
        arrive: takes sampling requests that came meanwhile, and nothing else.
        report: sends a message to the service.
        seconds: that a decode step may wait for training.
    """

    def __init__(
        self, sampling: Sampling, arrive: Callable[[], None], report: Callable[[Message], None], seconds: float
    ) -> None:
        self._sampling, self._arrive, self._report = sampling, arrive, report
        self._alternation = Alternation(seconds)
        self._decoding = 0.0  # seconds, in all
        self._accounted = 0.0  # on `clock`
        self._under_way: frozenset[int] = frozenset()
        self._figures = _Figures()
        sampling.begins = self._only

    def clock(self) -> float:
        """Return seconds that stand still during decode steps."""
        return time.perf_counter() - self._decoding

    def begin(self, ids: Collection[int]) -> None:
        """Tell the service which operations are under way from now on, if it does not know; none is none."""
        if not self._under_way.issuperset(ids) or (self._under_way and not ids):
            self._under_way = frozenset(ids)
            self._report(Message(messages.BEGIN, {"ids": sorted(ids)}))

    def _only(self, operation: int) -> None:
        """Tell the service that an operation is under way, and nothing else."""
        if self._under_way != {operation}:
            self._under_way = frozenset((operation,))
            self._report(Message(messages.BEGIN, {"ids": [operation]}))

    def next_is_decoding(self, training: bool) -> bool:
        """Return whether a decode step is next; either it or training has work."""
        return self._alternation.decodes(training, bool(self._sampling.running))

    def train(self, work: Callable[[], None]) -> None:
        """Do a piece of training."""
        self._accounted = self.clock()
        work()
        self._account()

    def between(self) -> None:
        """Take decode steps in the middle of a pass, if it is their turn."""
        self._account()
        before = self._under_way
        self._arrive()
        self._sampling.admit()
        while self._alternation.decodes(True, bool(self._sampling.running)):
            self.decode()
        self.begin(before)

    def decode(self) -> None:
        """Take one decode step."""
        running = self._sampling.running
        self.begin(running.keys())
        tenants, requests = len({task.tenant for task in running.values()}), len(running)
        begin = time.perf_counter()
        tokens = self._sampling.decode()
        seconds = time.perf_counter() - begin
        self._decoding += seconds
        self._alternation.took(seconds, decoding=True)
        if head := self._figures.add(seconds, tokens, tenants, requests, more=bool(running)):
            self._report(Message(messages.PASSED, head))

    def _account(self) -> None:
        now = self.clock()
        self._alternation.took(now - self._accounted, decoding=False)
        self._accounted = now


class _Figures:
    """Those of decode steps, told together."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0

    def add(self, seconds: float, tokens: int, tenants: int, requests: int, more: bool) -> dict[str, Any] | None:
        """Add a step; returns the figures of several when it is time to tell them."""
        self._seconds += seconds
        self._tokens += tokens
        if more and self._seconds < _REPORT_EVERY:
            return None
        head = {"kind": "sample", "seconds": self._seconds, "tokens": self._tokens, "padded": 0, "flops": 0.0}
        self._seconds, self._tokens = 0.0, 0
        return head | {"tenants": tenants, "operations": requests}
