"""A proxy on loopback that does to requests what networks do: it loses, delays, repeats and reorders them."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

SECONDS = 60.0


@dataclass(frozen=True)
class Fault:
    """What befalls one request.

    Attributes:
        delay: seconds before it goes on; long enough, others overtake it.
        lost: it never arrives.
        repeats: times that it arrives beside the first.
        mute: it is done, and its answer is lost.
    """

    delay: float = 0.0
    lost: bool = False
    repeats: int = 0
    mute: bool = False


NONE = Fault()


class Proxy:
    """One proxy in front of one service, which may move to another address.

    Args:
        upstream: URL of the service.
        plan: says what befalls a request, from its number and its path.
        prefix: that clients put before every path.

    Attributes:
        seen: requests that came.
        befell: how many of them each fault, by its field's name.
    """

    def __init__(
        self, upstream: str, plan: Callable[[int, str], Fault] = lambda number, path: NONE, prefix: str = ""
    ) -> None:
        self.upstream = upstream
        self.plan = plan
        self.prefix = prefix
        self.seen = 0
        self.befell: Counter[str] = Counter()
        self.url = ""
        self._tasks: set[asyncio.Task[Any]] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if task := asyncio.current_task():
            self._keep(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS)
                answer = await self._pass_on(head, await reader.readexactly(_length(head)))
                if answer is not None:
                    writer.write(answer)
                    await writer.drain()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, head: bytes, body: bytes) -> bytes | None:
        """Send a request on as planned; None is an answer that does not come."""
        line, _, rest = head.partition(b"\r\n")
        method, path, version = line.split(b" ")
        fault = self.plan(self.seen, path.decode())
        self.seen += 1
        self.befell.update(name for name, value in vars(fault).items() if value)
        if fault.delay:
            await asyncio.sleep(fault.delay)
        if fault.lost:
            return None
        path = path.removeprefix(self.prefix.encode())
        whole = b" ".join((method, path, version)) + b"\r\n" + rest + body
        for _ in range(fault.repeats):
            self._keep(asyncio.create_task(self._ask(whole)))
        answer = await self._ask(whole)
        return None if fault.mute else answer

    async def _ask(self, request: bytes) -> bytes | None:
        """Ask the service over a connection of its own."""
        address = urlsplit(self.upstream)
        head, _, rest = request.partition(b"\r\n\r\n")
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
        try:
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
        except OSError:
            return None
        try:
            writer.write(b"\r\n".join((*lines, b"Connection: close", b"", rest)))
            await writer.drain()
            return await asyncio.wait_for(reader.read(), SECONDS) or None
        except OSError:
            return None
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def weather(seed: int, *, mute: float, repeats: float, delay: float, lost: float = 0.0) -> Proxy:
    """Return a proxy before no service yet, with the shares of all requests that each fault befalls.

    Args:
        seed: of the draw.
        mute: they are done, and their answers are lost.
        repeats: they come two or three times.
        delay: they come 5 to 300 ms late, behind others.
        lost: they never come.
    """
    draw = random.Random(seed)
    faults = ["mute", "repeats", "delay", "lost", "none"]
    shares = [mute, repeats, delay, lost, 1.0 - mute - repeats - delay - lost]

    def plan(number: int, path: str) -> Fault:
        late, times = draw.uniform(0.005, 0.3), draw.randint(1, 2)
        made = {
            "mute": Fault(mute=True), "repeats": Fault(repeats=times), "delay": Fault(delay=late),
            "lost": Fault(lost=True), "none": NONE,
        }  # fmt: skip
        return made[draw.choices(faults, shares)[0]]

    return Proxy("", plan)


@asynccontextmanager
async def proxied(proxy: Proxy) -> AsyncIterator[Proxy]:
    """Run a proxy on a free port of this machine."""
    server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    proxy.url = f"http://127.0.0.1:{port}{proxy.prefix}"
    try:
        yield proxy
    finally:
        server.close()
        left = [*proxy._tasks]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
