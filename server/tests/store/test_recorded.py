"""Sampling requests that were recorded for training: whose they are, how long, and that their results stay."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from twinkle_server.errors import Gone
from twinkle_server.operations import Outcome, Submission
from twinkle_server.store import Store, recorded

Run = Callable[[Awaitable[Any]], Any]
START, DAY = 1_000_000.0, 86_400.0


async def sampled(store: Store, number: int, record: bool = True, session: str = "ada-s") -> str:
    queue_id = f"{session}:sample:0"
    in_transaction = (
        (lambda connection: recorded.add(connection, "ada", session, queue_id, number, START)) if record else None
    )
    accepted, operation = await store.journal.submit(
        Submission("ada", queue_id, "sample", b"{}", number), in_transaction
    )
    await store.journal.finish([Outcome(operation.id, b"result")])
    return str(accepted.request)


def ended(store: Store, time: float) -> None:
    change = "UPDATE operations SET finished = ? WHERE finished IS NOT NULL"
    store.database.write_now(lambda connection: connection.exec_driver_sql(change, (time,)).rowcount)


def test_only_what_a_session_recorded_is_found(store: Store, run: Run) -> None:
    own, plain, other = (
        run(sampled(store, 0)), run(sampled(store, 1, record=False)), run(sampled(store, 0, session="ada-t")),
    )  # fmt: skip
    use = store.recorded.use
    assert run(use("ada", "ada-s", {own, plain, other, "none"}, START - DAY, START)) == {own}
    assert run(use("bob", "ada-s", {own}, START - DAY, START)) == set()
    assert run(use("ada", "ada-t", {own, other}, START - DAY, START)) == {other}


def test_a_request_is_recorded_for_a_day_after_its_last_use(store: Store, run: Run) -> None:
    request = run(sampled(store, 0))

    def use(now: float) -> bool:
        return run(store.recorded.use("ada", "ada-s", {request}, now - DAY, now)) == {request}

    assert use(START + 0.9 * DAY)
    assert use(START + 1.8 * DAY)
    assert not use(START + 2.9 * DAY)


def test_many_requests_are_looked_up_in_order_until_one_is_not_recorded(
    store: Store, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "_AT_ONCE", 2)
    requests = [run(sampled(store, number)) for number in range(5)]

    def use(asked: list[str]) -> set[str]:
        found: set[str] = run(store.recorded.use("ada", "ada-s", asked, START - DAY, START))
        return found

    assert use(requests) == set(requests)
    assert use([requests[0], "none", *requests[1:]]) == {requests[0]}


@pytest.mark.full
def test_a_pass_that_names_a_million_sampling_requests_holds_no_other_writer_up(
    store: Store, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[object] = []
    read = store.database.read

    async def noted(work: Any) -> Any:
        reads.append(work)
        return await read(work)

    async def refused(work: Any) -> Any:
        raise AssertionError("nothing is recorded, so nothing must be written")

    monkeypatch.setattr(store.database, "read", noted)
    monkeypatch.setattr(store.database, "write", refused)
    asked = [f"none-{number}" for number in range(1_000_000)]
    assert run(store.recorded.use("ada", "ada-s", asked, START - DAY, START)) == set()
    assert len(reads) == 1


def test_the_result_of_a_recorded_request_stays_as_long_as_it_can_be_used(store: Store, run: Run) -> None:
    kept, plain = run(sampled(store, 0)), run(sampled(store, 1, record=False))
    ended(store, START)
    for request in (kept, plain):
        run(store.journal.future(request, "ada"))  # read: ten minutes for others
    read = max(store.journal.reads.values())
    run(store.recorded.use("ada", "ada-s", {kept}, 0.0, read + DAY / 2))
    assert run(store.retention.purge(read + DAY)).results == 1
    assert run(store.journal.future(kept, "ada")).result == b"result"
    with pytest.raises(Gone):
        run(store.journal.future(plain, "ada"))
    assert run(store.retention.purge(read + 2 * DAY)).results == 1
    with pytest.raises(Gone):
        run(store.journal.future(kept, "ada"))
