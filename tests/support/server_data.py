"""A service with data resources and nothing else, on a loopback port, and clients of its tenants."""

import asyncio
import socket
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI

from twinkle_client.data import Client
from twinkle_client.http import Connection
from twinkle_server.app_state import AppState
from twinkle_server.application import create_application
from twinkle_server.data import routes
from twinkle_server.data.limits import DataLimits
from twinkle_server.data.serving import data_resources
from twinkle_server.native.routes import PREFIX
from twinkle_server.requests import add_routes
from twinkle_server.settings import Settings
from twinkle_server.store import open_store
from twinkle_server.tenancy.auth import Authentication, Caller

T = TypeVar("T")


class AnyKey:
    """Every key is a tenant of its own."""

    async def find(self, key: str) -> Caller | None:
        return Caller(key, "key", "user")


class Quiet:
    """A service without models."""

    async def finish_session(self, session: str) -> None:
        """Do nothing: there are no models to release."""


@dataclass
class Tenant:
    """A client of one tenant."""

    connection: Connection
    session_id: str


@dataclass
class DataService:
    """The service as it listens."""

    url: str
    state: AppState
    loop: asyncio.AbstractEventLoop
    application: FastAPI

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop of the service."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def tenant(self, name: str) -> Client:
        """Return a new client of a tenant, with a session."""
        connection = Connection(self.url, name, retry_seconds=20.0)
        plain = Connection(self.url, name, route_prefix="/api/v1")
        made = plain.run(plain.exchange("POST", "/create_session", b"{}"))
        plain.close()
        import json

        return Tenant(connection, json.loads(made.content)["session_id"])


@contextmanager
def data_service(folder: Path, model: Path, limits: DataLimits, name: str = "org/tiny") -> Iterator[DataService]:
    """Serve data resources of a model's name and folder."""
    store = open_store(folder)
    settings = Settings(str(model), folder, name=name, datasets=limits)
    application = create_application(Quiet(), store, settings)  # type: ignore[arg-type]  # no operation is submitted
    add_routes(application.router, routes.router, PREFIX)
    application.add_middleware(Authentication, keys=AnyKey())
    state: AppState = application.state.state
    state.data = data_resources(settings, store)
    sock = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(application, log_level="critical", lifespan="off", ws="none"))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve(sockets=[sock])), daemon=True)
    thread.start()
    ends = time.monotonic() + 20
    while not server.started and time.monotonic() < ends:
        time.sleep(0.01)
    try:
        yield DataService(f"http://127.0.0.1:{sock.getsockname()[1]}", state, loop, application)
    finally:
        asyncio.run_coroutine_threadsafe(state.data.close(), loop).result(30)
        server.should_exit = True
        thread.join(20)
        loop.close()
        store.close()
