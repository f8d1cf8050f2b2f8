"""The face on a loopback port, over the real store and a service that answers at once with canned results."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
import uvicorn

from twinkle_server.app_state import AppState
from twinkle_server.application import create_application
from twinkle_server.checkpoints.links import Links, download_routes
from twinkle_server.engine.files import publish
from twinkle_server.ids import new_id
from twinkle_server.operations import Accepted, Future, ModelInfo, Operation, Outcome, Sample, Save, Submission
from twinkle_server.runtime.outcomes import StoreEffects
from twinkle_server.settings import Limits, Settings, Times
from twinkle_server.store import Store, open_store
from twinkle_server.tenancy.auth import Authentication, Caller
from twinkle_server.wire.codec import (
    SampledPrompt,
    SampledText,
    datum_inputs,
    forward_backward_output,
    parse_request,
    sample_response,
)

BASE = "/models/of/tiny/v1"


class AllKeys:
    """Every key is a tenant of its own."""

    async def find(self, key: str) -> Caller | None:
        return Caller(key.removeprefix("tml-"), "key", "user") if key.startswith("tml-") else None


class CannedService:
    """Writes operations into the real log, and ends each at once; it keeps no order, which others test."""

    def __init__(self, store: Store, data: Path) -> None:
        self.info = ModelInfo(BASE, 128, 1000, "TinyForCausalLM", "/models/of/tiny/v1", ("cross_entropy",))
        self.submissions: list[Submission] = []
        self.finished: list[str] = []
        self.cancelled: list[str] = []
        self.held = False
        self.refuse: Exception | None = None
        self.fail: Callable[[Operation], str | None] = lambda _: None
        self._store, self._data = store, data
        self._effects = StoreEffects(data, store)

    async def submit(self, submission: Submission, in_transaction: Callable[[Any], None] | None = None) -> Accepted:
        if self.refuse is not None:
            raise self.refuse
        accepted, operation = await self._store.journal.submit(submission, in_transaction)
        if accepted.fresh:
            self.submissions.append(submission)
            if submission.refusal is None and not self.held:
                operation.payload = submission.payload
                await self._store.journal.finish([self._outcome(operation)])
        return accepted

    async def submit_next(self, submission: Submission) -> Accepted:
        return await self.submit(submission)

    async def wait(self, request: str, tenant: str, seconds: float) -> Future:
        ends = time.monotonic() + seconds
        while (future := await self._store.journal.future(request, tenant)).status == "pending":
            if time.monotonic() > ends:
                break
            await asyncio.sleep(0.02)
        return future

    async def cancel(self, request: str, tenant: str) -> None:
        await self._store.journal.future(request, tenant)
        self.cancelled.append(request)

    def awaited(self, submission: Submission) -> bool:
        return False

    def queue_state(self, queue_id: str) -> tuple[str, str | None]:
        return "paused_capacity", f"{queue_id} waits for room"

    async def finish_session(self, session: str) -> None:
        self.finished.append(session)

    async def reserve(self, tenant: str, model: str) -> None:
        raise AssertionError("no model of these tests trains all parameters")

    async def heartbeat(self, session: str, tenant: str) -> None:
        await self._store.sessions.heartbeat(tenant, session, time.time())

    def _outcome(self, operation: Operation) -> Outcome:
        if error := self.fail(operation):
            return Outcome(operation.id, error=error, category="user")
        extra: dict[str, Any] = {}
        body = b""
        if operation.kind == "save":
            save = Save.parse(operation.payload or b"")
            published = publish(self._data / save.folder, lambda folder: (folder / "a.bin").write_bytes(b"weights"))
            extra = {"size_bytes": published.size, "digest": published.digest}
        elif operation.kind in ("forward", "forward_backward"):
            body = passed(operation.payload or b"")
        elif operation.kind == "sample":
            body = sampled(Sample.parse(operation.payload or b""))
        elif operation.kind == "optim_step":
            body = orjson.dumps({"metrics": {"grad_norm": 1.0}})
        return self._effects.done(operation, extra, body)


def passed(payload: bytes) -> bytes:
    """Return a log-probability of -1 for every target."""
    rows = [datum_inputs(datum)["target_tokens"] for datum in parse_request(payload).data]
    outputs = [{"logprobs": np.full(row.shape, -1, np.float32)} for row in rows]
    return forward_backward_output(outputs, {"loss:sum": float(sum(row.size for row in rows))})


def sampled(sample: Sample) -> bytes:
    """Return two tokens a sequence, and what was asked about the prompt."""
    text = SampledText(np.array([7, 8], np.int32), np.array([-0.5, -0.25], np.float32), "stop")
    scores = np.array([np.nan, *[-1.0] * (len(sample.tokens) - 1)], np.float32)
    return sample_response([text] * sample.count, SampledPrompt(scores if sample.prompt_logprobs else None))


@dataclass(slots=True)
class Served:
    """The application as it listens."""

    url: str
    service: CannedService
    store: Store
    state: AppState
    salt: str = ""
    clients: list[httpx.Client] = field(default_factory=list)

    def key(self, tenant: str = "a") -> str:
        """Return the key of a tenant of this test alone."""
        return f"tml-{tenant}-{self.salt}"

    def http(self, tenant: str = "a") -> httpx.Client:
        """Return a plain client of a tenant."""
        made = httpx.Client(
            base_url=f"{self.url}/api/v1", headers={"X-API-Key": self.key(tenant)}, timeout=20, trust_env=False
        )
        self.clients.append(made)
        return made


@pytest.fixture
def served(listening: Served) -> Iterator[Served]:
    """The face, with tenants that nobody had before."""
    service = listening.service
    service.submissions, service.finished, service.cancelled = [], [], []
    service.held, service.refuse, service.fail = False, None, lambda _: None
    listening.salt = new_id()
    listening.state.settings = replace(listening.state.settings, custom_losses=False)
    yield listening
    while listening.clients:
        listening.clients.pop().close()


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The face, over a store of its own."""
    tmp_path = tmp_path_factory.mktemp("data")
    limits = Limits(datums=64, request_tokens=4096, samples=16)
    store = open_store(tmp_path, limits=limits)
    service = CannedService(store, tmp_path)
    settings = Settings("tiny", tmp_path, name=BASE, limits=limits, times=Times(poll=0.3))
    links = Links(tmp_path, store.secret)
    application = create_application(service, store, settings, links)
    application.include_router(download_routes(links))
    application.add_middleware(Authentication, keys=AllKeys())
    sock = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(application, log_level="critical", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    ends = time.monotonic() + 20
    while not server.started and time.monotonic() < ends:
        time.sleep(0.01)
    yield Served(f"http://127.0.0.1:{sock.getsockname()[1]}", service, store, application.state.state)
    server.should_exit = True
    thread.join(20)
    sock.close()
    store.close()
