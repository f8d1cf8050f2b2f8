"""Native clients: the real `twinkle_client` on the simulated network, impatient ones among them."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from service_simulation.bodies import row_ids
from service_simulation.clients import BAD_ROWS, PATIENCE, chat
from service_simulation.engine import BREAK, DIE, ERROR, FATAL, HANG
from service_simulation.native import measured
from service_simulation.reference import Event, History, Kind, Source, Violation, demand
from service_simulation.service import Answer, Call, endpoints
from service_simulation.world import Lost, World
from starlette.routing import compile_path

import twinkle.errors
from twinkle_client import MultiLoraTransformersModel
from twinkle_client.errors import Cancelled, ConnectionFailed, OperationFailed, Overloaded, ServiceError
from twinkle_client.http import Connection

UNKNOWN = (ConnectionFailed, Overloaded, ServiceError, TimeoutError)
"""After these the call is made again: nobody knows whether it was carried out."""
WORDS = (
    ("pass", 24), ("big", 3), ("due step", 16), ("only", 5), ("score", 5), ("graph", 4), ("backward", 4),
    ("measure", 6), ("weights", 2), ("save", 3), ("load", 3), ("metric", 2), ("scheduler", 1), ("bad row", 3),
    ("chat", 4), ("wait", 4),
)  # fmt: skip


class Transport(httpx.AsyncBaseTransport):
    """Sends requests of the client over the simulated network."""

    def __init__(self, world: World, tenant: str) -> None:
        self._world, self._tenant = world, tenant
        self._routes = [(method, path, compile_path(path)[0]) for method, path in endpoints()]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See `httpx`."""
        path, values = self._route(request)
        names = ("content-type", "x-idempotency-key", "accept")
        headers = {name: request.headers[name] for name in names if name in request.headers}
        query = {name: float(value) if name == "wait" else value for name, value in request.url.params.items()}
        call = Call(self._tenant, path, await request.aread(), request.method, values, query, headers)
        try:
            answer = await self._world.transmit(call)
        except Lost as error:
            raise httpx.ReadError(str(error)) from error
        return httpx.Response(answer.status, headers=dict(answer.headers), content=answer.body)

    def _route(self, request: httpx.Request) -> tuple[str, dict[str, str]]:
        for method, path, pattern in self._routes:
            if method == request.method and (match := pattern.match(request.url.path)):
                return path, match.groupdict()
        raise AssertionError(f"no route for {request.method} {request.url.path}")


