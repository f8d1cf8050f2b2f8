"""Continuous batching: each step reads one token of every running sequence, and pieces of prompts beside them."""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Condition
from typing import Any

from twinkle.errors import CapacityError
from twinkle_transformers.sampling.prefixes import PrefixCache
from twinkle_transformers.sampling.requests import Request
from twinkle_transformers.sampling.room import Room
from twinkle_transformers.sampling.runner import Runner
from twinkle_transformers.sampling.steps import Batch
from twinkle_transformers.sampling.store import Store


class Engine:
    """Serves requests of any threads; whoever waits for one takes the steps.

    Attributes:
        runner: the model.
        prefixes: what was read of earlier prompts.
        room: slots for keys and values.
    """

    def __init__(
        self,
        runner: Runner,
        store: Store,
        *,
        slots: int,
        budget: int,
        prefix_bytes: int,
        prefill_tokens: int = 512,
        ready: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Begin without requests.

        Args:
            runner: the model.
            store: what `runner.store()` returned.
            slots: sequences that run at once.
            budget: bytes of keys and values.
            prefix_bytes: bytes that may be kept of prompts for later ones.
            prefill_tokens: tokens of prompts that a step reads at most.
            ready: the context in which the model runs.
        """
        self.runner, self.prefixes = runner, PrefixCache(prefix_bytes)
        self.room = Room(store, budget, slots)
        self._batch = Batch(runner, self.room, self.prefixes, prefill_tokens)
        self._ready = ready
        self._incoming: deque[Request] = deque()
        self._changed = Condition()
        self._driven = self._stale = False

    @property
    def longest(self) -> int:
        """Tokens that one sequence may have."""
        return self.room.budget // self.room.store.token_bytes

    @property
    def idle(self) -> bool:
        """Whether there is no request that is not done."""
        return not self._incoming and not self._batch.busy

    def check(self, request: Request) -> None:
        """Refuse what could never be served.

        Raises:
            CapacityError: its keys and values could never fit.
            NonFiniteError: its adapter's weights are NaN or infinite.
        """
        room = self.room
        token_bytes = room.store.token_bytes
        if request.most > self.longest:
            raise CapacityError(
                f"row {request.prompt.row}: {request.most} tokens need {request.most * token_bytes / 2**20:.1f} MiB of "
                f"keys and values ({token_bytes} bytes a token), and the sampler has {room.budget / 2**20:.1f} MiB, "
                f"room for {self.longest}; ask for fewer (max_tokens), or give it more (cache_bytes)"
            )
        if request.version is not None:
            request.version.check()

    def admit(self, request: Request) -> None:
        """Take a request that was checked; somebody has to `drive`."""
        with self._changed:
            self._incoming.append(request)
            self._changed.notify_all()

    def cancel(self, request: Request) -> None:
        """Stop a request; what it has stays, its other samples end with the reason "abort"."""
        request.cancelled = True
        with self._changed:
            if self._driven:
                return
            self._driven = True
        try:
            with self._ready():
                self._receive()
                self._batch.reap()
        finally:
            self._hand_over()

    def drive(self, until: Callable[[], bool]) -> None:
        """Take steps, or wait for those of another thread, until something is so."""
        while True:
            with self._changed:
                while self._driven and not until():
                    self._changed.wait()
                if until():
                    return
                self._driven = True
            try:
                with self._ready():
                    while not until():
                        self._receive()
                        if not self._batch.step():
                            raise RuntimeError("the engine has nothing to do although somebody waits")
                        with self._changed:
                            self._changed.notify_all()
            finally:
                self._hand_over()

    def step(self) -> bool:
        """Take one step unless another thread is taking steps; False if there was nothing to do."""
        with self._changed:
            if self._driven:
                return True
            self._driven = True
        try:
            with self._ready():
                self._receive()
                return self._batch.step()
        finally:
            self._hand_over()

    def forget_prefixes(self) -> None:
        """Let nothing that was read until now serve other prompts, from the next step on."""
        with self._changed:
            self._stale = True

    def _receive(self) -> None:
        """Take what other threads left; whoever drives may."""
        if self._stale:
            self._stale = False
            self._batch.forget()
        while self._incoming:
            self._batch.waiting.append(self._incoming.popleft())

    def _hand_over(self) -> None:
        with self._changed:
            self._driven = False
            self._changed.notify_all()
