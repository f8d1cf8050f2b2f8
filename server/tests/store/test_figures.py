"""Figures of operations add up to those of steps, whenever they are folded; rollouts are bounded."""

import random
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest

from twinkle_server.errors import Unavailable
from twinkle_server.operations import Operation, Outcome, Submission
from twinkle_server.store import Store
from twinkle_server.store.figures import Figures, Kept, Step, add
from twinkle_server.store.records import Model

Run = Callable[[Awaitable[Any]], Any]
MakeModel = Callable[..., Awaitable[tuple[Model, Operation]]]


def pass_figures(loss: float, tokens: int, largest: float = 0.5) -> str:
    figures = {
        "loss": loss, "tokens": tokens, "rows": 2, "mismatch": [0.25 * tokens, tokens, largest],
        "metrics": {"clipped": 1.0},
    }  # fmt: skip
    return orjson.dumps(figures).decode()


def step_figures(lr: float) -> str:
    return orjson.dumps({"lr": lr, "grad_norm": 2.0}).decode()


class Log:
    """Ends operations of a model in a store."""

    def __init__(self, store: Store, run: Run, model: Model) -> None:
        self.store, self.run, self.model, self.number = store, run, model, 0

    def end(self, kind: str, figures: str | None, **outcome: Any) -> None:
        self.number += 1
        submission = Submission(self.model.tenant, self.model.id, kind, b"{}", self.number)  # type: ignore[arg-type]
        _, operation = self.run(self.store.journal.submit(submission))
        self.run(self.store.journal.finish([Outcome(operation.id, b"{}", figures=figures, **outcome)]))

    def steps(self, after: int = 0) -> list[Step]:
        found: list[Step] = self.run(self.store.figures.steps(self.model.tenant, self.model.id, after))
        return found


@pytest.fixture
def log(store: Store, run: Run, a_model: MakeModel) -> Log:
    model, _ = run(a_model())
    return Log(store, run, model)


def test_a_step_has_the_sums_of_its_passes(log: Log) -> None:
    log.end("forward_backward", pass_figures(3.0, 4, 0.1))
    log.end("forward_backward", pass_figures(5.0, 6, 0.7))
    log.end("optim_step", step_figures(0.1))
    log.end("forward_backward", pass_figures(1.0, 2))
    [step] = log.steps()
    assert (step.step, step.number, step.count) == (1, 3, 1)
    assert step.data == {
        "loss": 8.0, "tokens": 10, "rows": 4, "mismatch": [2.5, 10, 0.7], "metrics": {"clipped": 2.0},
        "lr": 0.1, "grad_norm": 2.0,
    }  # fmt: skip


def test_only_done_operations_have_figures(log: Log) -> None:
    log.end("forward_backward", pass_figures(3.0, 4), error="it failed")
    log.end("forward_backward", pass_figures(3.0, 4), cancelled=True)
    log.end("forward_backward", None)
    log.end("optim_step", step_figures(0.1))
    [step] = log.steps()
    assert "loss" not in step.data


def test_figures_are_written_with_their_outcome_or_not_at_all(log: Log, store: Store, run: Run) -> None:
    def lose(connection: Any) -> None:
        raise Unavailable("the disk is full")

    _, operation = run(store.journal.submit(Submission("ada", log.model.id, "optim_step", b"{}", 1)))
    outcome = Outcome(operation.id, b"{}", figures=step_figures(0.1))
    run(store.journal.finish([outcome, outcome]))  # the second time is a repetition
    assert len(log.steps()) == 1
    _, operation = run(store.journal.submit(Submission("ada", log.model.id, "optim_step", b"{}", 2)))
    refused = Outcome(operation.id, b"{}", figures=step_figures(0.1), in_transaction=lose)
    assert run(store.journal.finish([refused]))[0].error == "the disk is full"
    assert len(log.steps()) == 1


@pytest.mark.parametrize("seed", range(4))
def test_folding_at_any_time_changes_nothing(log: Log, store: Store, run: Run, seed: int) -> None:
    draw = random.Random(seed)
    expected: list[dict[str, float]] = [{"loss": 0.0, "tokens": 0}]
    for _ in range(60):
        if draw.random() < 0.4:
            log.end("optim_step", step_figures(0.1))
            expected.append({"loss": 0.0, "tokens": 0})
        else:
            log.end("forward_backward", pass_figures(loss := float(draw.randrange(9)), tokens := draw.randrange(1, 9)))
            expected[-1]["loss"] += loss
            expected[-1]["tokens"] += tokens
        if draw.random() < 0.2:
            run(store.figures.fold())
    found = log.steps()
    assert [step.step for step in found] == list(range(1, len(expected)))
    sums = [{name: step.data.get(name, 0) for name in ("loss", "tokens")} for step in found]
    assert sums == expected[:-1]
    assert log.steps(after=found[2].step) == found[3:]
    run(store.figures.fold())
    assert run(store.figures.steps(log.model.tenant, log.model.id, newest=4)) == log.steps()[-4:]