class NativeSession:
    """One session of a tenant, with one model; it is also what the model needs of a client.

    Args:
        world: where the service is.
        tenant: who it is.
        draw: of what it does.
    """

    def __init__(self, world: World, tenant: str, draw: random.Random) -> None:
        self.world, self.tenant, self.draw = world, tenant, draw
        self.impatient = draw.random() < 0.5
        seconds = draw.choice([1.0, 30.0]) if self.impatient else 1e6
        self.connection = Connection("http://service", async_transport=Transport(world, tenant), retry_seconds=seconds)
        self.session_id = ""
        self.finished = False
        most = world.settings.limits.queued  # beyond it, requests are mostly turned away
        self._gate = asyncio.Semaphore(min(draw.choice([1, 4, 16]), max(1, most - 2)))
        self.saved: list[tuple[str, Source, int, bool]] = []
        self._numbers = itertools.count()
        self._names = itertools.count()
        self._following = 1
        world.natives.append(self)

    # As a client

    def next_number(self, kind: str) -> int:
        """See `TwinkleClient`."""
        return next(self._numbers)

    def note_save(self, path: str) -> None:
        """See `TwinkleClient`; nobody here samples from what was saved last."""

    async def run_async(self, call: Any) -> Any:
        """See `TwinkleClient`."""
        return await self.connection.run_async(call)

    async def ask(self, path: str, body: Any = None, **options: Any) -> Answer:
        """Send a request that is none of the client until it is answered, as `clients.Client` does."""
        ends = self.world.clock.now + PATIENCE
        while self.world.clock.now < ends:
            try:
                answer = await self.world.transmit(Call(self.tenant, path, body, **options))
            except Lost:
                answer = None
            if answer is not None and answer.status not in (408, 429, 500, 503):
                return answer
            await asyncio.sleep(1.0)
        raise Violation(f"{path} was not answered")

    # Its life

    async def open(self) -> bool:
        """Open the session and make the model; returns whether it is there."""
        key = f"native {self.tenant} {self.draw.random()}"
        request = self.connection.request("POST", "/create_session", {}, request_id=key, retry_seconds=1e6)
        self.session_id = (await self.run_async(request))["session_id"]
        self.model = MultiLoraTransformersModel(client=self)  # type: ignore[arg-type]
        accumulation = self.draw.choice([1, 1, 2])
        self.history = History(f"{self.session_id}:train:0", self.tenant)
        event = self.history.add(Event(0, "create", options=accumulation))
        patient, self.impatient = self.impatient, False
        seconds, self.connection._retry_seconds = self.connection._retry_seconds, 1e6
        await self._carry_out(
            event,
            lambda: self.model.add_adapter_to_model_async("a", {"r": 8}, gradient_accumulation_steps=accumulation),
        )
        self.impatient, self.connection._retry_seconds = patient, seconds
        return event.ending == "done"

    async def beat(self) -> None:
        """Say that the session lives, until it ends."""
        while not self.finished:
            await asyncio.sleep(20.0)
            if not self.finished:
                answer = await self.ask("/twinkle/session_heartbeat", {"session_id": self.session_id})
                demand(answer.status == 200 or self.finished, f"heartbeat: {answer.status} {answer.body!r}")

    async def finish(self) -> None:
        """End the session; the model is kept."""
        self.finished = True
        answer = await self.ask("/twinkle/finish_session", {"session_id": self.session_id})
        demand(answer.status == 200, f"{answer}")

    async def follow(self, count: int) -> None:
        """Do so many random things; a patient client does several at once."""
        words = self.draw.choices([word for word, _ in WORDS], [weight for _, weight in WORDS], k=count)
        async with asyncio.TaskGroup() as tasks:
            for word in words:
                if word == "wait":
                    await asyncio.sleep(self.draw.choice([0.1, 1.0, 10.0]))
                    continue
                if (work := self._work(word)) is None:
                    continue
                if self.impatient or word == "save":
                    await work
                else:
                    tasks.create_task(work)  # type: ignore[arg-type]
                    await asyncio.sleep(self.draw.random() * 0.02)
        await self.read()

    async def read(self) -> None:
        """Ask for all that is known of the model."""
        await self._measure(True)

    # Calls

    def _work(self, word: str) -> Awaitable[None] | None:
        draw, model = self.draw, self.model
        if word in ("pass", "big", "only", "graph", "bad row"):
            return self._rows(word)
        if word == "load" and not self.saved:
            return None
        simple: dict[str, Callable[[], Awaitable[None]]] = {
            "due step": lambda: self._call("due step", model.clip_grad_and_step_async),
            "score": lambda: self._call("score", model.calculate_loss_async),
            "backward": lambda: self._call("backward", model.backward_async),
            "measure": lambda: self._measure(draw.random() < 0.5),
            "weights": self._weights,
            "save": self._save,
            "load": self._load,
            "metric": lambda: self._call("metric", lambda: model.add_metric_async("DPOMetric")),
            "scheduler": lambda: self._scheduler(draw.choice([5, 6])),
            "chat": lambda: chat(self, self.history, lambda: self._following - 1),  # type: ignore[arg-type]
        }
        return simple[word]()

    def _rows(self, word: str) -> Awaitable[None]:
        count, size = (self.draw.choice([3, 12]), 40) if word == "big" else (self.draw.choice([1, 1, 2, 5]), 3)
        rows = [[self.world.next_token(), *([2] * (size - 1))] for _ in range(count)]
        bad = self.draw.choice([ERROR, ERROR, BREAK, DIE, FATAL, HANG]) if word == "bad row" else None
        rows += [] if bad is None else [[bad, 2, 3]]
        inputs = [{"input_ids": row, "labels": row} for row in rows]
        if word == "graph":
            inputs, rows = inputs[:1], rows[:1]
        kind: Kind = word if word in ("only", "graph") else "pass"  # type: ignore[assignment]
        method = {"only": self.model.forward_only_async, "graph": self.model.forward_async}.get(
            word, self.model.forward_backward_async
        )
        more = {"disable_lora": True} if word == "only" and self.draw.random() < 0.3 else {}
        excuses = () if bad is None else BAD_ROWS[bad]
        return self._call(kind, lambda: method(inputs, **more), rows=row_ids(rows), excuses=excuses)

    async def _measure(self, training: bool) -> None:
        event = self._event("measure", options=int(training))
        await self._carry_out(event, lambda: self.model.calculate_metric_async(training))
        event.value = measured(event.value) if event.ending == "done" else None

    async def _weights(self) -> None:
        event = self._event("weights")
        await self._carry_out(event, self.model.get_state_dict_async)
        if event.ending == "done":
            event.value = {name: tuple(ids.tolist()) for name, ids in event.value.items()}

    def _scheduler(self, steps: int) -> Awaitable[None]:
        options: dict[str, Any] = {"num_warmup_steps": 1, "num_training_steps": steps}
        work = lambda: self.model.set_lr_scheduler_async("CosineWarmupScheduler", **options)  # noqa: E731
        return self._call("scheduler", work, options=steps)

    async def _save(self) -> None:
        event = self._event("save")
        name, consumed, optimizer = f"c{next(self._names)}", event.number, self.draw.random() < 0.7
        more = {"save_optimizer": optimizer, "consumed_train_samples": consumed}
        await self._carry_out(event, lambda: self.model.save_async(name, **more))
        if event.ending == "done":
            demand(event.value.twinkle_path == f"twinkle://{self.history.model}/weights/{name}", f"{event.value}")
            self.saved.append((name, Source(self.history, event.number), consumed, optimizer))

    async def _load(self) -> None:
        name, source, consumed, optimizer = self.draw.choice(self.saved)
        optimizer = optimizer and self.draw.random() < 0.7
        event = self._event("load", source=source, optimizer=optimizer, options=1)
        await self._carry_out(
            event, lambda: self.model.resume_from_checkpoint_async(name, resume_only_model=not optimizer)
        )
        if event.ending == "done":
            demand(event.value["consumed_train_samples"] == consumed, f"{event} was saved with {consumed}")

    def _event(self, kind: Kind, **fields: Any) -> Event:
        event = self.history.add(Event(self._following, kind, **fields))
        self._following += 1
        return event

    def _call(self, kind: Kind, work: Callable[[], Awaitable[Any]], **fields: Any) -> Awaitable[None]:
        return self._carry_out(self._event(kind, **fields), work)

    async def _carry_out(self, event: Event, work: Callable[[], Awaitable[Any]]) -> None:
        """Make a call until it has a result; an impatient client interrupts it, and makes it again."""
        async with self._gate:
            await self._until_over(event, work)

    async def _until_over(self, event: Event, work: Callable[[], Awaitable[Any]]) -> None:
        ends = self.world.clock.now + 3 * PATIENCE
        while self.world.clock.now < ends:
            patience = self.draw.choice([0.001, 0.05, 2.0, 20.0]) if self.impatient else None
            try:
                async with asyncio.timeout(patience if self.draw.random() < 0.3 else None):
                    event.value = await work()
            except UNKNOWN:
                await asyncio.sleep(0.1)
                continue
            except OperationFailed as error:
                event.ending = "cancelled" if isinstance(error, Cancelled) else "failed"
                event.error = str(error)
            except twinkle.errors.TwinkleError as error:
                if type(error).__module__ != twinkle.errors.__name__:
                    raise
                event.ending, event.value = "done", type(error).__name__
            else:
                event.ending = "done"
            return
        raise Violation(f"{self.history.model} number {event.number} ({event.kind}) has no result")
