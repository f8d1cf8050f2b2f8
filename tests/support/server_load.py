"""Clients that cost little, so that many of them and the service they ask fit on one small machine."""

import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import uvloop
from server_raw import LORA, PROTOBUF, row

from twinkle_server.wire import tinker_pb2 as wire

_SECONDS = 60.0


@dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes:
        status: of it.
        headers: by name, in lower case.
        body: whole.
        seconds: from the first byte sent to the last received.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float

    def json(self) -> Any:
        """Return the body as JSON, of a good answer."""
        assert self.status == 200, (self.status, self.body[:300])
        return json.loads(self.body)


class Line:
    """One connection that is kept; one request at a time.

    Args:
        url: of the service.
        key: sent as `X-API-Key`.
    """

    def __init__(self, url: str, key: str = "tml-local") -> None:
        self._address = urlsplit(url)
        self._key = key
        self._writer: asyncio.StreamWriter | None = None
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        address = self._address
        self._reader, self._writer = await asyncio.open_connection(address.hostname, address.port)
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    async def ask(self, path: str, body: Any = b"", accept: str = "*/*", rest: bytes = b"", **headers: str) -> Answer:
        """Send a request and return whatever is answered.

        Args:
            path: asked for with GET if it begins without a slash.
            body: bytes of a protobuf, or JSON.
            accept: header.
            rest: of the body, which is not copied.
            **headers: further ones.
        """
        method, path = ("POST", f"/api/v1{path}") if path.startswith("/") else ("GET", f"/{path}")
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = {
            "Host": "127.0.0.1", "X-API-Key": self._key, "Accept": accept,
            "Content-Length": str(len(content) + len(rest)),
            "Content-Type": PROTOBUF if isinstance(body, bytes) else "application/json",
        }  # fmt: skip
        head |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        async with self._turn, asyncio.timeout(_SECONDS):
            start = time.perf_counter()
            assert self._writer is not None
            self._writer.write(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + content)
            if rest:
                self._writer.write(rest)
            status, found = _head(await self._reader.readuntil(b"\r\n\r\n"))
            answered = await self._reader.readexactly(int(found["content-length"]))
            return Answer(status, found, answered, time.perf_counter() - start)

    async def future(self, request: str) -> Answer:
        """Wait for an operation and return its result; a failed one is an error of the test."""
        while True:
            found = await self.ask("/retrieve_future", {"request_id": request}, PROTOBUF)
            if not found.body.startswith(b'{"type":"try_again"'):
                assert found.status == 200, (found.status, found.body[:300])
                assert not found.body.startswith(b'{"error"'), found.body[:300]
                return found

    async def do(self, path: str, body: Any, rest: bytes = b"") -> Answer:
        """Submit an operation and return its result."""
        return await self.future((await self.ask(path, body, rest=rest)).json()["request_id"])

    async def session(self) -> str:
        """Open a session."""
        return str((await self.ask("/create_session", {})).json()["session_id"])

    async def model(self, session: str, number: int = 0) -> str:
        """Make a model and return its id."""
        body = {"session_id": session, "model_seq_id": number, "base_model": "ledger/model", "lora_config": LORA}
        return str((await self.do("/create_model", body)).json()["model_id"])


def in_bursts(url: str, models: Sequence[str], tokens: int, seconds: float) -> list[float]:
    """Send a pass to every model at once, and again when all are over, until some time has passed.

    It is meant to run in a process of its own, as the writing of large bodies takes whole milliseconds.

    Args:
        url: of the service.
        models: that nothing was asked of yet.
        tokens: of a pass, in rows of 1,024; a token is 16 bytes.
        seconds: after which no further burst begins.

    Returns:
        Seconds that each burst took.
    """
    rows = [row(list(range(at, at + 1025))) for at in range(1, tokens, 1024)]
    rest = wire.ForwardBackwardRequest(data=rows, loss_fn="cross_entropy").SerializeToString()
    return uvloop.run(_bursts(url, models, rest, seconds))


async def _bursts(url: str, models: Sequence[str], rest: bytes, seconds: float) -> list[float]:
    took: list[float] = []
    async with AsyncExitStack() as stack:
        lines = [await stack.enter_async_context(Line(url)) for _ in models]
        while sum(took) < seconds:
            start = time.perf_counter()
            heads = [wire.ForwardBackwardRequest(model_id=model, seq_id=len(took) + 1) for model in models]
            calls = zip(lines, heads, strict=True)
            await asyncio.gather(
                *(line.do("/forward_backward", head.SerializeToString(), rest) for line, head in calls)
            )
            took.append(time.perf_counter() - start)
    return took


def _head(data: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = data.decode("latin-1").rstrip().split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def at_a_rate(
    work: Sequence[Callable[[], Awaitable[Any]]], per_second: float, going: Callable[[], bool]
) -> list[float]:
    """Call functions in turn at fixed times, whether the calls before are over or not.

    Returns:
        For each call the seconds from when it was due until it was over.
    """

    async def timed(call: Callable[[], Awaitable[Any]], due: float) -> None:
        await call()
        seconds.append(time.perf_counter() - due)

    seconds: list[float] = []
    start, count = time.perf_counter(), 0
    async with asyncio.TaskGroup() as tasks:
        while going():
            due = start + count / per_second
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.create_task(timed(work[count % len(work)], due))
            count += 1
    return seconds


def percentile(seconds: Sequence[float], percent: int) -> float:
    """Return below which value so many percent of the values are."""
    assert len(seconds) >= 100 / (100 - percent), f"{len(seconds)} values say nothing of their {percent}th percentile"
    return statistics.quantiles(seconds, n=100)[percent - 1]
