"""What is over goes, what may still be wanted stays, and the database file does not grow for ever."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import Connection, text

from twinkle_server.errors import Gone, NotFound
from twinkle_server.ids import CheckpointPath
from twinkle_server.operations import Create, Operation, Outcome, Sample, Save, Snapshot, Submission
from twinkle_server.settings import Limits
from twinkle_server.store import Store, folders, retention, samplers
from twinkle_server.store.records import Checkpoint, Model, Sampler, Session

Run = Callable[[Awaitable[Any]], Any]
START = 1_000_000.0
DAY = 86_400.0
QUEUE = "ada-s:train:0"


@pytest.fixture
def model(run: Run, store: Store, a_model: Callable[[], Awaitable[tuple[Model, Operation]]]) -> Model:
    made, operation = run(a_model())
    run(store.journal.finish([Outcome(operation.id, b"{}")]))
    run(store.models.set_status("ada", made.id, "live", START))
    return made


async def done(store: Store, number: int, payload: bytes = b"payload", result: bytes = b"result", **more: Any) -> str:
    submission = Submission(
        **{"tenant": "ada", "queue_id": QUEUE, "kind": "optim_step", **more, "payload": payload, "number": number}
    )
    accepted, operation = await store.journal.submit(submission)
    await store.journal.finish([Outcome(operation.id, result)])
    return accepted.request


def at(store: Store, time: float) -> None:
    """Let everything that is over have ended at a time."""
    change = text("UPDATE operations SET finished = :time WHERE finished IS NOT NULL")
    store.database.write_now(lambda connection: connection.execute(change, {"time": time}).rowcount)


@pytest.mark.parametrize("size", [10, 200_000])
def test_a_result_that_nobody_read_is_kept_a_day(store: Store, run: Run, model: Model, size: int) -> None:
    request = run(done(store, 1, result=b"r" * size))
    at(store, START)
    assert run(store.retention.purge(START + DAY - 1)).results == 0
    assert run(store.retention.purge(START + DAY + 1)).results == 2  # the model's creation, too
    assert list((store.data / "results").iterdir()) == []
    with pytest.raises(Gone, match="has expired"):
        run(store.journal.future(request, "ada"))


def test_a_result_that_was_read_is_kept_ten_minutes(store: Store, run: Run, model: Model) -> None:
    read, unread = run(done(store, 1)), run(done(store, 2))
    run(store.journal.future(read, "ada"))
    now = max(store.journal.reads.values())
    assert run(store.retention.purge(now + 599)).results == 0
    assert run(store.journal.future(read, "ada")).result == b"result"
    assert run(store.retention.purge(now + 601)).results == 1
    with pytest.raises(Gone):
        run(store.journal.future(read, "ada"))
    assert run(store.journal.future(unread, "ada")).result == b"result"


def test_a_pending_operation_is_kept_for_ever(store: Store, run: Run, model: Model) -> None:
    accepted, operation = run(store.journal.submit(Submission("ada", QUEUE, "optim_step", b"{}", 1)))
    run(store.retention.purge(START * 10_000))
    assert run(store.journal.future(accepted.request, "ada")).status == "pending"
    assert run(store.journal.payload(operation.id)) == b"{}"


def test_rows_go_after_a_week_when_no_replay_can_want_them(store: Store, run: Run, model: Model) -> None:
    requests = [run(done(store, number)) for number in range(1, 5)]
    sampled = run(done(store, 0, kind="sample", queue_id="ada-s:sample:0"))
    run(store.journal.snapshotted(Snapshot(QUEUE, 2, "snapshots/a", "d", 1)))
    at(store, START)
    gone = run(store.retention.purge(START + 7 * DAY + 1))
    assert gone.operations == 4  # 0 to 2 of the model, and the sample
    assert [each.number for each in run(store.journal.after(QUEUE, -1))] == [3, 4]
    for request in (requests[0], sampled):
        with pytest.raises(Gone):
            run(store.journal.future(request, "ada"))
        with pytest.raises(NotFound):
            run(store.journal.future(request, "eve"))
    with pytest.raises(Gone, match=r"number 1 .* has expired"):
        run(done(store, 1))


def test_rows_of_checkpoints_and_samplers_go_a_week_after_their_end(store: Store, run: Run, model: Model) -> None:
    for name in ("kept", "deleted"):
        run(store.checkpoints.create(Checkpoint("ada", QUEUE, "weights", name, name, 1, "d", "base", 8, START)))
    run(store.checkpoints.delete("ada", CheckpointPath(QUEUE, "weights", "deleted"), START))
    run(store.samplers.create(Sampler("ada-s:sample:0", "ada", "ada-s", 0, "base", START)))
    run(store.sessions.end("ada", "ada-s", "finished", START))
    run(store.sessions.create(Session("ada-t", "ada", START, START)))
    run(store.samplers.create(Sampler("ada-t:sample:1", "ada", "ada-t", 1, "base", START)))
    early, late = (run(store.retention.purge(START + 7 * DAY + more)) for more in (-1, 1))
    assert (early.checkpoints, early.samplers, late.checkpoints, late.samplers) == (0, 0, 0, 1)
    run(folders.forget(store.database, {"deleted"}))
    assert run(store.retention.purge(START + 7 * DAY + 1)).checkpoints == 1, "its folder is gone, so its row goes"
    assert [each.name for each in run(store.checkpoints.page("ada", START)).rows] == ["kept"]
    assert [run(store.samplers.of_session("ada", session)) == [] for session in ("ada-s", "ada-t")] == [True, False]


def test_payloads_of_a_model_that_is_gone_go(store: Store, run: Run, model: Model) -> None:
    for number in (1, 2):
        run(done(store, number, payload=b"p" * (200_000 if number == 1 else 10)))
    assert run(store.retention.purge(START)).payloads == 0
    run(store.models.set_status("ada", QUEUE, "gone", START))
    assert run(store.retention.purge(START)).payloads == 3
    assert list((store.data / "payloads").iterdir()) == []


def test_files_of_many_rows_are_known_and_read_in_pieces(
    store: Store, run: Run, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (run(store.retention.payload_files()), run(store.retention.result_files())) == (set(), set())
    for number in range(1, 8):
        large = number % 2 == 0
        run(done(store, number, payload=b"p" * (Limits().small_bytes + 1 if large else 10)))
    monkeypatch.setattr(retention, "_PIECE", 3)
    reads, read = [], store.database.read

    async def counted(work: Any) -> Any:
        reads.append(work)
        return await read(work)

    monkeypatch.setattr(store.database, "read", counted)
    assert run(store.retention.payload_files()) == {path.name for path in (store.data / "payloads").iterdir()}
    assert len(reads) >= 3
    assert len({path.name for path in (store.data / "payloads").iterdir()}) == 3


def test_every_folder_that_something_needs_is_known(store: Store, run: Run, model: Model) -> None:
    def path(name: str) -> str:
        return f"checkpoints/{name}"

    for name, more in (("live", {}), ("deleted", {}), ("published", {"public": True})):
        made = Checkpoint("ada", QUEUE, "weights", name, path(name), 1, "d", "base", 8, START, **more)
        run(store.checkpoints.create(made))
    run(store.checkpoints.delete("ada", CheckpointPath(QUEUE, "weights", "deleted"), START))
    open_one = Sampler("ada-s:sample:0", "ada", "ada-s", 0, "base", START, folder=path("sampler"))
    run(store.database.write(lambda connection: samplers.add(connection, open_one)))
    run(store.journal.snapshotted(Snapshot(QUEUE, 0, "snapshots/a", "d", 1)))
    source = Create(rank=8, seed=1, source=path("source")).dump()
    run(done(store, 0, payload=source, kind="create", queue_id="ada-s:train:1"))
    save = Save(path("saving"), "weights").dump()
    run(store.journal.submit(Submission("ada", QUEUE, "save", save, 1)))
    run(done(store, 2, payload=Save(path("saved"), "weights").dump(), kind="save"))
    sample = Sample([1], source=path("sampling")).dump()
    run(store.journal.submit(Submission("ada", "ada-s:sample:0", "sample", sample, 0)))
    run(done(store, 1, payload=Sample([1], source=path("sampled")).dump(), kind="sample", queue_id="ada-s:sample:0"))
    expected = {path(name) for name in ("live", "published", "sampler", "source", "saving", "sampling")}
    assert run(store.retention.referenced()) == expected | {"snapshots/a"}
    run(store.sessions.end("ada", "ada-s", "finished", START))
    assert run(store.retention.referenced()) == (expected | {"snapshots/a"}) - {path("sampler")}


@pytest.mark.full
@pytest.mark.parametrize("operations", [5_000, pytest.param(50_000, marks=pytest.mark.soak)])
def test_the_database_stays_bounded(
    store: Store, run: Run, model: Model, monkeypatch: pytest.MonkeyPatch, operations: int
) -> None:
    queues, payload = 50, b"p" * 2000

    async def some(first: int, count: int) -> None:
        async def queue_id(index: int) -> None:
            for number in range(first, first + count):
                await done(store, number, payload, payload, kind="sample", queue_id=f"queue{index}")

        await asyncio.gather(*(queue_id(index) for index in range(queues)))

    def size(connection: Connection) -> int:
        return int(connection.exec_driver_sql("PRAGMA page_count").scalar_one()) * 4096

    sizes = []
    per_round = operations // queues // 5
    for round_ in range(5):
        run(some(round_ * per_round, per_round))
        at(store, START)
        purged = run(store.retention.purge(START + 8 * DAY))
        sizes.append(store.database.write_now(size))
        assert purged.operations >= queues * per_round
    assert max(sizes) <= sizes[0] + 256 * 1024  # what is free is used again
    assert max(sizes) < 20 * 2**20
    assert (store.data / "twinkle.db-wal").stat().st_size <= 64 * 2**20
    monkeypatch.setattr(retention, "_SPARE", 0)
    assert run(store.retention.purge(START + 8 * DAY)).pages > 0
    assert store.database.write_now(size) < 2**20
