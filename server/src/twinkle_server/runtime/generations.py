"""Streamed requests of the chat endpoints: they live in memory alone, and end with their client or with the engine.

Each engine message has the tokens of one decode step of all requests. A request collects its parts until its reader
takes them, so a slow reader gets fewer and larger pieces; what is collected is bounded by the tokens of the request.

The present weights of a model may include operations whose results are not durable yet. What was computed with them is
handed out only after these results are durable, because an operation whose result cannot be written is undone.
"""

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from twinkle_server.engine import messages
from twinkle_server.engine.messages import LinkClosed, Message
from twinkle_server.errors import BadRequest, Busy, ServiceError, Unavailable
from twinkle_server.operations import Embed, Generate
from twinkle_server.ports import Figures
from twinkle_server.runtime.supervision import Child

RETRY = 2.0
"""Seconds after which a client should repeat a request that ended with the engine."""


class GenerationFailed(ServiceError):
    """The engine failed during a request; the same request may be repeated."""


@dataclass(slots=True)
class Part:
    """What one sequence has gained.

    Attributes:
        sample: index of the sequence.
        tokens: new token ids.
        logprobs: their log-probabilities, if requested; None is minus infinity.
        topk: the most probable tokens at their positions, if requested.
        stop_reason: why the sequence ended; None while it grows.
    """

    sample: int
    tokens: list[int]
    logprobs: list[float | None]
    topk: list[list[tuple[int, float | None]]]
    stop_reason: str | None


@dataclass(slots=True, eq=False)
class Generation:
    """A streamed request.

    Attributes:
        key: id in messages to the engine.
        tenant: its owner.
        prompt: number of tokens of the prompt.
        sampled: number of tokens sampled so far, of all sequences.
        cancel: ends the request; no-op if it has ended.
        end: fields of the last message, once all sequences have ended.
        error: why it failed, if it did.
        charge: counts sampled tokens against a quota.
        began: when it was sent, in seconds of the monotonic clock.
        model: id of the model whose present weights are used, if any.
        held: whether its parts are not handed out yet, because the log lacks results that its weights include.
    """

    key: int
    tenant: str
    prompt: int
    cancel: Callable[[], None]
    sampled: int = 0
    end: dict[str, Any] | None = None
    error: ServiceError | None = None
    charge: Callable[[int], None] = lambda tokens: None
    began: float = field(default_factory=lambda: time.monotonic())  # looked up late: simulations replace it
    model: str | None = None
    held: bool = False
    _answered: bool = False
    _parts: list[Part] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def parts(self) -> list[Part]:
        """Wait for new parts and return them; an empty list after the end.

        Raises:
            ServiceError: the request failed.
        """
        while self.held or not self._parts:
            if self.error is not None:
                raise self.error
            if self.end is not None and not self.held:
                return []
            self._changed.clear()
            await self._changed.wait()
        parts, self._parts = self._parts, []
        return parts

    def add(self, parts: list[list[Any]], end: dict[str, Any] | None) -> None:
        """Add parts of a message, and the end if it has come."""
        tokens = 0
        for part in parts:
            self._parts.append(Part(*part))
            tokens += len(part[1])
        self.sampled += tokens
        self.charge(tokens)
        self.end = end
        self._changed.set()

    def hold(self, lacks: Callable[[str, Callable[[], None]], bool], release: Callable[[], None]) -> None:
        """Hold the parts before the first answer of the engine, if the log lacks results that the weights include.

        Args:
            lacks: see `Generations`.
            release: called when the log has them.
        """
        if self.model is not None and not self._answered:
            self.held = lacks(self.model, release)
        self._answered = True

    def release(self) -> None:
        """Hand out the parts that are held; no-op after an error."""
        if self.error is None:
            self.held = False
            self._changed.set()

    def fail(self, error: ServiceError) -> None:
        """End the request with an error."""
        self.error = error
        self._changed.set()


