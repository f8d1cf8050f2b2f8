"""How long a step of sampling waits for training in an engine with torch: for a pass of `--pass-tokens`."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from server_pool import Bench, datum, request

from twinkle_server.engine import messages
from twinkle_server.engine.host import Host
from twinkle_server.engine.messages import Message
from twinkle_server.engine.scheduler import STEPS
from twinkle_server.operations import Create, OptimStep, Sample, Save
from twinkle_server.settings import Settings

LENGTH = 60
PASS_TOKENS = 2 * LENGTH
PROMISED = 0.02
"""Seconds, in which this model goes through more than `PASS_TOKENS` wherever tests run."""
SHORT = 0.005
"""Between two steps without training between them, or as good as none."""


class Inside:
    """An engine in this process, and when its steps of sampling began and ended."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        settings = Settings(model="tiny", data=bench.data, max_pass_seconds=PROMISED)
        self.host = Host(bench.executor, self, settings)  # type: ignore[arg-type]
        self.over: dict[int, Message] = {}
        self.on_begin: dict[int, Callable[[], object]] = {}
        self.steps: list[tuple[float, float]] = []
        self.turns: list[set[int]] = []
        self._ids = count(1)
        decode = bench.executor.decode

        def timed() -> Any:
            begin = time.perf_counter()
            over = decode()
            self.steps.append((begin, time.perf_counter()))
            return over

        monkeypatch.setattr(bench.executor, "decode", timed)

    def send(self, message: Message) -> None:
        """Hear what the engine tells the service."""
        if message.type == messages.DONE:
            self.over[message.head["id"]] = message
        if message.type == messages.BEGIN:
            self.turns.append(set(message.head["ids"]))
        for operation in message.head["ids"] if message.type == messages.BEGIN else ():
            self.on_begin.pop(operation, lambda: None)()

    def ask(self, queue_id: str, number: int, kind: str, payload: bytes, tokens: int = 1, tenant: str = "t") -> int:
        """Send an operation and return its id."""
        head = {
            "id": next(self._ids),
            "queue_id": queue_id,
            "number": number,
            "kind": kind,
            "tenant": tenant,
            "tokens": tokens,
        }
        self.host._inbox.put(Message(messages.RUN, head, payload))
        return int(head["id"])

    def create(self, queue_id: str) -> int:
        return self.ask(queue_id, 0, "create", Create(4, 1).dump(), tenant=queue_id)

    def train(self, queue_id: str, number: int, rows: int) -> int:
        payload = request([datum(LENGTH, at) for at in range(rows)])
        return self.ask(queue_id, number, "forward_backward", payload, rows * LENGTH, tenant=queue_id)

    def sample(self, tokens: int) -> int:
        return self.ask("s", 0, "sample", Sample([5] * 8, max_tokens=tokens, stop=[], seed=1).dump(), tenant="s")

    def work(self, *operations: int) -> float:
        """Let the engine work until operations are over, and return the seconds."""
        begin, end = time.perf_counter(), time.monotonic() + 120
        while missing := set(operations) - set(self.over):
            assert time.monotonic() < end, f"{missing} are not over"
            self.host.turn()
        for operation in operations:
            assert self.over[operation].head["error"] is None, self.over[operation].head
        return time.perf_counter() - begin

    def waits(self, since: float) -> list[float]:
        """Return the seconds until the first step, and between each and the next."""
        steps = [(since, since), *(step for step in self.steps if step[0] > since)]
        return [after[0] - before[1] for before, after in pairwise(steps)]


