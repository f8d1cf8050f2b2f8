"""Clients that behave as the SDK does on a bad network: they send again, under the same number, until answered."""

import asyncio
import itertools
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import httpx
from server_history import Event, History, State, datum_id, read_version, version_of
from server_raw import LORA, PROTOBUF, pass_body, row

from twinkle_server.wire import tinker_pb2 as wire

PATIENCE = 90.0
"""Seconds after which a request that is not answered is taken for lost."""
AGAIN = (408, 429, 500, 502, 503, 504)


class Lost(AssertionError):
    """Something that the service acknowledged, or must acknowledge, was not done."""


@dataclass(frozen=True)
class Wait:
    """How long one future was open, on the clock of `time.monotonic`.

    Attributes:
        what: was asked for.
        begin: when its id came.
        end: when its result came.
    """

    what: str
    begin: float
    end: float


class Client:
    """One tenant's connection that never gives up.

    Args:
        url: of the service, or of a proxy before it.
        key: of the tenant.

    Attributes:
        sent: requests, those that came to nothing counted.
        waits: for every future that is over.
    """

    def __init__(self, url: str, key: str = "tml-local") -> None:
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=0)
        self.http = httpx.AsyncClient(
            base_url=f"{url}/api/v1", headers={"X-API-Key": key}, trust_env=False, timeout=20, limits=limits
        )
        self.sent = 0
        self.waits: list[Wait] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.http.aclose()

    async def ask(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> httpx.Response:
        """Send until there is an answer that is one."""
        end, pause = time.monotonic() + PATIENCE, 0.01
        headers = headers or {}
        while time.monotonic() < end:
            self.sent += 1
            try:
                if isinstance(body, bytes):
                    answer = await self.http.post(path, content=body, headers={**headers, "Content-Type": PROTOBUF})
                else:
                    answer = await self.http.post(path, json=body, headers=headers)
            except httpx.HTTPError:
                answer = None
            if answer is not None and answer.status_code not in AGAIN:
                if answer.status_code != 200:
                    raise Lost(f"{path}: {answer.status_code} {answer.text[:300]}")
                return answer
            await asyncio.sleep(pause)
            pause = min(0.5, pause * 2)
        raise Lost(f"{path} was not answered in {PATIENCE} seconds")

    async def result(self, request: str, kind: str, *, cancelled: bool = False) -> Any:
        """Wait for a future until it is over; with `cancelled`, it may be cancelled."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            headers = {} if kind == "json" else {"Accept": PROTOBUF}
            body = {"request_id": request, "allow_metadata_only": False}
            answer = await self.ask("/retrieve_future", body, headers)
            if answer.headers["content-type"].startswith(PROTOBUF):
                made = wire.SampleResponse() if kind == "sample" else wire.ForwardBackwardOutput()
                made.ParseFromString(answer.content)
                return made
            found = answer.json()
            if cancelled and found.get("error") == "the request was cancelled":
                return found
            if "error" in found:
                raise Lost(f"a {kind} operation failed: {found}")
            if found.get("type") != "try_again":
                return found
        raise Lost(f"a future was not over in {PATIENCE} seconds")

    async def do(self, path: str, body: Any, kind: str = "json") -> Any:
        """Submit, and wait for the result."""
        request = (await self.ask(path, body)).json()["request_id"]
        begin = time.monotonic()
        found = await self.result(request, kind)
        self.waits.append(Wait(path, begin, time.monotonic()))
        return found

    async def session(self) -> str:
        """Open a session; if the answer is lost, it is asked for again, as the SDK does."""
        headers = {"X-Idempotency-Key": str(uuid.uuid4())}
        return str((await self.ask("/create_session", {}, headers)).json()["session_id"])

    async def copy(self, session: str, number: int, path: str) -> str:
        """Copy a checkpoint into a run of a session, and return the copy's path."""
        body = {"source_path": path, "session_id": session, "model_seq_id": number}
        return str((await self.ask("/copy_weights", body)).json()["tinker_path"])


class Trainer:
    """One model of one client, with the history of what was asked of it."""

    def __init__(self, client: Client, session: str, number: int, first_token: int) -> None:
        self.client, self.session = client, session
        self.id = f"{session}:train:{number}"
        self.history = History()
        self._number = number
        self._tokens = itertools.count(first_token)
        self._last = 0
        self._saves = itertools.count()

    async def create(self, base: str = "ledger/model") -> "Trainer":
        """Make the model; again and again it is the same one."""
        body = {"session_id": self.session, "model_seq_id": self._number, "base_model": base}
        found = await self.client.do("/create_model", {**body, "lora_config": LORA})
        assert found["model_id"] == self.id
        return self

    def _event(self, kind: Any, datums: Sequence[wire.Datum] = (), loads: State | None = None) -> Event:
        self._last += 1
        return self.history.add(Event(self._last, kind, tuple(datum_id(datum) for datum in datums), loads))

    def _rows(self, count: int) -> list[wire.Datum]:
        return [row([next(self._tokens), 2, 3]) for _ in range(count)]

    def train(self, count: int = 1) -> Awaitable[None]:
        """Add gradients of new datums."""
        data = self._rows(count)
        event = self._event("train", data)
        return self._do(event, "/forward_backward", pass_body(self.id, event.number, data), "pass")

    def read(self) -> Awaitable[None]:
        """Ask what is pending and applied."""
        event = self._event("read")
        body = pass_body(self.id, event.number, [row([1, 2])], forward_only=True)
        return self._do(event, "/forward_backward", body, "pass")

    async def cancel(self) -> None:
        """Ask for a long pass, and cancel the two behind it; each of them is cancelled, or has its whole effect."""
        requests: list[tuple[Event, str]] = []
        for count in (40, 1, 2):
            data = self._rows(count)
            event = self._event("train", data)
            made = await self.client.ask("/forward_backward", pass_body(self.id, event.number, data))
            requests.append((event, made.json()["request_id"]))
        for _, request in requests[1:]:
            await self.client.ask("/cancel_future", {"request_id": request})
        for event, request in requests:
            event.output = await self.client.result(request, "pass", cancelled=event is not requests[0][0])
            event.cancelled = isinstance(event.output, dict)

    def step(self) -> Awaitable[None]:
        """Apply what is pending."""
        event = self._event("step")
        return self._do(event, "/optim_step", {"model_id": self.id, "seq_id": event.number, "adam_params": {}})

    async def save(self) -> tuple[str, State]:
        """Save a checkpoint, and return its path with what must be in it."""
        event = self._event("save")
        state = self.history.expected(event.number)
        await self._do(event, "/save_weights", self._named(event.number))
        return str(event.output["path"]), State(state.applied, (), state.steps)

    async def save_sampler(self) -> tuple[str, State]:
        """Save weights to sample from, and return their path with what must be in them."""
        event = self._event("save")
        state = self.history.expected(event.number)
        await self._do(event, "/save_weights_for_sampler", self._named(event.number))
        return str(event.output["path"]), state

    def load(self, path: str, state: State) -> Awaitable[None]:
        """Put a checkpoint in place."""
        event = self._event("load", loads=state)
        body = {"model_id": self.id, "seq_id": event.number, "path": path, "optimizer": True}
        return self._do(event, "/load_weights", body)

    def _named(self, number: int) -> dict[str, Any]:
        return {"model_id": self.id, "seq_id": number, "path": f"c{next(self._saves)}"}

    async def _do(self, event: Event, path: str, body: Any, kind: str = "json") -> None:
        event.output = await self.client.do(path, body, kind)


async def sampled(client: Client, session: str, number: int, path: str, state: State) -> None:
    """Sample from saved weights, twice, and demand that they say what was saved."""
    body = {"session_id": session, "sampling_session_seq_id": number, "model_path": path}
    sampler = (await client.ask("/create_sampling_session", body)).json()["sampling_session_id"]
    for at in range(2):
        request = {
            "num_samples": 1, "prompt": {"chunks": [{"tokens": [7, 8], "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 10_000}, "sampling_session_id": sampler, "seq_id": at,
        }  # fmt: skip
        answer = await client.do("/asample", request, "sample")
        assert read_version(answer) == version_of(state), "a sampler does not have the weights it was made with"


Program = Callable[[Trainer, int], Awaitable[None]]


async def follow(trainer: Trainer, program: Sequence[str], ahead: int = 4) -> None:
    """Do a program, sending up to `ahead` operations before the first is over, as pipelining users do.

    Args:
        trainer: the model.
        program: words of "train", "big", "read", "step", "cancel" (of passes behind a long one), "save", "sample",
            "copy" (of what was saved last) and "load" (of what was saved or copied last); where nothing was saved,
            these two do nothing.
        ahead: operations that are under way at once.
    """
    gate = asyncio.Semaphore(ahead)
    samplers, copies = itertools.count(), itertools.count(1)
    saved: list[tuple[str, State]] = []

    async def guarded(work: Awaitable[Any]) -> None:
        async with gate:
            await work

    async with asyncio.TaskGroup() as tasks:
        for word in program:
            async with gate:
                if word == "save":
                    saved.append(await trainer.save())
                    continue
                if word == "cancel":
                    await trainer.cancel()
                    continue
                if word == "sample":
                    path, state = await trainer.save_sampler()
                    tasks.create_task(sampled(trainer.client, trainer.session, next(samplers), path, state))
                    continue
                if word in ("copy", "load") and not saved:
                    continue
                if word == "copy":
                    path, state = saved[-1]
                    saved.append((await trainer.client.copy(trainer.session, next(copies), path), state))
                    continue
                made = {
                    "train": trainer.train, "big": lambda: trainer.train(40), "read": trainer.read,
                    "step": trainer.step, "load": lambda: trainer.load(*saved[-1]),
                }[word]()  # fmt: skip
            tasks.create_task(guarded(made))
    await trainer.read()
