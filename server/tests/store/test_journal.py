"""The log of operations: nothing twice, nothing lost, in order; that of benchmarks behaves as the durable one."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from twinkle_server import failpoints
from twinkle_server.errors import BadRequest, Gone, NotFound, SequenceConflict, Unavailable
from twinkle_server.operations import Future, Operation, Outcome, Snapshot, Submission
from twinkle_server.settings import Limits
from twinkle_server.store import Store, models
from twinkle_server.store.journal import SqliteJournal
from twinkle_server.store.memory import MemoryJournal
from twinkle_server.store.records import Model

Journal = SqliteJournal | MemoryJournal
Run = Callable[[Awaitable[Any]], Any]
QUEUE = "ada-s:train:0"
LARGE = bytes(range(256)) * (Limits().small_bytes // 256 + 1)
KEY = f"tml-{'k' * 43}"


@pytest.fixture(params=["sqlite", "memory"])
def journal(request: pytest.FixtureRequest, store: Store) -> Journal:
    return store.journal if request.param == "sqlite" else MemoryJournal(store.database, store.secret)


@pytest.fixture
def model(run: Run, store: Store, a_model: Callable[[], Awaitable[tuple[Model, Operation]]]) -> Model:
    return run(a_model())[0]


def step(number: int | None, payload: bytes = b"{}", **more: Any) -> Submission:
    return Submission(
        **{"tenant": "ada", "queue_id": QUEUE, "kind": "optim_step", **more, "payload": payload, "number": number}
    )


def test_an_operation_that_is_accepted_waits_with_its_payload(journal: Journal, run: Run) -> None:
    accepted, operation = run(journal.submit(step(0, b"payload", tokens=7)))
    assert accepted.fresh
    assert (operation.number, operation.kind, operation.tokens, operation.payload) == (0, "optim_step", 7, b"payload")
    assert run(journal.pending()) == [replace(operation, payload=None)]
    assert run(journal.payload(operation.id)) == b"payload"
    assert run(journal.future(accepted.request, "ada")) == Future("optim_step", "pending", QUEUE)


def test_a_repeated_request_finds_the_first_one(journal: Journal, run: Run) -> None:
    first, operation = run(journal.submit(step(3)))
    again, same = run(journal.submit(step(3)))
    assert (again.request, again.fresh, same.id) == (first.request, False, operation.id)
    assert len(run(journal.pending())) == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("other", [step(3, b"else"), step(3, kind="save")])
def test_another_request_under_a_used_number_is_a_conflict_and_is_not_written(
    journal: Journal, run: Run, other: Submission
) -> None:
    first, _ = run(journal.submit(step(3)))
    with pytest.raises(SequenceConflict, match=r"number 3 .* another request"):
        run(journal.submit(other))
    assert [each.request for each in run(journal.pending())] == [first.request]


def test_choices_that_are_made_anew_do_not_make_another_request(journal: Journal, run: Run) -> None:
    first, operation = run(journal.submit(step(0, b"folder-1", kind="save", original=b"save as x")))
    again, _ = run(journal.submit(step(0, b"folder-2", kind="save", original=b"save as x")))
    assert again.request == first.request
    assert run(journal.payload(operation.id)) == b"folder-1"
    with pytest.raises(SequenceConflict):
        run(journal.submit(step(0, b"folder-1", kind="save", original=b"save as y")))


def test_the_same_request_at_the_same_time_is_written_once(journal: Journal, run: Run) -> None:
    async def main() -> list[Any]:
        return await asyncio.gather(*(journal.submit(step(5)) for _ in range(20)))

    answers = run(main())
    assert len({accepted.request for accepted, _ in answers}) == 1
    assert sum(accepted.fresh for accepted, _ in answers) == 1


def test_somebody_elses_queue_is_not_found(journal: Journal, run: Run) -> None:
    run(journal.submit(step(0)))
    with pytest.raises(NotFound):
        run(journal.submit(step(0, tenant="eve")))


def test_a_refused_request_has_failed_and_its_number_is_used(journal: Journal, run: Run) -> None:
    asked = []
    accepted, operation = run(journal.submit(step(0, refusal="rank 0 is none"), asked.append))
    assert (accepted.fresh, operation.status, asked) == (True, "failed", [])
    future = run(journal.future(accepted.request, "ada"))
    assert (future.status, future.error, future.category) == ("failed", "rank 0 is none", "user")
    assert run(journal.pending()) == []
    assert run(journal.submit(step(0)))[0].request == accepted.request


def test_without_a_number_the_next_one_is_taken(journal: Journal, run: Run) -> None:
    run(journal.submit(step(4)))
    _, operation = run(journal.submit(step(None)))
    assert operation.number == 5
    _, first = run(journal.submit(step(None, queue_id="another")))
    assert first.number == 0


def test_what_comes_with_an_operation_is_written_with_it_or_neither_is(store: Store, run: Run, model: Model) -> None:
    later = replace(model, id="ada-s:train:1", number=1)
    create = Submission("ada", later.id, "create", b"{}", 0)

    def refuse(connection: Any) -> None:
        models.add(connection, later)
        raise BadRequest("too many adapters")

    with pytest.raises(BadRequest):
        run(store.journal.submit(create, refuse))
    with pytest.raises(NotFound):
        run(store.models.get("ada", later.id))
    assert [each.queue_id for each in run(store.journal.pending())] == [model.id]
    run(store.journal.submit(create, lambda connection: models.add(connection, later)))
    run(store.journal.submit(create, lambda connection: models.add(connection, later)))  # a repeat adds nothing
    assert run(store.models.get("ada", later.id)).status == "creating"


def test_a_result_is_there_for_whoever_asked_and_nobody_else(journal: Journal, run: Run) -> None:
    accepted, operation = run(journal.submit(step(0)))
    run(journal.finish([Outcome(operation.id, b'{"metrics":{}}')]))
    assert run(journal.future(accepted.request, "ada")) == Future("optim_step", "done", QUEUE, b'{"metrics":{}}')
    with pytest.raises(NotFound, match="does not exist"):
        run(journal.future(accepted.request, "eve"))
    for invented in ("", "0" * 48, accepted.request[:-1], accepted.request + "0", "x" * 10_000):
        with pytest.raises(NotFound):
            run(journal.future(invented, "ada"))


@pytest.mark.parametrize("number", [2**63, -(2**70)])
def test_what_no_column_can_hold_is_the_users_fault(store: Store, run: Run, number: int) -> None:
    with pytest.raises(BadRequest, match="64 bits"):
        run(store.journal.submit(step(number)))
    with pytest.raises(BadRequest, match="not Unicode"):
        run(store.journal.submit(step(0, queue_id="\ud800")))
    with pytest.raises(BadRequest, match="not Unicode"):
        run(store.journal.future("\ud800" * 48, "ada"))
    _, operation = run(store.journal.submit(step(0)))
    (written,) = run(store.journal.finish([Outcome(operation.id, error="no \ud800")]))
    assert written.error is not None
    assert run(store.journal.pending()) == []


def test_requests_are_named_by_128_random_bits_and_a_seal(journal: Journal, run: Run) -> None:
    names = {run(journal.submit(step(number)))[0].request for number in range(50)}
    assert len({name[:32] for name in names}) == len({name[32:] for name in names}) == 50
    assert all(re.fullmatch("[0-9a-f]{48}", name) for name in names)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome(0, error="too long", category="user"), ("failed", "too long", "user")),
        (Outcome(0, b"half", error="the engine died"), ("failed", "the engine died", "server")),
        (Outcome(0, cancelled=True), ("cancelled", "the request was cancelled", "user")),
    ],
)
def test_a_failure_has_words_and_no_result(
    journal: Journal, run: Run, outcome: Outcome, expected: tuple[str, str, str]
) -> None:
    accepted, operation = run(journal.submit(step(0)))
    run(journal.finish([replace(outcome, operation=operation.id)]))
    future = run(journal.future(accepted.request, "ada"))
    assert (future.status, future.error, future.result) == (*expected[:2], None)
    assert future.category == expected[2] or future.status == "cancelled"
    assert run(journal.pending()) == []


def test_the_first_outcome_stands(journal: Journal, run: Run) -> None:
    accepted, operation = run(journal.submit(step(0)))
    run(journal.finish([Outcome(operation.id, b"first")]))
    (second,) = run(journal.finish([Outcome(operation.id, error="late", in_transaction=lambda _: None)]))
    assert (second.result, second.error) == (b"first", None)
    assert run(journal.future(accepted.request, "ada")).result == b"first"
    with pytest.raises(LookupError, match="operation 99 does not exist"):
        run(journal.finish([Outcome(99, b"{}")]))


def test_the_words_of_a_failure_are_kept_without_keys(store: Store, run: Run) -> None:
    refused, _ = run(store.journal.submit(step(0, refusal=f"no {KEY!r}")))
    failed, operation = run(store.journal.submit(step(1)))
    run(store.journal.finish([Outcome(operation.id, error=f"X-API-Key: {KEY}")]))
    words = [run(store.journal.future(each.request, "ada")).error for each in (refused, failed)]
    assert words == ["no '[hidden]'", "X-API-Key: [hidden]"]


def test_a_refusal_of_what_comes_with_an_outcome_fails_that_operation_alone(
    store: Store, run: Run, model: Model
) -> None:
    answers = [run(store.journal.submit(step(number))) for number in range(1, 4)]

    def taken(connection: Any) -> None:
        models.set_status(connection, "ada", model.id, "corrupted", 1.0)
        raise BadRequest("there is one of that name")

    outcomes = [
        Outcome(operation.id, b"{}", in_transaction=in_transaction)
        for (_, operation), in_transaction in zip(answers, [None, taken, None], strict=True)
    ]
    written = run(store.journal.finish(outcomes))
    assert [each.error for each in written] == [None, "there is one of that name", None]
    futures = [run(store.journal.future(accepted.request, "ada")) for accepted, _ in answers]
    assert [future.status for future in futures] == ["done", "failed", "done"]
    assert (futures[1].category, futures[1].result) == ("user", None)
    assert run(store.models.get("ada", model.id)).status == "creating"


@pytest.mark.parametrize("fault", [Unavailable("full"), ZeroDivisionError()])
def test_results_that_are_not_written_leave_no_files(
    store: Store, run: Run, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    operations = [run(store.journal.submit(step(number)))[1] for number in range(1, 4)]
    large = [Outcome(operation.id, bytes([operation.id]) * len(LARGE)) for operation in operations]
    put, count = store.journal.results.put, 0

    async def third_fails(data: bytes) -> str:
        nonlocal count
        count += 1
        if count == 3:
            raise fault
        return await put(data)

    monkeypatch.setattr(store.journal.results, "put", third_fails)
    with pytest.raises(type(fault)):
        run(store.journal.finish(large))
    assert list((store.data / "results").iterdir()) == []
    monkeypatch.setattr(store.journal.results, "put", put)
    monkeypatch.setattr(store.database, "write", _raise(fault))
    with pytest.raises(type(fault)):
        run(store.journal.finish(large))
    with pytest.raises(type(fault)):
        run(store.journal.submit(replace(step(9), payload=b"p" * len(LARGE))))
    assert [list((store.data / place).iterdir()) for place in ("results", "payloads")] == [[], []]


def _raise(fault: Exception) -> Any:
    async def write(work: Any) -> None:
        raise fault

    return write


def test_a_creation_that_fails_leaves_no_model_that_counts(
    store: Store, run: Run, a_model: Callable[..., Awaitable[tuple[Model, Operation]]]
) -> None:
    made = {word: run(a_model(name=word)) for word in ("done", "failed", "cancelled", "pending")}
    outcomes = {"done": {"result": b"{}"}, "failed": {"error": "no room"}, "cancelled": {"cancelled": True}}
    before = store.database.commits
    run(store.journal.finish([Outcome(made[word][1].id, **more) for word, more in outcomes.items()]))  # type: ignore[arg-type]
    assert store.database.commits == before + 1
    found = {word: run(store.models.get("ada", model.id)) for word, (model, _) in made.items()}
    assert {word: model.status for word, model in found.items()} == {
        "done": "creating",  # what comes with its outcome says "live"
        "failed": "gone",
        "cancelled": "gone",
        "pending": "creating",
    }
    assert found["failed"].reason == "no room"
    assert run(store.models.count("ada")) == 2
    run(store.models.set_status("ada", made["failed"][0].id, "creating", 1.0))  # as it was left by earlier versions
    assert run(store.models.end_failed_creations()) == 1
    assert run(store.models.count("ada")) == 2


def test_an_unexpected_error_in_what_comes_with_an_outcome_writes_none_of_them(store: Store, run: Run) -> None:
    answers = [run(store.journal.submit(step(number))) for number in range(2)]

    def broken(_: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(
            store.journal.finish(
                [Outcome(answers[0][1].id, b"{}"), Outcome(answers[1][1].id, b"{}", in_transaction=broken)]
            )
        )
    assert len(run(store.journal.pending())) == 2


def test_a_queue_is_read_in_the_order_of_its_numbers(journal: Journal, run: Run) -> None:
    for number in (3, 1, 0, 2, 7):
        run(journal.submit(step(number)))
    run(journal.submit(step(0, queue_id="another")))
    assert [each.number for each in run(journal.after(QUEUE, 0))] == [1, 2, 3, 7]
    assert [(each.queue_id, each.number) for each in run(journal.pending())][-1] == ("another", 0)


def test_whoever_was_under_way_when_the_engine_died_is_counted(journal: Journal, run: Run) -> None:
    operations = [run(journal.submit(step(number)))[1] for number in range(3)]
    run(journal.finish([Outcome(operations[0].id, b"{}")]))
    run(journal.blame([operations[0].id, operations[1].id]))
    run(journal.blame([operations[1].id]))
    assert [each.attempts for each in run(journal.after(QUEUE, -1))] == [0, 2, 0]


def test_a_snapshot_drops_the_payloads_that_it_covers_and_returns_the_one_before(
    journal: Journal, store: Store, run: Run, model: Model
) -> None:
    operations = [run(journal.submit(step(number)))[1] for number in range(1, 5)]
    run(journal.finish([Outcome(each.id, b"{}") for each in operations[:3]]))
    assert run(journal.snapshotted(Snapshot(model.id, 2, "snapshots/a", "d", 5))) == []
    for operation, kept in zip(operations, [False, False, True, True], strict=True):
        if kept:
            assert run(journal.payload(operation.id)) == b"{}"
        else:
            with pytest.raises(LookupError, match="has been deleted"):
                run(journal.payload(operation.id))
    assert run(journal.snapshotted(Snapshot(model.id, 3, "snapshots/b", "d", 5))) == ["snapshots/a"]
    assert run(journal.snapshotted(Snapshot(model.id, 2, "snapshots/late", "d", 5))) == ["snapshots/late"]
    assert run(journal.snapshot(model.id)) == Snapshot(model.id, 3, "snapshots/b", "d", 5)


def test_how_passes_were_composed_is_written_with_the_outcome_and_kept_as_long_as_the_payload(
    store: Store, run: Run, model: Model
) -> None:
    operations = [run(store.journal.submit(step(number)))[1] for number in range(1, 5)]
    outcomes = [Outcome(each.id, b"{}", composition=f'[{{"pass":{each.number}}}]') for each in operations[:2]]
    outcomes.append(Outcome(operations[2].id, b"{}"))
    outcomes.append(Outcome(operations[3].id, error="no", composition='[{"pass":4}]'))
    run(store.journal.finish(outcomes))
    found = [run(store.journal.composition(each.id)) for each in operations]
    assert found == ['[{"pass":1}]', '[{"pass":2}]', None, None], "what failed is never done again"
    run(store.journal.snapshotted(Snapshot(model.id, 1, "snapshots/a", "d", 5)))
    found = [run(store.journal.composition(each.id)) for each in operations]
    assert found == [None, '[{"pass":2}]', None, None]


def test_a_snapshot_of_a_model_that_is_gone_is_not_needed(store: Store, run: Run, model: Model) -> None:
    run(store.models.set_status("ada", model.id, "gone", 1.0))
    assert run(store.journal.snapshotted(Snapshot(model.id, 0, "snapshots/a", "d", 5))) == ["snapshots/a"]
    assert run(store.journal.snapshot(model.id)) is None
    with pytest.raises(LookupError, match="model 'unknown' of a snapshot does not exist"):
        run(store.journal.snapshotted(Snapshot("unknown", 0, "snapshots/a", "d", 5)))


def test_what_is_never_replayed_loses_its_payload_at_once(store: Store, run: Run) -> None:
    sample = run(store.journal.submit(step(0, kind="sample", queue_id="ada-s:sample:0")))[1]
    failed = run(store.journal.submit(step(0)))[1]
    done = run(store.journal.submit(step(1)))[1]
    run(store.journal.finish([Outcome(sample.id, b"{}"), Outcome(failed.id, error="no"), Outcome(done.id, b"{}")]))
    assert run(store.journal.payload(done.id)) == b"{}"
    for operation in (sample, failed):
        with pytest.raises(LookupError):
            run(store.journal.payload(operation.id))


def test_a_number_that_a_snapshot_covers_is_never_used_again(store: Store, run: Run, model: Model) -> None:
    run(store.journal.snapshotted(Snapshot(model.id, 9, "snapshots/a", "d", 5)))
    with pytest.raises(Gone, match=r"number 7 .* has expired"):
        run(store.journal.submit(step(7)))
    assert run(store.journal.submit(step(None)))[1].number == 10


def test_a_request_notes_when_its_model_was_last_used(store: Store, run: Run, model: Model) -> None:
    before = run(store.models.get("ada", model.id)).last_request
    run(store.journal.submit(step(1)))
    assert run(store.models.get("ada", model.id)).last_request > before


def files(store: Store) -> tuple[int, int]:
    return len(list((store.data / "payloads").iterdir())), len(list((store.data / "results").iterdir()))


def test_large_payloads_and_results_are_files_of_their_own(store: Store, run: Run, model: Model) -> None:
    accepted, operation = run(store.journal.submit(step(1, LARGE)))
    run(store.journal.submit(step(1, LARGE)))
    with pytest.raises(SequenceConflict):
        run(store.journal.submit(step(1, LARGE + b"1")))
    assert files(store) == (1, 0)
    assert run(store.journal.payload(operation.id)) == LARGE
    run(store.journal.finish([Outcome(operation.id, LARGE)]))
    run(store.journal.finish([Outcome(operation.id, LARGE)]))
    assert files(store) == (1, 1)
    assert run(store.journal.future(accepted.request, "ada")).result == LARGE
    run(store.journal.snapshotted(Snapshot(model.id, 1, "snapshots/a", "d", 1)))
    assert files(store) == (0, 1)


def test_a_large_result_of_an_operation_that_failed_after_all_is_removed(store: Store, run: Run) -> None:
    _, operation = run(store.journal.submit(step(0, LARGE)))

    def refuse(_: Any) -> None:
        raise BadRequest("no")

    run(store.journal.finish([Outcome(operation.id, LARGE, in_transaction=refuse)]))
    assert files(store) == (0, 0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["blob.before_rename", "blob.after_rename", "store.before_commit"])
@pytest.mark.parametrize("action", ["enospc", "eio"])
def test_a_disk_that_fails_under_a_large_payload_leaves_nothing(
    store: Store, run: Run, monkeypatch: pytest.MonkeyPatch, name: str, action: str
) -> None:
    monkeypatch.setattr(failpoints, "_watcher", failpoints._Failpoint(f"{name}:1:{action}").reach)
    with pytest.raises(Unavailable, match="try again"):
        run(store.journal.submit(step(0, LARGE)))
    assert files(store) == (0, 0)
    assert run(store.journal.pending()) == []
    assert run(store.journal.submit(step(0, LARGE)))[0].fresh


def test_a_result_whose_file_was_lost_or_changed_is_a_failure_and_not_other_bytes(store: Store, run: Run) -> None:
    for number, spoil in enumerate((lambda path: path.unlink(), lambda path: path.write_bytes(b"else"))):
        accepted, operation = run(store.journal.submit(step(number)))
        run(store.journal.finish([Outcome(operation.id, LARGE + bytes([number]))]))
        (path,) = (store.data / "results").iterdir()
        spoil(path)
        future = run(store.journal.future(accepted.request, "ada"))
        assert (future.status, future.result, future.category) == ("failed", None, "server")
        path.unlink(missing_ok=True)


def test_a_payload_whose_file_was_changed_is_not_replayed(store: Store, run: Run) -> None:
    _, operation = run(store.journal.submit(step(0, LARGE)))
    (path,) = (store.data / "payloads").iterdir()
    path.write_bytes(LARGE[:-1] + b"\0")
    with pytest.raises(LookupError, match="does not match its checksum"):
        run(store.journal.payload(operation.id))
