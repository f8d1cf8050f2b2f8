"""The service's process: store, runtime and endpoints, from its start to its end; requests reach it without sockets."""

import asyncio
import contextvars
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import orjson
from service_simulation.disk import SimulatedDatabase
from service_simulation.virtual import PROCESS, Process
from starlette.requests import Request
from starlette.responses import Response

from twinkle_server.app_state import AppState, app_state_of, caller_of
from twinkle_server.application import PREFIX, all_routes
from twinkle_server.chat.models import resolve
from twinkle_server.engine import messages
from twinkle_server.errors import Busy, ServiceError
from twinkle_server.operations import Generate
from twinkle_server.requests import json_response as answer
from twinkle_server.runtime.arrivals import ArrivalMiddleware
from twinkle_server.runtime.service import Service
from twinkle_server.runtime.supervision import StartChild
from twinkle_server.settings import Settings
from twinkle_server.store import Store, open_store
from twinkle_server.store.tenants import UsageLog
from twinkle_server.tenancy.auth import CURRENT, Caller
from twinkle_server.tenancy.quotas import Limited, Meter

CHAT = "/simulated/chat"
"""The chat endpoints without texts: tokens of the weights of a name, streamed by the engine, as one answer."""
_FLUSH = 10.0
_endpoints: dict[tuple[str, str], Callable[..., Any]] = {}


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request.

    Attributes:
        status: of HTTP.
        body: of the answer.
        headers: names in lower case.
        seconds: that it took.
        life: of the service that gave it.
    """

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    life: "Life | None" = None

    def json(self) -> Any:
        """Return the body."""
        return orjson.loads(self.body)

    @property
    def is_message(self) -> bool:
        """Whether the body is a protobuf."""
        return "protobuf" in self.headers.get("content-type", "")


@dataclass(frozen=True, slots=True)
class Call:
    """A request.

    Attributes:
        tenant: who asks.
        path: of the route, behind the prefix; `{name}` stands for a value.
        body: bytes are a protobuf, everything else becomes JSON.
        method: of HTTP.
        values: of the path.
        query: behind the path.
        headers: names in lower case.
        quotas: of the tenant's key.
    """

    tenant: str
    path: str
    body: Any = None
    method: str = "POST"
    values: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    quotas: Mapping[str, float] = field(default_factory=dict)


class Counted:
    """What a life of the service counted.

    Attributes:
        usage: of tenants.
        endings: of operations, by kind, ending and tenant: how many, and their tokens.
        seconds: that they took.
        engine: messages of the engine about models, and about passes, by name.
        sizes: bytes of snapshots.
        replays: operations that were repeated.
        deaths: of engines, by reason.
        gauges: functions that say how much there is of something.
        streams: of streamed requests.
    """

    def __init__(self, usage: UsageLog) -> None:
        self.usage = usage
        self.endings: dict[tuple[str, str, str], tuple[int, int]] = {}
        self.seconds: list[float] = []
        self.engine: Counter[str] = Counter()
        self.sizes = self.replays = 0
        self.deaths: Counter[str] = Counter()
        self.gauges: dict[str, Callable[[], float]] = {}
        self.streams: Any = Streams()

    def finished(self, kind: str, outcome: str, seconds: float, tokens: int, tenant: str) -> None:
        if outcome == "done":
            self.usage.add(kind, tokens, tenant)
        count, total = self.endings.get((kind, outcome, tenant), (0, 0))
        self.endings[kind, outcome, tenant] = count + 1, total + tokens
        self.seconds.append(seconds)

    def progressed(self, head: Mapping[str, Any]) -> None:
        """See `ports.Figures`."""

    def passed(self, head: Mapping[str, Any]) -> None:
        self.engine[messages.PASSED] += 1

    def restored(self) -> None:
        self.engine[messages.RESTORED] += 1

    def detached(self) -> None:
        self.engine[messages.DETACHED] += 1

    def replayed(self, count: int = 1) -> None:
        self.replays += count

    def restarted(self, reason: str) -> None:
        self.deaths[reason] += 1

    def snapshotted(self, size: int) -> None:
        self.engine[messages.SNAPSHOTTED] += 1
        self.sizes += size

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        self.gauges[name] = read


class Streams:
    """What a life of the service counted of streamed requests.

    Attributes:
        ended: how many, by outcome.
        tokens: of those that are done.
    """

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        self.tokens = 0

    def finished(self, kind: str, outcome: str, seconds: float, tokens: int, tenant: str) -> None:
        self.ended[outcome] += 1
        self.tokens += tokens if outcome == "done" else 0


class Life:
    """One process of the service, on one data folder.

    Args:
        settings: of the service.
        start_child: starts an engine.

    Attributes:
        counted: what it counted.
        refused: engines that could not be started.
        hung: engines that the service killed.
        engines: all that were started.
    """

    def __init__(self, settings: Settings, start_child: StartChild) -> None:
        self.process = Process("service")
        self.settings = settings
        self.answering = False
        self.ended = asyncio.Event()
        self.store: Store | None = None
        self.service: Service | None = None
        self.usage: UsageLog | None = None
        self.counted: Counted | None = None
        self.refused = self.hung = 0
        self.engines: list[Any] = []
        self._start_child = start_child

    @property
    def data(self) -> Path:
        """The data folder."""
        return self.settings.data

    async def start(self) -> None:
        """Open the store and start the runtime, as `serve` does; called as code of the process."""
        settings = self.settings
        self.store = open_store(settings.data, limits=settings.limits, times=settings.times, database=SimulatedDatabase)
        self.usage = UsageLog(self.store.usage)
        self.counted = Counted(self.usage)
        self.service = Service(settings, self.store, self.counted, self._start_child)
        self.service.generations._figures = self.counted.streams  # they are no operations of the log
        self.service.janitor.add("usage", _FLUSH, self.usage.flush)
        await self.service.start()
        state = AppState(Limited(self.service, Meter(self.service.queued)), self.store, settings)
        self._application = _Application(state)
        self._app = ArrivalMiddleware(self._endpoint, self.service.arrivals)
        self.answering = True

    async def stop(self) -> None:
        """End as after SIGTERM; called as code of the process."""
        assert self.service is not None
        assert self.store is not None
        assert self.usage is not None
        await self.service.drain()
        self.answering = False
        await self.service.close()
        await self.usage.flush()
        self.store.close()
        self.ended.set()

    def serve(self, call: Call) -> "asyncio.Task[Answer]":
        """Answer a request, as code of the process."""
        context = contextvars.copy_context()
        context.run(PROCESS.set, self.process)
        return context.run(asyncio.create_task, self._answer(call))

    async def _answer(self, call: Call) -> Answer:
        data = call.body if isinstance(call.body, bytes) else orjson.dumps({} if call.body is None else call.body)
        kind = "application/x-protobuf" if isinstance(call.body, bytes) else "application/json"
        headers = [] if "content-type" in call.headers else [(b"content-type", kind.encode())]
        headers += [(name.encode(), value.encode()) for name, value in call.headers.items()]
        who = Caller(call.tenant, call.tenant, quotas=call.quotas)
        CURRENT.set(who)
        scope = {
            "type": "http", "method": call.method, "path": PREFIX + call.path, "headers": headers, "caller": who,
            "path_params": dict(call.values), "query_string": urlencode(call.query).encode(),
            "app": self._application, "call": call,
        }  # fmt: skip
        parts: list[Any] = [{"type": "http.request", "body": data}]
        got: list[Any] = []

        async def receive() -> Any:
            if not parts:
                await asyncio.Event().wait()
            return parts.pop()

        async def send(message: Any) -> None:
            got.append(message)

        await self._app(scope, receive, send)
        found = {name.decode().lower(): value.decode() for name, value in got[0]["headers"]}
        return Answer(got[0]["status"], b"".join(part.get("body", b"") for part in got[1:]), found)

    async def _endpoint(self, scope: Any, receive: Any, send: Any) -> None:
        call: Call = scope["call"]
        try:
            endpoint = endpoints()[call.method, call.path]
            known = inspect.signature(endpoint).parameters
            given = {name: value for name, value in {**call.values, **call.query}.items() if name in known}
            response = await endpoint(Request(scope, receive), **given)
        except ServiceError as error:
            headers = {"retry-after": str(error.retry_after)} if isinstance(error, Busy) else {}
            response = answer({"detail": error.message}, error.status)
            response.headers.update(headers)
        await response(scope, receive, send)


@dataclass(slots=True)
class _Holder:
    state: AppState


class _Application:
    """What a request calls its application."""

    def __init__(self, state: AppState) -> None:
        self.state = _Holder(state)


def endpoints() -> dict[tuple[str, str], Callable[..., Any]]:
    """Return the functions that answer requests, by method and path of the route."""
    if not _endpoints:
        for route in all_routes().routes:
            found: Any = route
            for method in found.methods:
                _endpoints[method, found.path.removeprefix(PREFIX)] = found.endpoint
        _endpoints["POST", CHAT] = _chat
    return _endpoints


async def _chat(request: Request) -> Response:
    state, caller = app_state_of(request), caller_of(request)
    body = orjson.loads(await request.body())
    target = await resolve(state, caller, body["model"])
    params = {"max_tokens": body["max_tokens"], "num_samples": body["count"]}
    generate = Generate(body["tokens"], params, target.source, target.model)
    generation = await state.service.generate(caller.tenant, generate)
    samples: list[dict[str, Any]] = [{"tokens": [], "stop": None} for _ in range(body["count"])]
    try:
        while parts := await generation.parts():
            for part in parts:
                samples[part.sample]["tokens"] += part.tokens
                samples[part.sample]["stop"] = part.stop_reason
    finally:
        generation.cancel()
    return answer({"samples": samples, "sampled": generation.sampled})