def test_steps_of_many_runs_are_folded_together(store: Store, run: Run, a_model: MakeModel) -> None:
    """Operations of different runs alternate, and arrive in another order than they run."""
    logs = []
    for name in range(40):
        model, _ = run(a_model(name=f"s{name}"))
        logs.append(Log(store, run, model))
    for number in (2, 1, 3):  # the SDK sends its first chunk last
        for log in logs:
            log.number = number - 1
            kind = "optim_step" if number == 3 else "forward_backward"
            log.end(kind, step_figures(0.1) if number == 3 else pass_figures(float(number), 1))
    assert run(store.figures.fold()) == 3 * len(logs)
    for log in logs:
        assert [(step.step, step.data["loss"]) for step in log.steps()] == [(1, 3.0)]


def test_passes_without_a_step_become_one_row(log: Log, store: Store, run: Run, monkeypatch: Any) -> None:
    monkeypatch.setattr("twinkle_server.store.figures._OPEN", 5)
    for _ in range(20):
        log.end("forward_backward", pass_figures(1.0, 1))
    assert run(store.figures.fold()) == 19
    log.end("optim_step", step_figures(0.1))
    [step] = log.steps()
    assert (step.data["loss"], step.data["tokens"]) == (20.0, 20)


def test_long_runs_are_thinned_and_keep_their_sums(log: Log, store: Store, run: Run) -> None:
    few = Figures(store.database, most=16)
    for number in range(100):
        log.end("forward_backward", pass_figures(float(number), 1))
        log.end("optim_step", step_figures(number / 100))
        if number % 7 == 0:
            run(few.fold())
    run(few.fold())
    found = log.steps()
    assert len(found) <= 16 + 8
    assert sum(step.count for step in found) == 100
    assert sum(step.data["loss"] for step in found) == sum(range(100))
    assert [step.step for step in found] == sorted({step.step for step in found})
    assert (found[-1].step, found[-1].data["lr"]) == (100, 0.99)
    assert found[-1].count == 1, "the newest steps are whole"


def test_old_runs_are_forgotten(log: Log, store: Store, run: Run) -> None:
    log.end("optim_step", step_figures(0.1))
    run(store.figures.fold())
    log.end("optim_step", step_figures(0.1))
    [first, second] = log.steps()
    assert run(store.figures.forget(first.time)) == 0
    assert run(store.figures.forget(second.time + 1)) == 2
    assert log.steps() == []


def test_sums_do_not_change_what_is_added() -> None:
    first = {"kl": [1.0, 2], "metrics": {"a": 1.0}}
    assert add(first, {"kl": [2.0, 3], "metrics": {"a": 2.0, "b": 5.0}}) == {
        "kl": [3.0, 5], "metrics": {"a": 3.0, "b": 5.0},
    }  # fmt: skip
    assert first == {"kl": [1.0, 2], "metrics": {"a": 1.0}}


def kept(run: str, number: int, size: int = 10, at: float = 1.0) -> Kept:
    return Kept("ada", run, number, at, {"row": 0}, bytes(size))


def test_each_run_keeps_its_newest_rollouts(store: Store, run: Run) -> None:
    for number in range(5):
        run(store.rollouts.add([kept("a", number), kept("b", number)], {"a": 3, "b": 3}))
    assert [row.number for row in run(store.rollouts.of_run("ada", "a", 9))] == [4, 3, 2]
    run(store.rollouts.add([kept("a", number) for number in range(10, 20)], {"a": 3, "b": 3}))
    rows = run(store.rollouts.of_run("ada", "a", 9))
    assert [row.number for row in rows] == [19, 18, 17]
    assert len(run(store.rollouts.of_run("ada", "b", 9))) == 3
    assert run(store.rollouts.get("ada", "a", rows[0].id)).data == bytes(10)
    assert run(store.rollouts.remove("ada", "a")) == 3


def test_rollouts_are_bounded_in_bytes_and_time(store: Store, run: Run) -> None:
    run(store.rollouts.add([kept("a", number, size=100, at=float(number)) for number in range(10)], {"a": 99}))
    assert run(store.rollouts.trim(350, before=2.0)) == 2 + 5
    assert [row.number for row in run(store.rollouts.of_run("ada", "a", 99))] == [9, 8, 7]
