"""The engine is killed at any moment; a model made from its newest snapshot and the log is what it was to become."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from server_engine import Engine, engine

from twinkle_server.engine import messages

QUEUES = ("a", "b", "c")
STEP, BACKWARD = "optim_step", "forward_backward"


@dataclass
class Log:
    """A queue's operations by number (0 is its creation), which of them are over, and its newest snapshot."""

    operations: list[tuple[str, int]] = field(default_factory=lambda: [("create", 0)])
    over: set[int] = field(default_factory=set)
    snapshot: tuple[int, str | None] = (-1, None)

    def expected(self) -> tuple[list[int], list[int]]:
        applied: list[int] = []
        pending: list[int] = []
        for kind, token in self.operations:
            if kind == STEP:
                applied, pending = applied + pending, []
            elif kind == BACKWARD:
                pending = [*pending, token]
        return applied, pending


def send(made: Engine, queue_id: str, number: int, kind: str, token: int, replay: bool) -> int:
    if kind == "create":
        return made.create(queue_id, replay=replay, tenant=queue_id)
    if kind == STEP:
        return made.step(queue_id, number, replay=replay, tenant=queue_id)
    return made.backward(queue_id, number, token, replay=replay, tenant=queue_id)


def live(data: Path, logs: dict[str, Log], draw: random.Random, kill: bool) -> None:
    """One life of an engine: it is brought to where the last one was, given more, and killed or asked."""
    with engine(data, snapshot_steps=draw.choice([1, 2, 5]), snapshot=0.05, extra={"seconds_per_token": 1e-4}) as made:
        sent: dict[int, tuple[str, int]] = {}
        for queue_id, log in logs.items():
            if kill:
                log.operations += [(draw.choice([BACKWARD, BACKWARD, STEP]), draw.randrange(2**30)) for _ in range(20)]
            made.send(messages.RESTORE, queue_id=queue_id, folder=log.snapshot[1])
            for number in range(log.snapshot[0] + 1, len(log.operations)):
                operation = send(made, queue_id, number, *log.operations[number], replay=number in log.over)
                sent[operation] = queue_id, number
        if kill:
            ends_at = draw.randrange(1, len(sent))
            with pytest.raises(AssertionError, match="ended"):  # noqa: PT012 - what is heard until then counts
                for count in range(10_000):
                    if count == ends_at:
                        made.process.kill()
                    hear(made, logs, sent)
        else:
            made.done(*sent)
            for queue_id, log in logs.items():
                assert made.ledger(queue_id, len(log.operations)) == log.expected()


def hear(made: Engine, logs: dict[str, Log], sent: dict[int, tuple[str, int]]) -> None:
    message = made.until(lambda _: True)
    if message.type == messages.DONE:
        assert message.head["error"] is None
        queue_id, number = sent[message.head["id"]]
        assert set(range(number)) <= logs[queue_id].over, "in order"
        logs[queue_id].over.add(number)
    elif message.type == messages.SNAPSHOTTED:
        queue_id, number = message.head["queue_id"], message.head["number"]
        assert set(range(number + 1)) <= logs[queue_id].over, "a snapshot holds nothing that was not told"
        logs[queue_id].snapshot = number, message.head["folder"]


def history(data: Path, seed: int, lives: int) -> None:
    draw = random.Random(seed)
    logs = {queue_id: Log() for queue_id in QUEUES}
    for _ in range(lives):
        live(data, logs, draw, kill=True)
    live(data, logs, draw, kill=False)


@pytest.mark.parametrize("seed", range(1))
def test_every_operation_counts_once_however_often_the_engine_is_killed(tmp_path: Path, seed: int) -> None:
    history(tmp_path, seed, lives=4)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_every_operation_counts_once_in_long_histories(tmp_path: Path, seed: int) -> None:
    history(tmp_path, seed, lives=15)
