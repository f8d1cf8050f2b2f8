"""Numbers are functions of the operations: neither load, nor arrival, nor sampling, nor a death changes a bit of them.

The processor of these tests rounds each product by its number of rows, so that another composition of passes is seen.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import pytest
from rounding import rounds_by_rows  # noqa: F401 - a fixture
from server_pool import Bench, answer, datum, request

from twinkle_server.engine import messages
from twinkle_server.engine.host import Host
from twinkle_server.engine.messages import Message
from twinkle_server.operations import Create, OptimStep, Sample
from twinkle_server.settings import Settings

pytestmark = pytest.mark.usefixtures("rounds_by_rows")
STEPS = 25
RATE = 1e-2
LENGTHS = (20, 7, 33, 12, 60, 9)
CUT, WHOLE = 40, 512
"""Tokens of a pass that cuts operations, and of one that holds those of several models."""


@dataclass
class Process:
    """An engine in this process, with what the service would remember of it.

    Attributes:
        log: of each model its operations, in order: kind, payload, and the composition once it is known.
        results: of each operation, by model and number.
    """

    bench: Bench
    log: dict[str, list[tuple[str, bytes]]] = field(default_factory=dict)
    compositions: dict[tuple[str, int], str] = field(default_factory=dict)
    results: dict[tuple[str, int], bytes] = field(default_factory=dict)
    snapshots: dict[str, dict[str, Any]] = field(default_factory=dict)
    _open: dict[int, tuple[str, int]] = field(default_factory=dict)
    _ids: Any = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        settings = Settings(model="tiny", data=self.bench.data, max_pass_seconds=0.001)
        self.host = Host(self.bench.executor, self, settings)  # type: ignore[arg-type]

    def send(self, message: Message) -> None:
        """Hear what the engine tells the service."""
        if message.type == messages.SNAPSHOTTED:
            self.snapshots[message.head["queue_id"]] = message.head
        if message.type != messages.DONE or message.head["id"] not in self._open:
            return
        assert message.head["error"] is None, message.head
        key = self._open.pop(message.head["id"])
        self.results[key] = message.body
        if text := message.head.get("composition"):
            self.compositions[key] = text

    def ask(self, queue_id: str, kind: str, payload: bytes) -> None:
        """Send a new operation."""
        operations = self.log.setdefault(queue_id, [])
        operations.append((kind, payload))
        self._run(queue_id, len(operations) - 1, kind, payload)

    def again(self, queue_id: str, number: int, kind: str, payload: bytes, composition: str | None) -> None:
        """Send an operation of which only the effect is wanted."""
        more = {} if composition is None else {"composition": composition}
        self._run(queue_id, number, kind, payload, replay=True, **more)

    def _run(self, queue_id: str, number: int, kind: str, payload: bytes, **more: Any) -> None:
        tokens = 1 if kind != "forward_backward" else 90
        head = {
            "id": next(self._ids),
            "queue_id": queue_id,
            "number": number,
            "kind": kind,
            "tenant": queue_id,
            "tokens": tokens,
        }
        self._open[head["id"]] = queue_id, number
        self.host._inbox.put(Message(messages.RUN, head | more, payload))

    def sample(self, tokens: int) -> None:
        head = {"id": next(self._ids), "queue_id": "s", "number": 0, "kind": "sample", "tenant": "s", "tokens": tokens}
        payload = Sample([5] * 8, max_tokens=tokens, stop=[], seed=1).dump()
        self.host._inbox.put(Message(messages.RUN, head, payload))

    def work(self) -> None:
        """Work until nothing is left of what trains."""
        end = time.monotonic() + 120
        while self._open:
            assert time.monotonic() < end, f"{self._open} are not over"
            self.host.turn()

    def numbers(self, queue_id: str) -> list[Any]:
        """Return what each pass and step of a model answered."""
        found: list[Any] = []
        for number, (kind, _) in enumerate(self.log[queue_id]):
            body = self.results[queue_id, number]
            if kind == "forward_backward":
                logps, metrics = answer(body)
                found += [metrics, *logps]
            else:
                found.append(body)
        return found

    def weights(self, queue_id: str) -> list[Any]:
        return [value.numpy() for value in self.bench.weights(queue_id).values()]


@pytest.fixture
def process(fresh: Callable[..., Bench]) -> Callable[[int], Process]:
    return lambda pass_tokens: Process(fresh(extra={"pass_tokens": pass_tokens}))


def step_of(queue_id: str, step: int) -> list[tuple[str, bytes]]:
    """Return the operations of a step of one model: two passes of rows of mixed lengths, and an update."""
    seed = 100 * step + sum(map(ord, queue_id))
    passes = [[datum(LENGTHS[(row + step + half) % 6], seed + row + 50 * half) for row in range(3)] for half in (0, 1)]
    update = OptimStep(learning_rate=RATE, grad_clip_norm=1.0).dump()
    return [*(("forward_backward", request(rows)) for rows in passes), ("optim_step", update)]


def life(made: Process, queue_id: str, *, at_once: bool) -> Process:
    """Let one model learn alone: all that it asks for is there at once, or each comes when the one before is over."""
    made.ask(queue_id, "create", Create(4, 1).dump())
    for step in range(STEPS):
        for kind, payload in step_of(queue_id, step):
            made.ask(queue_id, kind, payload)
            if not at_once:
                made.work()
    made.work()
    return made


def equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two lists have the same bits."""
    return len(one) == len(other) and all(
        np.array_equal(a, b, equal_nan=True) if isinstance(a, np.ndarray) else a == b
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.full
def test_twenty_five_steps_of_a_model_alone_are_equal_to_the_bit_on_a_quiet_and_a_busy_machine(
    process: Callable[[int], Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Busy: passes take long, now more and now less; operations come one by one; others sample between the pieces."""
    quiet = life(process(CUT), "m", at_once=True)
    busy = process(CUT)
    passes, at = busy.bench.pool.passes, count()
    forward = passes.forward
    monkeypatch.setattr(passes, "forward", lambda *given: (time.sleep(0.02 * (next(at) % 3)), forward(*given))[1])
    busy.sample(60)
    life(busy, "m", at_once=False)
    assert equal(quiet.numbers("m"), busy.numbers("m"))
    assert equal(quiet.weights("m"), busy.weights("m"))


def several(made: Process, queues: str) -> Process:
    """Let models of several ranks learn in passes that they share."""
    for at, queue_id in enumerate(queues):
        made.ask(queue_id, "create", Create((4, 8, 4)[at], at).dump())
    made.work()
    for step in range(4):
        for queue_id in queues[step % 2 :]:  # not always the same are there
            for kind, payload in step_of(queue_id, step):
                made.ask(queue_id, kind, payload)
        made.work()
        if step == 1:
            made.host._inbox.put(Message(messages.SNAPSHOT, {"queue_id": queues[1]}))
            while queues[1] not in made.snapshots:
                made.host.turn()
    return made


def remade(made: Process, old: Process, queues: str) -> Process:
    """Make models again in a new engine: their snapshots, and what came after them."""
    for queue_id in queues:
        snapshot = old.snapshots.get(queue_id, {"number": -1, "folder": None})
        made.host._inbox.put(Message(messages.RESTORE, {"queue_id": queue_id, "folder": snapshot["folder"]}))
        for number, (kind, payload) in enumerate(old.log[queue_id]):
            if number > snapshot["number"]:
                made.again(queue_id, number, kind, payload, old.compositions.get((queue_id, number)))
    made.work()
    return made


@pytest.mark.full
@pytest.mark.parametrize("queues", ["a", "abc"])
def test_models_that_are_made_again_are_equal_to_the_bit(process: Callable[[int], Process], queues: str) -> None:
    """One of them has a snapshot that is newer than passes which it shared with the others."""
    old = several(process(WHOLE), "abc")
    assert old.snapshots
    new = remade(process(WHOLE), old, queues)
    for queue_id in queues:
        assert equal(old.weights(queue_id), new.weights(queue_id))
        last = request([datum(40, 9)], forward=True)
        for each in (old, new):
            each.ask(queue_id, "forward", last)
            each.work()
        number = len(old.log[queue_id]) - 1
        assert equal(answer(old.results[queue_id, number])[0], answer(new.results[queue_id, 0])[0])


@pytest.mark.full
def test_composed_anew_models_that_shared_passes_differ_in_the_last_places(process: Callable[[int], Process]) -> None:
    """What the log's record is for; an operation of before there was one is done again like this."""
    old = several(process(WHOLE), "abc")
    old.compositions.clear()
    new = remade(process(WHOLE), old, "a")
    assert not equal(old.weights("a"), new.weights("a"))
    far = max(float(np.abs(a - b).max()) for a, b in zip(old.weights("a"), new.weights("a"), strict=True))
    assert far < 0.2, "AdamW moves a number by the rate at most, up or down, whatever the rounding: 2 x 1e-2 a step"


def test_an_update_is_the_same_to_the_bit_whoever_steps_with_it(fresh: Callable[..., Bench]) -> None:
    found = []
    for others in ("", "bcd"):
        bench = fresh()
        for at, queue_id in enumerate("a" + others):
            bench.create(queue_id, rank=(4, 4, 8, 4)[at], seed=at)
        for step in range(4):
            for queue_id in "a" + others:
                bench.run(queue_id, [datum(20, step)])
            update = OptimStep(learning_rate=RATE, grad_clip_norm=0.5 * (step % 2))
            bench.executor.step([(queue_id, update) for queue_id in others + "a"])
        found.append([value.numpy() for value in bench.weights("a").values()])
    assert equal(*found)


@pytest.mark.full
def test_a_record_costs_little(process: Callable[[int], Process]) -> None:
    """A model alone: a few dozen bytes an operation; a pass of three: some hundred."""
    alone = process(CUT)
    alone.ask("m", "create", Create(4, 1).dump())
    for kind, payload in step_of("m", 0):
        alone.ask("m", kind, payload)
    alone.work()
    assert max(map(len, alone.compositions.values())) < 300
    assert max(map(len, several(process(WHOLE), "abc").compositions.values())) < 2000
