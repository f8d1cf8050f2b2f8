"""The training service in one process: its application over ASGI, its engine on a thread, its store in a folder."""

import asyncio
import itertools
import json
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import Any

import httpx

from twinkle_server.application import assemble
from twinkle_server.engine import messages
from twinkle_server.engine.__main__ import make_executor
from twinkle_server.engine.host import Host
from twinkle_server.engine.messages import AsyncLink, BlockingLink, LinkClosed, Message
from twinkle_server.runtime.service import Service
from twinkle_server.settings import Settings
from twinkle_server.store.opening import open_store
from twinkle_server.telemetry.metrics import Metrics

PROTOBUF = "application/x-protobuf"
SECONDS = 60.0


class _Host(Host):
    """An engine that ends its thread, and not the process, when the service closes the link."""

    def run(self) -> None:
        with suppress(LinkClosed):
            self._link.send(Message(messages.READY, {"info": asdict(self._executor.describe())}))
            threading.Thread(target=self._read, daemon=True).start()
            while True:
                self.turn()

    def _read(self) -> None:
        for message in self._link:
            self._inbox.put(message)
        self._inbox.put(_closed)


def _closed() -> None:
    raise LinkClosed("the service has closed the link")


class _Inside:
    """A `runtime.child.Child` on a thread."""

    last_words = ""

    def __init__(self, link: AsyncLink, ours: socket.socket, host: _Host) -> None:
        self._link, self._ours = link, ours
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(host,), daemon=True)
        self._thread.start()
        self.put, self.room, self.receive = link.put, link.room, link.receive

    def _run(self, host: _Host) -> None:
        try:
            host.run()
        except BaseException as error:
            self.failure = error

    def kill(self) -> None:
        with suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)

    async def wait(self) -> str:
        await asyncio.to_thread(self._thread.join, SECONDS)
        self._link.close()
        return f"ended by {self.failure!r}"


class Inside:
    """A client of the service.

    Args:
        client: sends to the application.
        service: the runtime.
    """

    def __init__(self, client: httpx.AsyncClient, service: Service) -> None:
        self.client, self.service = client, service
        self.numbers = itertools.count(1)

    async def send(self, path: str, body: Any = None, method: str = "POST", **options: Any) -> httpx.Response:
        """Send JSON or, as bytes, a protobuf message."""
        if isinstance(body, bytes):
            options.setdefault("headers", {"Content-Type": PROTOBUF})
            return await self.client.request(method, path, content=body, **options)
        return await self.client.request(method, path, json=body, **options)

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Send JSON, demand 200, and return what is answered."""
        answer = await self.send(path, body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def result(self, request: str, accept: str = "application/json") -> dict[str, Any]:
        """Return what a future gives, `{"error", "category"}` included; `{}` stands for a message in protobuf."""
        while True:
            answer = await self.send("/retrieve_future", {"request_id": request}, headers={"Accept": accept})
            assert answer.status_code == 200, answer.text
            if answer.headers["content-type"] != "application/json":
                return {}
            found = dict(json.loads(answer.content))
            if found.get("type") != "try_again":
                return found
            assert self.service.supervisor.up, "the engine is gone"

    async def done(self, path: str, body: Any) -> dict[str, Any]:
        """Submit an operation, and demand that it succeeds."""
        answer = await self.send(path, body)
        assert answer.status_code == 200, answer.text
        found = await self.result(answer.json()["request_id"])
        assert "error" not in found, found
        return {**answer.json(), **found}


@asynccontextmanager
async def inside(settings: Settings) -> AsyncIterator[Inside]:
    """Start a service in this process, and give a client of it."""
    executor = make_executor(settings)
    children: list[_Inside] = []

    async def start(first: bool) -> _Inside:
        ours, theirs = socket.socketpair()
        host = _Host(executor, BlockingLink(theirs), settings)
        children.append(_Inside(await AsyncLink.open(ours), ours, host))
        return children[-1]

    store = open_store(settings.data)
    try:
        metrics = Metrics(store.secret)
        service = Service(settings, store, metrics, start)
        await service.start()
        try:
            await service.wait_ready()
            application = assemble(settings, store, service, metrics)
            transport = httpx.ASGITransport(application, raise_app_exceptions=False, client=("127.0.0.1", 1))
            async with httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1/api/v1", timeout=SECONDS
            ) as client:
                yield Inside(client, service)
            assert service.supervisor.restarts == 0, "the engine was started anew"
        finally:
            await service.close()
        assert [child.failure for child in children if child.failure] == []
    finally:
        store.close()
