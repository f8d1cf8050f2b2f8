"""Clients as the SDK is one: pipelined, with numbers of their own, sending again until they are answered."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from service_simulation.bodies import LORA, metrics_of, pass_body, row_ids, sampled_tokens
from service_simulation.engine import BREAK, DIE, ERROR, FATAL, HANG
from service_simulation.reference import Chat, Event, History, Kind, Source, State, Violation, as_metrics, demand
from service_simulation.service import CHAT, Answer, Call
from service_simulation.virtual import Killed, run_as
from service_simulation.world import Lost, World

AGAIN = (408, 429, 500, 503)
PATIENCE = 3600.0
"""Seconds after which something that is still not over hangs."""
EARLY = 4
"""Answers that a future is pending that may come too early: a request may be answered before its first copy is."""
BAD_ROWS = {
    ERROR: ("The service failed during this",),
    BREAK: ("The service failed during this",),
    DIE: ("twice while",),
    FATAL: ("twice while",),
    HANG: ("twice while",),
}
CANCELLED = "the request was cancelled"


class Client:
    """One session of one tenant.

    Args:
        world: where the service is.
        tenant: who it is.
        name: makes requests idempotent.
        draw: of what it does.
    """

    def __init__(self, world: World, tenant: str, name: str, draw: random.Random) -> None:
        self.world, self.tenant, self.name, self.draw = world, tenant, name, draw
        self.session = ""
        self.models: list[Trainer] = []
        self.copies: set[str] = set()
        self.finished = False
        self.over: list[tuple[str, Answer]] = []
        self._samplers = itertools.count()
        self._numbers = itertools.count()

    async def ask(self, path: str, body: Any = None, **options: Any) -> Answer:
        """Send a request until there is an answer that is one."""
        call = Call(self.tenant, path, body, **options)
        ends, pause = self.world.clock.now + PATIENCE, 0.05
        while self.world.clock.now < ends:
            try:
                answer = await self.world.transmit(call)
            except Lost:
                answer = None
            if answer is not None and answer.status not in AGAIN:
                return answer
            hint = float(answer.headers.get("retry-after", "0")) if answer is not None else 0.0
            await asyncio.sleep(max(pause, hint * self.draw.uniform(0.5, 1.5)))
            pause = min(8.0, 2 * pause)
        raise Violation(f"{path} {body!r:.200} was not answered within {PATIENCE} s")

    async def ask_once(self, path: str, body: Any) -> Answer:
        """Send a request, and return whatever is answered."""
        return await self.world.transmit(Call(self.tenant, path, body))

    async def post(self, path: str, body: Any = None, **options: Any) -> Any:
        """Send, and demand a good answer."""
        answer = await self.ask(path, body, **options)
        demand(answer.status == 200, f"{self.tenant}: {path} {body!r:.200}: {answer.status} {answer.body!r:.300}")
        return answer.json()

    async def result(self, request: str) -> Answer:
        """Wait until a future is over."""
        ends, early = self.world.clock.now + PATIENCE, Counter[Any]()
        headers = {"accept": "application/x-protobuf"}
        while self.world.clock.now < ends:
            answer = await self.ask("/retrieve_future", {"request_id": request}, headers=headers)
            demand(answer.status == 200, f"future {request}: {answer.status} {answer.body!r:.300}")
            if answer.is_message or answer.json().get("type") != "try_again":
                self.over.append((request, answer))
                return answer
            found = answer.json()
            demand(
                found["request_id"] == request
                and (found["queue_state"] == "active" or bool(found.get("queue_state_reason"))),
                f"future {request} waits: {found}",
            )
            if answer.seconds < self.world.settings.times.poll - 0.01:
                early[answer.life] += not self.world.lets_go(answer.life)
                demand(early[answer.life] <= EARLY, f"future {request} is pending, and who asks for it need not wait")
                await asyncio.sleep(1.0)
        raise Violation(f"future {request} was not over within {PATIENCE} s")

    async def open(self) -> "Client":
        """Create the session."""
        body = {"tags": [], "user_metadata": {"name": self.name}, "display_name": self.name}
        made = await self.post("/create_session", body, headers={"x-idempotency-key": self.name})
        self.session = made["session_id"]
        return self

    async def beat(self) -> None:
        """Say that the session lives, until it ends."""
        while not self.finished:
            await asyncio.sleep(20.0)
            if self.finished:
                return
            answer = await self.ask("/session_heartbeat", {"session_id": self.session})
            demand(answer.status == 200 or self.finished, f"heartbeat: {answer.status} {answer.body!r}")

    async def finish(self) -> None:
        """End the session."""
        self.finished = True
        await self.post("/sessions/{session_id}/finish", {"reason": {"type": "success"}},
                        values={"session_id": self.session})  # fmt: skip

    async def sample(self, sampler: str, count: int = 1, most: int = 12) -> list[list[int]] | None:
        """Sample; None if the engine failed at it for a reason that is not the service's."""
        answer = await self.result(await self.submit_sample(sampler, count, most))
        if answer.is_message:
            return sampled_tokens(answer.body)
        error = answer.json()["error"]
        demand(any(word in error for word in self.world.excuses), f"a sample failed: {error}")
        return None

    async def submit_sample(self, sampler: str, count: int = 1, most: int = 2, record: bool = False) -> str:
        """Submit a sampling request, and return the id of its future."""
        body = {
            "num_samples": count, "prompt": {"chunks": [{"tokens": [7, 8], "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": most}, "sampling_session_id": sampler, "seq_id": next(self._numbers),
            "record_stability_info": record,
        }  # fmt: skip
        self.world.samples += 1
        return str((await self.post("/asample", body))["request_id"])

    async def sampler_of(self, path: str) -> str:
        """Create a sampling session on a checkpoint."""
        body = {"session_id": self.session, "sampling_session_seq_id": next(self._samplers), "model_path": path}
        return str((await self.post("/create_sampling_session", body))["sampling_session_id"])

    def next_sampler(self) -> int:
        """Return the number of the next sampling session."""
        return next(self._samplers)

    async def check_again(self) -> None:
        """Demand that futures that are over still say the same."""
        for request, before in self.draw.sample(self.over, min(5, len(self.over))):
            headers = {"accept": "application/x-protobuf"}
            again = await self.ask("/retrieve_future", {"request_id": request}, headers=headers)
            demand((again.status, again.body) == (200, before.body), f"future {request} changed: {again}")


class Trainer:
    """One model of a client.

    Args:
        client: its session.
        number: of the model in the session.
    """

    def __init__(self, client: Client, number: int) -> None:
        self.client, self.world, self.draw = client, client.world, client.draw
        self.id = f"{client.session}:train:{number}"
        self.history = History(self.id, client.tenant)
        self.gone = False
        self.saved: list[tuple[str, Source]] = []
        self.paths: set[str] = set()
        self._number = number
        self._following = 1
        most = client.world.settings.limits.queued  # beyond it, requests are mostly turned away
        self._gate = asyncio.Semaphore(min(client.draw.choice([1, 4, 16]), most))
        self._names = itertools.count()
        self._cancelling = False
        client.models.append(self)

    @property
    def following(self) -> int:
        """The next number."""
        return self._following

    @property
    def changed(self) -> bool:
        """Whether anything was done with it."""
        return any(event.ending == "done" for event in self.history.events.values())

    def skip(self, count: int) -> None:
        """Note that so many numbers were used in another way."""
        self._following += count

    async def submit_step(self, event: Event) -> None:
        """Ask for a step that is noted already."""
        await self._submit(event, "/optim_step", {"model_id": self.id, "seq_id": event.number, "adam_params": {}})

    # Operations

    async def create(self, path: str | None = None, source: Source | None = None, optimizer: bool = True) -> bool:
        """Make the model, from a checkpoint if one is given; returns whether it is there."""
        event = self.history.add(Event(0, "create", source=source, optimizer=optimizer))
        body = {"session_id": self.client.session, "model_seq_id": self._number}
        if path is None:
            await self._submit(event, "/create_model", {**body, "base_model": "ledger/model", "lora_config": LORA})
        else:
            await self._submit(event, "/load_weights", {**body, "path": path, "optimizer": optimizer})
        self.gone = event.ending != "done"
        return not self.gone

    def _event(self, kind: Kind, **fields: Any) -> Event:
        event = self.history.add(Event(self._following, kind, **fields))
        self._following += 1
        return event

    def rows(self, count: int, size: int = 3) -> list[list[int]]:
        """Return new rows, each with a first token that no other row of the simulation has."""
        return [[self.world.next_token(), *([2] * (size - 1))] for _ in range(count)]

    def train(self, count: int = 1, bad: int | None = None, size: int = 3) -> Coroutine[Any, Any, None]:
        """Add gradients of new rows; a bad one does something to the engine."""
        rows = self.rows(count, size) + ([[bad, 2, 3]] if bad is not None else [])
        excuses = BAD_ROWS.get(bad, ()) if bad is not None else ()
        event = self._event("train", rows=row_ids(rows), excuses=excuses)
        return self._submit(event, "/forward_backward", pass_body(self.id, event.number, rows))

    def read(self) -> Coroutine[Any, Any, None]:
        """Ask what the model is."""
        event = self._event("read")
        return self._submit(event, "/forward_backward", pass_body(self.id, event.number, [[1, 2]], forward_only=True))

    def step(self, **adam: float) -> Coroutine[Any, Any, None]:
        """Apply what is pending."""
        event = self._event("step", excuses=("adam_params",) if adam else ())
        return self._submit(event, "/optim_step", {"model_id": self.id, "seq_id": event.number, "adam_params": adam})

    async def save(self, **fields: Any) -> None:
        """Save a checkpoint to go on from."""
        event = self._event("save")
        name = f"c{next(self._names)}"
        body = {"model_id": self.id, "seq_id": event.number, "path": name, **fields}
        await self._submit(event, "/save_weights", body)
        if event.ending == "done":
            self.saved.append((f"tinker://{self.id}/weights/{name}", Source(self.history, event.number)))
            self.paths.add(self.saved[-1][0])

    async def save_sampler(self) -> None:
        """Save weights to sample from, under a name, and sample from them."""
        event = self._event("save")
        body = {"model_id": self.id, "seq_id": event.number, "path": f"s{next(self._names)}"}
        await self._submit(event, "/save_weights_for_sampler", body)
        if event.ending == "done":
            path = f"tinker://{self.id}/sampler_weights/{body['path']}"
            self.paths.add(path)
            sampler = await self.client.sampler_of(path)
            await self.check_sample(sampler, event.number)

    async def freeze(self, kind: str) -> None:
        """Save weights for a sampling session without a name, and sample from it."""
        event = self._event("save")
        number = self.client.next_sampler()
        fields = {"sampling_session_seq_id": number, "kind": kind}
        await self._submit(event, "/save_weights_for_sampler", {"model_id": self.id, "seq_id": event.number, **fields})
        if event.ending == "done":
            await self.check_sample(f"{self.client.session}:sample:{number}", event.number)

    async def check_sample(self, sampler: str, number: int) -> None:
        """Demand that samples come from the state after an operation."""
        most = self.draw.choice([2, 12])
        found = await self.client.sample(sampler, self.draw.choice([1, 2]), most)
        while not self.history.is_over(number):
            await asyncio.sleep(1.0)
        wanted = self.history.after(number).version()[:most]
        demand(found is None or all(tokens == wanted for tokens in found), f"{sampler} sampled {found}, not {wanted}")

    async def chat(self) -> None:
        """Ask for tokens of the present weights, as the chat endpoints do."""
        await chat(self.client, self.history, lambda: self._following - 1)

    def load(self, path: str, source: Source, optimizer: bool = True) -> Coroutine[Any, Any, None]:
        """Put a checkpoint in place."""
        event = self._event("load", source=source, optimizer=optimizer)
        body = {"model_id": self.id, "seq_id": event.number, "path": path, "optimizer": optimizer}
        return self._submit(event, "/load_weights", body)

    async def lose_number(self) -> None:
        """Use a number whose request comes late, or never."""
        event = self._event("step")
        self.history.lost.add(event.number)
        await asyncio.sleep(self.draw.choice([0.0, 20.0, 100.0, 150.0]))
        await self._submit(event, "/optim_step", {"model_id": self.id, "seq_id": event.number, "adam_params": {}})

    async def cancel_all(self) -> None:
        """Cancel what waits of the model, as an operator does; what is reported as cancelled is so for ever."""
        life = self.world.life
        if life is None or life.service is None or not life.answering or self._cancelling:
            return  # two at once would count the same operations
        self._cancelling = True
        try:
            found = await run_as(life.process, life.service.cancel_waiting(self.id))
        except (Killed, asyncio.CancelledError):
            if life.process.alive:
                raise
            return
        finally:
            self._cancelling = False
        self.history.cancelled += found.cancelled

    async def unload(self) -> None:
        """End the model."""
        self.gone = True
        answer = await self.client.ask("/unload_model", {"model_id": self.id})
        if answer.status == 200:
            await self.client.result(answer.json()["request_id"])
            answer = await self.client.ask("/optim_step", {"model_id": self.id, "seq_id": self._following})
        demand(answer.status == 410, f"{self.id} was unloaded, and answers {answer}")

    async def conflict(self) -> None:
        """Use a number for something else than before."""
        if over := self._steps():
            event = self.draw.choice(over)
            body = pass_body(self.id, event.number, self.rows(1))
            answer = await self.client.ask("/forward_backward", body)
            demand(answer.status == 409, f"{self.id} number {event.number} was taken twice: {answer}")

    async def repeat(self) -> None:
        """Send something again that was sent before."""
        if over := self._steps():
            event = self.draw.choice(over)
            body = {"model_id": self.id, "seq_id": event.number, "adam_params": {}}
            made = await self.client.post("/optim_step", body)
            demand(made["request_id"] == event.request, f"{self.id} number {event.number} has two futures")

    def _steps(self) -> list[Event]:
        """Return ordinary steps that were accepted, and did not come too late."""
        return [
            event for event in self.history.events.values()
            if event.kind == "step" and event.request and not event.excuses and event.number not in self.history.lost
            and "did not arrive" not in (event.error or "")
        ]  # fmt: skip

    async def _submit(self, event: Event, path: str, body: Any) -> None:
        async with self._gate:
            made = await self.client.post(path, body)
            demand(event.request in ("", made["request_id"]), f"{self.id} number {event.number} has two futures")
            event.request = made["request_id"]
            if event.kind in ("train", "step", "read") and self.draw.random() < 0.03:
                await self.client.post("/cancel_future", {"request_id": event.request})
            self.take(event, await self.client.result(event.request))

    def take(self, event: Event, answer: Answer) -> None:
        """Note how an operation ended."""
        if answer.is_message:
            event.ending = "done"
            if event.kind == "read":
                event.seen = as_metrics(metrics_of(answer.body))
            return
        found = answer.json()
        if "error" not in found:
            event.ending = "done"
            if event.kind == "step":
                event.norm = found["metrics"]["grad_norm"]
            return
        event.error = found["error"]
        event.ending = "cancelled" if event.error == CANCELLED else "failed"


async def chat(client: Client, history: History, last: Callable[[], int]) -> None:
    """Ask for tokens of the present weights of a model; an answer that ends early is none.

    Args:
        client: who asks.
        history: of the model.
        last: returns the number of the last operation that was asked for.
    """
    first, most = history.over(), client.draw.choice([1, 3, 40])
    body = {"model": history.model, "tokens": [7, 8], "max_tokens": most, "count": client.draw.choice([1, 2])}
    try:
        async with asyncio.timeout(2 * PATIENCE):
            answer = await client.ask(CHAT, body)
    except TimeoutError as error:
        raise Violation(f"a stream of {history.model} does not end") from error
    found = answer.json()
    if answer.status != 200:
        words = (*client.world.excuses, *history.excuses)
        demand(any(word in str(found) for word in words), f"a stream failed: {answer.status} {found}")
        return
    demand(found["sampled"] == sum(len(sample["tokens"]) for sample in found["samples"]), f"tokens are missing {found}")
    history.chats.append(Chat(first, last(), most, found["samples"]))


Program = Callable[[Trainer], Awaitable[None]]
WORDS = (
    ("train", 30), ("big", 3), ("step", 25), ("read", 12), ("save", 3), ("sample", 2), ("freeze", 1), ("inflight", 2),
    ("load", 3), ("chat", 4), ("bad step", 2), ("bad row", 3), ("conflict", 2), ("repeat", 3), ("lose", 1), ("wait", 4),
    ("cancel all", 2),
)  # fmt: skip


async def follow(trainer: Trainer, count: int) -> None:
    """Do so many random things with a model, several at once."""
    draw = trainer.draw
    words = draw.choices([word for word, _ in WORDS], [weight for _, weight in WORDS], k=count)
    async with asyncio.TaskGroup() as tasks:
        for word in words:
            if word == "wait":
                await asyncio.sleep(draw.choice([0.1, 1.0, 10.0]))
            elif word == "inflight":
                await trainer.freeze("inflight")
            elif (work := _work(trainer, word)) is not None:
                tasks.create_task(work)
                await asyncio.sleep(draw.random() * 0.02)
    await trainer.read()


def _work(trainer: Trainer, word: str) -> Coroutine[Any, Any, None] | None:
    draw = trainer.draw
    if word == "load":
        return trainer.load(*draw.choice(trainer.saved), draw.random() < 0.5) if trainer.saved else None
    simple: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
        "train": lambda: trainer.train(draw.choice([1, 1, 2, 5])),
        "big": lambda: trainer.train(draw.choice([3, 12]), size=40),
        "step": trainer.step,
        "read": trainer.read,
        "save": trainer.save,
        "sample": trainer.save_sampler,
        "freeze": lambda: trainer.freeze("snapshot"),
        "chat": trainer.chat,
        "bad step": lambda: trainer.step(beta1=2.0),
        "bad row": lambda: trainer.train(1, bad=draw.choice([ERROR, ERROR, BREAK, DIE, FATAL, HANG])),
        "conflict": trainer.conflict,
        "repeat": trainer.repeat,
        "lose": trainer.lose_number,
        "cancel all": trainer.cancel_all,
    }
    return simple[word]()


def final_state(trainer: Trainer) -> State:
    """Return what a model must be in the end."""
    return trainer.history.after(max(trainer.history.events))


__all__: Sequence[str] = ("Client", "Trainer", "final_state", "follow")