@pytest.fixture
def inside(fresh: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> Iterator[Inside]:
    """Seconds are those that this process computes: what others do on the machine is not the engine's fault."""
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    made = Inside(fresh(extra={"pass_tokens": PASS_TOKENS}), monkeypatch)
    gc.collect()
    gc.freeze()  # as in the engine's own process, where a test's objects are not
    yield made
    gc.unfreeze()


@pytest.mark.full
def test_a_request_that_comes_in_the_middle_of_a_long_operation_waits_for_a_piece_of_it(inside: Inside) -> None:
    inside.work(inside.create("m"), inside.train("m", 1, 8))  # how fast it is is known
    whole = inside.work(inside.train("m", 2, 200))
    long, came = inside.train("m", 3, 200), []
    inside.on_begin[long] = lambda: came.extend([inside.sample(400), time.perf_counter()])
    inside.work(long)
    sample, since = came
    within = [wait for wait in inside.waits(since) if wait > SHORT]
    assert len(within) >= 4, "they took turns"
    assert max(within) < max(5 * PROMISED, whole / 2), (within, whole)
    inside.work(sample)


@pytest.mark.full
def test_a_request_has_its_turn_among_the_steps_and_checkpoints_of_many_tenants(inside: Inside) -> None:
    queues = [f"m{at}" for at in range(24)]
    inside.work(*[inside.create(queue_id) for queue_id in queues])
    passes = [inside.train(queue_id, 1, 1) for queue_id in queues]
    steps = [inside.ask(queue_id, 2, "optim_step", OptimStep().dump(), tenant=queue_id) for queue_id in queues]
    last = [
        *steps,
        *(
            inside.ask(queue_id, 3, "save", Save(f"c/{queue_id}", "weights").dump(), tenant=queue_id)
            for queue_id in queues
        ),
    ]
    inside.on_begin[passes[0]] = lambda: inside.sample(400)
    begun: list[int] = []
    for operation in last:
        inside.on_begin[operation] = lambda: begun.append(len(inside.steps))
    inside.work(*passes, *last)
    assert len(set(begun)) >= 3, "steps of sampling came between them"
    assert max(len(turn.intersection(steps)) for turn in inside.turns) <= STEPS < len(queues)


def test_a_checkpoint_is_written_while_others_are_served(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying it takes a moment; writing it takes long, and is no part of any turn."""
    from twinkle_transformers.pool.snapshots import AdapterSnapshot

    write, writers = AdapterSnapshot.write, set()

    def slow(state: AdapterSnapshot, folder: Path) -> None:
        writers.add(threading.current_thread())
        time.sleep(1.0)
        write(state, folder)

    monkeypatch.setattr(AdapterSnapshot, "write", slow)
    queues = [f"m{at}" for at in range(5)]
    inside.work(*[inside.create(queue_id) for queue_id in queues])
    saves = [
        inside.ask(queue_id, 1, "save", Save(f"c/{queue_id}", "weights").dump(), tenant=queue_id) for queue_id in queues
    ]
    passes = [inside.train(queue_id, 2, 1) for queue_id in queues]
    other = inside.create("other")
    inside.work(other, inside.train("other", 1, 1))
    assert not inside.over.keys() & {*saves, *passes}, "a queue waits for its own checkpoint, and for no other's"
    inside.work(*saves, *passes)
    assert threading.current_thread() not in writers
    sizes = [inside.over[save].head["extra"]["size_bytes"] for save in saves]
    assert sizes == [sum(p.stat().st_size for p in folder_of(inside, queue_id)) for queue_id in queues]


def folder_of(inside: Inside, queue_id: str) -> list[Path]:
    folder = inside.host._runner._sources.place(f"c/{queue_id}")
    return [path for path in folder.iterdir() if path.name != "manifest.json"]


@pytest.mark.soak
def test_steps_of_sampling_wait_as_long_as_was_promised_at_most(inside: Inside) -> None:
    """Among passes of all sizes."""
    inside.work(inside.create("m"), inside.train("m", 1, 8))
    number, waits = 2, []
    for rows in (1, 10, 50, 100) * 3:
        ours = [inside.train("m", number + at, rows) for at in range(4)]
        number += len(ours)
        came: list[float] = []
        inside.on_begin[ours[0]] = lambda came=came: came.extend([inside.sample(400), time.perf_counter()])
        inside.work(*ours)
        inside.work(int(came[0]))
        waits += [wait for wait in inside.waits(came[1]) if wait > SHORT]
    waits.sort()
    assert len(waits) >= 40
    assert waits[int(0.95 * len(waits))] <= 2 * PROMISED, waits
    assert waits[int(0.99 * len(waits))] <= 5 * PROMISED, waits
