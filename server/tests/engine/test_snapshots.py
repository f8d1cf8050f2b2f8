"""Which model is copied when, and what becomes of a copy that the disk does not take."""

import queue
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_engine import Ledger, LedgerEngine

from twinkle_server.engine import messages
from twinkle_server.engine.executor import Executor
from twinkle_server.engine.messages import Message
from twinkle_server.engine.queues import Task
from twinkle_server.engine.snapshots import Snapshots
from twinkle_server.operations import Create


class Bench:
    """Snapshots over a ledger, whose thread's words are heard when the test says so."""

    def __init__(self, data: Path, steps: int = 2, seconds: float = 3600.0) -> None:
        self.executor = Executor(LedgerEngine("base"), "base")
        self.said: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.told: list[Message] = []
        self.left: list[str] = []
        self.snapshots = Snapshots(
            self.executor, data, self.said.put, self.told.append, self.left.append, steps, seconds
        )
        self.numbers: dict[str, int] = {}

    def create(self, queue_id: str) -> None:
        self.executor.create(queue_id, Create(8, 0), None)
        self.snapshots.register(queue_id, 0)
        self.apply(queue_id, "create")

    def apply(self, queue_id: str, kind: str = "optim_step") -> None:
        number = self.numbers[queue_id] = self.numbers.get(queue_id, -1) + 1
        self.snapshots.applied(Task(number, queue_id, number, kind, "t"))

    def hear(self) -> None:
        """Let one snapshot reach the disk, or fail."""
        self.said.get(timeout=20)()

    @property
    def written(self) -> list[tuple[str, int]]:
        return [(m.head["queue_id"], m.head["number"]) for m in self.told if m.type == messages.SNAPSHOTTED]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_nothing_is_due_before_there_were_enough_steps(bench: Bench) -> None:
    bench.create("m")
    bench.apply("m")
    bench.snapshots.write_due()
    assert bench.said.empty()
    bench.apply("m")
    assert bench.snapshots.next() == 0.0
    bench.snapshots.write_due()
    bench.hear()
    assert bench.written == [("m", 2)]
    bench.snapshots.write_due()
    assert bench.snapshots.next() is None


def test_no_operation_is_to_blame_for_what_copying_a_model_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, told = Bench(tmp_path, steps=1), list[str]()
    bench.snapshots = Snapshots(
        bench.executor,
        tmp_path,
        bench.said.put,
        bench.told.append,
        bench.left.append,
        1,
        3600.0,
        lambda: told.append(""),
    )
    bench.create("m")
    bench.snapshots.write_due()
    assert told == []
    bench.apply("m")
    copy = bench.executor.snapshot
    monkeypatch.setattr(bench.executor, "snapshot", lambda queue_id: (told.append(queue_id), copy(queue_id))[1])
    bench.snapshots.write_due()
    bench.hear()
    assert told == ["", "m"]


def test_the_model_that_waits_longest_is_next_whatever_its_name(bench: Bench) -> None:
    for queue_id in ("c", "b", "a"):
        bench.create(queue_id)
        bench.apply(queue_id)
        bench.apply(queue_id)
    for _ in range(3):
        bench.snapshots.write_due()
        for queue_id in ("a", "b", "c"):  # all of them go on as fast as they can
            bench.apply(queue_id)
            bench.apply(queue_id)
        bench.hear()
    assert [queue_id for queue_id, _ in bench.written] == ["c", "b", "a"]


def test_what_happens_while_a_copy_is_written_is_not_in_it_and_is_due_again(bench: Bench) -> None:
    bench.create("m")
    bench.snapshots.want("m")
    bench.snapshots.write_due()
    bench.apply("m")
    bench.snapshots.write_due()
    bench.hear()
    assert bench.written == [("m", 0)]
    assert bench.snapshots.leave("m")
    bench.snapshots.write_due()
    bench.hear()
    assert bench.written[1:] == [("m", 1)]
    assert bench.left == ["m"]


def test_a_model_leaves_only_after_the_copy_that_is_being_written(bench: Bench) -> None:
    bench.create("m")
    bench.snapshots.want("m")
    bench.snapshots.write_due()
    assert bench.snapshots.leave("m")
    assert not bench.left
    bench.hear()
    assert bench.left == ["m"]
    assert not bench.snapshots.leave("m"), "it is gone already"


def test_forwards_and_saves_alone_make_no_snapshot_due(tmp_path: Path) -> None:
    bench = Bench(tmp_path, seconds=0.0)
    bench.create("m")
    bench.snapshots.write_due()
    bench.hear()
    for kind in ("forward", "save"):
        bench.apply("m", kind)
    bench.snapshots.write_due()
    assert bench.snapshots.next() is None
    bench.apply("m", "forward_backward")
    bench.snapshots.write_due()
    bench.hear()
    assert bench.written == [("m", 0), ("m", 3)]


def test_a_disk_that_takes_nothing_is_asked_again_and_the_number_is_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Ledger, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    bench = Bench(tmp_path, seconds=0.01)
    bench.create("m")
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "write", refuse)
        bench.snapshots.want("m")
        bench.snapshots.write_due()
        bench.hear()
    bench.apply("m")
    assert bench.written == []
    while bench.said.empty():
        bench.snapshots.write_due()
    bench.hear()
    assert bench.written == [("m", 1)]


def test_a_model_that_cannot_be_copied_harms_no_other(bench: Bench) -> None:
    for queue_id in ("broken", "fine"):
        bench.create(queue_id)
        bench.apply(queue_id)
        bench.apply(queue_id)
    bench.executor.remove("broken")
    bench.snapshots.write_due()
    bench.snapshots.write_due()
    bench.hear()
    assert bench.written == [("fine", 2)]
