"""One request to the engine as its client sees it: text, tool calls and log-probabilities of every choice."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from fastapi import Request

from twinkle_server.chat.decoding import TextDecoder
from twinkle_server.chat.tools import Call, ToolReader
from twinkle_server.errors import ServiceError
from twinkle_server.runtime.generations import Generation, Part

T = TypeVar("T")
LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have, as in OpenAI's API."""
_STALLED = 120.0  # seconds after which a client that does not read is disconnected
_POLL = 0.2  # seconds between looks at a connection that sends unexpected messages


@dataclass(frozen=True, slots=True)
class Score:
    """A token with its log-probability, and the most probable tokens at its position."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Delta:
    """What one choice has gained.

    Attributes:
        index: of the choice.
        text: new text.
        calls: new tool calls.
        scores: of the new tokens, if requested.
        finish: "stop", "length" or "tool_calls" at the end of the choice.
        stop: the stop string that ended it.
    """

    index: int
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    finish: str | None = None
    stop: str | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to send."""
        return not (self.text or self.calls or self.scores or self.finish)


class Choice:
    """One sequence of a request.

    Args:
        index: in the response.
        decoder: of its tokens.
        reader: of its tool calls; None without tools.
        forced: whether the text is nothing but tool calls.
    """

    def __init__(self, index: int, decoder: TextDecoder, reader: ToolReader | None, forced: bool) -> None:
        self.index = index
        self._decoder, self._reader, self._forced = decoder, reader, forced
        self._called = False

    def take(self, part: Part) -> Delta:
        """Return what a part adds."""
        delta = Delta(self.index, scores=_scores(part))
        if part.stop_reason is None:
            delta.text = self._decoder.add(part.tokens)
        else:
            delta.text = self._decoder.finish(part.tokens, part.stop_reason == "stop")
            delta.finish, delta.stop = part.stop_reason, self._decoder.stop
        if self._reader is None:
            return delta
        delta.text, delta.calls = self._reader.add(delta.text)
        if delta.finish is not None:
            text, calls = self._reader.finish(cut=delta.finish == "length" or delta.stop is not None)
            delta.text, delta.calls = delta.text + text, delta.calls + calls
        self._called = self._called or bool(delta.calls)
        if delta.finish == "stop" and self._called:
            delta.finish = "tool_calls"
        if self._forced and delta.finish != "length":
            delta.text = ""
        return delta


def _scores(part: Part) -> list[Score]:
    topk = part.topk or [[]] * len(part.logprobs)
    return [
        Score(token, _finite(logprob), [(other, _finite(value)) for other, value in top])
        for token, logprob, top in zip(part.tokens, part.logprobs, topk, strict=False)
    ]


def _finite(value: float | None) -> float:
    return LOWEST if value is None else value


@dataclass(slots=True)
class Usage:
    """Tokens of a request."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


class Exchange:
    """The generations of a request, several for a completion of several prompts.

    Args:
        generations: one for each prompt.
        choices: of each generation, by sample.
    """

    def __init__(self, generations: Sequence[Generation], choices: Sequence[Sequence[Choice]]) -> None:
        self.generations = generations
        self._choices = choices

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Yield what the choices gain, as soon as there is something.

        Raises:
            ServiceError: a generation failed.
        """
        waiting = {asyncio.ensure_future(self._next(number)): number for number in range(len(self.generations))}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                found: list[Delta] = []
                for task in done:
                    number = waiting.pop(task)
                    if (deltas := task.result()) is None:
                        continue
                    found += deltas
                    waiting[asyncio.ensure_future(self._next(number))] = number
                if found := [delta for delta in found if not delta.empty]:
                    yield found
        finally:
            for task in waiting:
                task.cancel()

    async def _next(self, number: int) -> list[Delta] | None:
        parts = await self.generations[number].parts()
        return [self._choices[number][part.sample].take(part) for part in parts] if parts else None

    def cancel(self) -> None:
        """End what has not ended."""
        for generation in self.generations:
            generation.cancel()

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        cached = sum((generation.end or {}).get("cached_tokens", 0) for generation in self.generations)
        prompt = sum(generation.prompt for generation in self.generations)
        return Usage(prompt, sum(generation.sampled for generation in self.generations), cached)


class Disconnected(Exception):
    """The client has closed its connection."""


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`; cancel it when the client disconnects.

    Raises:
        Disconnected: the client has closed its connection.
    """
    task = asyncio.ensure_future(work)
    left = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        pending = [each for each in (task, left) if not each.done()]
        for each in pending:
            each.cancel()
        if pending:
            await asyncio.wait(pending)


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        await asyncio.sleep(_POLL)


class Frames(Protocol):
    """Writes server-sent events of one protocol."""

    def start(self) -> bytes:
        """Return the first events."""

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """Return the events of new parts."""

    def end(self, usage: Usage) -> bytes:
        """Return the last events."""

    def error(self, error: ServiceError) -> bytes:
        """Return the event of an error."""


class EventStream:
    """A response of server-sent events; its client may read slowly, which delays nobody else.

    Args:
        exchange: the request.
        deltas: `Exchange.deltas`, of which the first was taken.
        first: the first deltas.
        frames: writes the events.
    """

    def __init__(
        self, exchange: Exchange, deltas: AsyncIterator[list[Delta]], first: list[Delta], frames: Frames
    ) -> None:
        self._exchange, self._deltas, self._first, self._frames = exchange, deltas, first, frames

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the response until it is complete, or its client has disconnected."""
        work = asyncio.create_task(self._write(send))
        left = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            self._exchange.cancel()
            pending = [each for each in (work, left) if not each.done()]
            for each in pending:
                each.cancel()
            if pending:
                await asyncio.wait(pending)

    async def _write(self, send: Callable[[Any], Awaitable[None]]) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]  # fmt: skip
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send(send, self._frames.start() + self._frames.deltas(self._first))
        try:
            async for deltas in self._deltas:
                await self._send(send, self._frames.deltas(deltas))
            last = self._frames.end(self._exchange.usage)
        except ServiceError as error:
            last = self._frames.error(error)
        await self._send(send, last)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Callable[[Any], Awaitable[None]], data: bytes) -> None:
        async with asyncio.timeout(_STALLED):
            await send({"type": "http.response.body", "body": data, "more_body": True})