class Generations:
    """The streamed requests that have not ended.

    Args:
        limit: maximum number of unfinished requests of a tenant.
        figures: metrics; None disables them.
        lacks: returns whether the log lacks results of a model that the engine has reported; if so, its second
            argument is called when the log has them.
    """

    def __init__(
        self,
        limit: int,
        figures: Figures | None,
        lacks: Callable[[str, Callable[[], None]], bool] = lambda model, release: False,
    ) -> None:
        self._limit, self._figures, self._lacks = limit, figures, lacks
        self._running: dict[int, Generation] = {}
        self._keys = itertools.count(-2, -1)
        self.of_tenants: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._running)

    @property
    def unanswered(self) -> int:
        """Number of requests that the engine has not ended; others only wait for the log."""
        return sum(generation.end is None for generation in self._running.values())

    def check(self, tenant: str) -> None:
        """Admit another request of a tenant.

        Raises:
            Busy: the tenant has too many.
        """
        if (count := self.of_tenants[tenant]) >= self._limit:
            raise Busy(f"too many unfinished requests: you have {count} (limit {self._limit}); wait for some to finish")

    def open(self, child: Child | None, tenant: str, generate: Generate | Embed) -> Generation:
        """Send a request to the engine.

        Raises:
            Unavailable: there is no engine at the moment.
        """
        key = next(self._keys)
        head = {"id": key, "tenant": tenant, "model": generate.model}

        def cancel() -> None:
            self._stop(key, child, "cancelled")

        generation = Generation(key, tenant, generate.size, cancel, model=generate.model)
        kind = messages.EMBED if isinstance(generate, Embed) else messages.GENERATE
        try:
            if child is None:
                raise LinkClosed("there is no engine")
            child.put(Message(kind, head, generate.dump()))
        except LinkClosed as error:
            raise Unavailable("the engine is starting; retry in a few seconds", retry_after=RETRY) from error
        self._running[key] = generation
        self.of_tenants[tenant] += 1
        return generation

    def tokens(self, message: Message) -> None:
        """Handle a TOKENS message."""
        for key, parts, end in orjson.loads(message.body):
            generation = self._running.get(key)
            if generation is not None:  # otherwise it was cancelled
                self._add(generation, parts, end)

    def done(self, message: Message) -> bool:
        """Handle the failure of a request, or its vectors; return False for the DONE message of an operation."""
        key = message.head["id"]
        if key > -2:
            return False
        if message.head.get("error") is None:
            if (generation := self._running.get(key)) is not None:
                self._add(generation, [], {"body": message.body})
            return True
        error, category = str(message.head.get("error")), message.head.get("category") or "server"
        if (generation := self._close(key, category)) is not None:
            generation.fail(BadRequest(error) if category == "user" else GenerationFailed(error))
        return True

    def _add(self, generation: Generation, parts: list[list[Any]], end: dict[str, Any] | None) -> None:
        generation.hold(self._lacks, lambda: self._release(generation))
        generation.add(parts, end)
        if end is not None and not generation.held:
            self._close(generation.key, "done")

    def _release(self, generation: Generation) -> None:
        generation.release()
        if generation.end is not None:
            self._close(generation.key, "done")

    def _stop(self, key: int, child: Child | None, outcome: str) -> Generation | None:
        """End a request here and in the engine; return it, or None if it has ended."""
        generation = self._close(key, outcome)
        if generation is not None and generation.end is None and child is not None:
            with contextlib.suppress(LinkClosed):
                child.put(Message(messages.CANCEL, {"id": key}))
        return generation

    def fail_model(self, model: str, child: Child | None, why: str) -> None:
        """End the requests that use the present weights of a model, because these are undone."""
        for key in [key for key, generation in self._running.items() if generation.model == model]:
            if (generation := self._stop(key, child, "server")) is not None:
                generation.fail(Unavailable(f"{why}; repeat the request", retry_after=RETRY))

    def fail_all(self, why: str) -> None:
        """End all requests, because their engine has ended."""
        for key in list(self._running):
            if (generation := self._close(key, "server")) is not None:
                generation.fail(Unavailable(f"{why}; repeat the request", retry_after=RETRY))

    async def ended(self, seconds: float) -> None:
        """Wait until no request runs, for at most `seconds`."""
        end = time.monotonic() + seconds
        while self._running and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def _close(self, key: int, outcome: str) -> Generation | None:
        generation = self._running.pop(key, None)
        if generation is None:
            return None
        self.of_tenants[generation.tenant] -= 1
        if not self.of_tenants[generation.tenant]:
            del self.of_tenants[generation.tenant]
        if self._figures is not None:
            tokens = generation.prompt + generation.sampled
            seconds = time.monotonic() - generation.began
            self._figures.finished("sample", outcome, seconds, tokens, generation.tenant)
        return generation
