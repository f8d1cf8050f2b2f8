"""Random histories: the durable journal, opened anew at any time, says what a journal in memory says."""

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from twinkle_server.errors import ServiceError
from twinkle_server.operations import Outcome, Snapshot, Submission
from twinkle_server.settings import Limits
from twinkle_server.store import Store, models, open_store
from twinkle_server.store.memory import MemoryJournal
from twinkle_server.store.records import Model, Session

QUEUES = ("s:train:0", "s:train:1", "s:sample:0")
queues, numbers = st.sampled_from(QUEUES), st.integers(0, 5)
payloads = st.sampled_from((b"", b"small", b"large" * 20))


class Histories(RuleBasedStateMachine):
    """Both journals get the same requests; their answers are compared, names of requests apart."""

    template: Path

    @initialize()
    def open(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        shutil.copy(self.template, self.folder)
        self.runner = asyncio.Runner()
        self.store = self._open()
        self.memory = MemoryJournal(self.store.database, b"other")
        self.requests: dict[str, str] = {}
        self.operations: list[int] = []
        self.runner.run(self.store.sessions.create(Session("s", "ada", 1.0, 1.0)))
        for number in (0, 1):
            model = Model(QUEUES[number], "ada", "s", number, "base", 8, 1.0, 1.0)
            self.store.database.write_now(lambda connection, model=model: models.add(connection, model))

    def _open(self) -> Store:
        return open_store(self.folder, limits=Limits(small_bytes=10))

    def both(self, call: Callable[[Any], Any]) -> list[Any]:
        answers: list[Any] = []
        for journal in (self.store.journal, self.memory):
            try:
                answers.append(self.runner.run(call(journal)))
            except (ServiceError, LookupError) as error:
                answers.append(type(error))
        return answers

    @rule(queue_id=queues, number=numbers | st.none(), payload=payloads, refused=st.booleans(), forward=st.booleans())
    def submit(self, queue_id: str, number: int | None, payload: bytes, refused: bool, forward: bool) -> None:
        kind: Any = "sample" if "sample" in queue_id else "forward" if forward else "optim_step"
        refusal = "no" if refused else None
        asked = Submission("ada", queue_id, kind, payload, number, refusal=refusal)
        durable, memory = self.both(lambda journal: journal.submit(asked))
        if isinstance(durable, type):
            assert durable is memory
            return
        (accepted, operation), (other, same) = durable, memory
        assert accepted.fresh == other.fresh
        assert self.requests.setdefault(other.request, accepted.request) == accepted.request
        fields = ("id", "queue_id", "number", "kind", "attempts")
        assert [getattr(operation, name) for name in fields] == [getattr(same, name) for name in fields]
        if accepted.fresh:
            self.operations.append(operation.id)

    @rule(data=st.data(), result=payloads, failed=st.booleans(), cancelled=st.booleans())
    def finish(self, data: st.DataObject, result: bytes, failed: bool, cancelled: bool) -> None:
        if self.operations:
            chosen = data.draw(st.lists(st.sampled_from(self.operations), max_size=3, unique=True))
            error = "failed" if failed else None
            outcomes = [Outcome(each, result, error, cancelled=cancelled) for each in chosen]
            durable, memory = self.both(lambda journal: journal.finish(outcomes))
            assert len(durable) == len(memory)

    @rule(data=st.data())
    def blame(self, data: st.DataObject) -> None:
        if self.operations:
            chosen = data.draw(st.lists(st.sampled_from(self.operations), max_size=3))
            self.both(lambda journal: journal.blame(chosen))

    @rule(queue_id=st.sampled_from(QUEUES[:2]), number=numbers)
    def snapshot(self, queue_id: str, number: int) -> None:
        snapshot = Snapshot(queue_id, number, f"snapshots/{queue_id}-{number}", "d", 1)
        durable, memory = self.both(lambda journal: journal.snapshotted(snapshot))
        assert durable == memory

    @rule(clean=st.booleans())
    def reopen(self, clean: bool) -> None:
        if not clean and self.store.lease is not None:
            self.store.lease.drop()
            self.store.lease = None
        self.store.close()
        self.store = self._open()
        self.memory._database = self.store.database

    @invariant()
    def says_the_same(self) -> None:
        if not hasattr(self, "store"):
            return
        for queue_id in QUEUES:
            durable, memory = self.both(lambda journal, queue_id=queue_id: journal.snapshot(queue_id))
            assert durable == memory
        for view in (lambda journal: journal.pending(), *(self._after(queue_id) for queue_id in QUEUES)):
            durable, memory = self.both(view)
            assert [(each.id, each.status, each.attempts) for each in durable] == [
                (each.id, each.status, each.attempts) for each in memory
            ]
        for there, here in self.requests.items():
            durable = self.runner.run(self.store.journal.future(here, "ada"))
            memory = self.runner.run(self.memory.future(there, "ada"))
            assert (durable.status, durable.result, durable.error) == (memory.status, memory.result, memory.error)

    @staticmethod
    def _after(queue_id: str) -> Callable[[Any], Any]:
        return lambda journal: journal.after(queue_id, 0)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.runner.close()
            shutil.rmtree(self.folder)


@pytest.mark.parametrize("examples", [8, pytest.param(500, marks=pytest.mark.soak)])
def test_the_durable_journal_says_what_the_one_in_memory_says(migrated: Path, examples: int) -> None:
    Histories.template = migrated
    quick = settings(max_examples=examples, stateful_step_count=15, deadline=None)
    run_state_machine_as_test(Histories, settings=settings(quick, suppress_health_check=list(HealthCheck)))
