"""Work that kills or hangs the engine, and a disk that refuses a write, harm nobody but themselves."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from server_failpoints import served_failpoints
from server_history import read_ledger
from server_raw import Failed, Raw, RawModel, row
from serving import Served, ledger

POISON, ONCE, HANGING, GOOD = 66, 67, 68, 5
# Behind a commit that worked nothing is written: a disk that fails there is no disk that there is.
NO_DISKS = ("outcomes.", "secret.", "store.after_commit")
DISKS = [name for name in served_failpoints() if not name.startswith(NO_DISKS)]
FIRST = {name.partition(".")[0]: name for name in reversed(DISKS) if name.startswith(("store", "files"))}.values()
"""One failpoint of the store and one of checkpoints; `make test-all` goes through all of them."""


@contextmanager
def served(folder: Path, extra: dict[str, Any] | None = None, **environment: str) -> Iterator[Served]:
    times = {"poll": 2.0, "deadline": 3.0, "snapshot": 1.0}
    settings = {"times": times, "limits": {"small_bytes": 512}, "snapshot_steps": 1, "extra": extra or {}}
    service = ledger(folder / "data", settings)
    service.start(**environment)
    try:
        yield service
    finally:
        service.kill()


def state_of(model: RawModel) -> tuple[list[int], list[int]]:
    """Return first tokens of what is pending and applied."""
    pending, applied = read_ledger(model.forward([row([1, 2])]))
    return [number >> 32 for number in pending], [number >> 32 for number in applied]


@pytest.mark.full
@pytest.mark.parametrize(("token", "option"), [(POISON, "die"), (HANGING, "hang")])
def test_work_that_ends_the_engine_twice_fails_and_is_never_run_again(tmp_path: Path, token: int, option: str) -> None:
    with served(tmp_path, {option: [token]}) as service, Raw(service.url) as raw:
        mine, other = raw.model(), raw.model()
        mine.forward_backward([row([GOOD, 2, 3])])
        bad = mine.submit_pass([row([token, 2, 3])])
        later = mine.submit_pass([row([GOOD + 1, 2, 3])])
        neighbour = other.submit_pass([row([GOOD + 2, 2, 3])])
        with pytest.raises(Failed) as failed:
            raw.result(bad, "pass", polls=30)
        assert failed.value.category == "server"
        assert raw.result(neighbour, "pass", polls=30)
        assert raw.result(later, "pass", polls=30)
        assert state_of(mine) == ([GOOD, GOOD + 1], [])
        assert state_of(other) == ([GOOD + 2], [])
        service.kill()
        service.start()
        with Raw(service.url) as again:
            assert state_of(RawModel(again, mine.id, mine.last)) == ([GOOD, GOOD + 1], [])


def test_work_during_which_the_engine_died_by_chance_is_done(tmp_path: Path) -> None:
    with served(tmp_path, {"die_once": [ONCE]}) as service, Raw(service.url) as raw:
        model = raw.model()
        model.forward_backward([row([GOOD, 2, 3])])
        model.step()
        assert model.forward_backward([row([ONCE, 2, 3])])
        assert state_of(model) == ([ONCE], [GOOD])


@pytest.mark.full
def test_results_that_were_reported_before_the_engine_died_stay_and_are_trained_once(tmp_path: Path) -> None:
    """The rest of the turn is run again."""
    with served(tmp_path, {"die_within": [ONCE], "seconds_per_token": 0.01}) as service, Raw(service.url) as raw:
        models = [raw.model() for _ in range(4)]
        busy = models[0].submit_pass([row([GOOD, *range(2, 150)])])  # the others share the next turn
        passes = [model.submit_pass([row([GOOD + at, 2, 3])]) for at, model in enumerate(models[1:3], 1)]
        passes.append(models[3].submit_pass([row([ONCE, 2, 3])]))
        results = [raw.result(request, "pass", polls=30) for request in (busy, *passes)]
        assert [raw.result(request, "pass") for request in (busy, *passes)] == results, "a result changed"
        assert "1 operations were in flight" in service.log(), "none of the turn was reported before the engine died"
        expected = [GOOD, GOOD + 1, GOOD + 2, ONCE]
        assert [state_of(model) for model in models] == [([token], []) for token in expected]
        service.kill()
        service.start()
        with Raw(service.url) as again:
            found = [state_of(RawModel(again, model.id, model.last)) for model in models]
            assert found == [([token], []) for token in expected]


@pytest.mark.parametrize("error", ["enospc", pytest.param("eio", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.full) for name in DISKS]
)
def test_a_disk_that_refuses_one_write_harms_that_write_at_most(tmp_path: Path, name: str, error: str) -> None:
    with served(tmp_path, FAILPOINT=f"{name}:{30 if name.startswith('store') else 1}:{error}") as service:
        raw = Raw(service.url)
        model = raw.model()
        pending: list[int] = []
        applied: list[int] = []
        saved: dict[str, list[int]] = {}
        for at in range(6):
            data = [row([GOOD + at, *range(2, 60)])]
            pending += [GOOD + at] if done(raw, model, "forward_backward", data) else []
            if done(raw, model, "step"):
                applied, pending = applied + pending, []
            if done(raw, model, "save", f"c{at}"):
                saved[f"weights/c{at}"] = applied
        assert len(applied) >= 5
        assert len(saved) >= 5
        assert state_of(model) == (pending, applied)
        listed = raw.get(f"/training_runs/{model.id}/checkpoints")["checkpoints"]
        found = {entry["checkpoint_id"]: state_of(raw.load(entry["tinker_path"])) for entry in listed}
        assert found == {name: ([], tokens) for name, tokens in saved.items()}
        raw.http.close()


def done(raw: Raw, model: RawModel, what: str, *arguments: Any) -> bool:
    """Do something, sending it again while the service is busy; False if it failed as the service's fault."""
    number = model.last + 1
    for _ in range(50):
        try:
            getattr(model, what)(*arguments)
        except Failed as failed:
            if failed.category == "server":
                return False
            raise
        except AssertionError as error:
            if not any(status in str(error) for status in ("503", "429")):
                raise
            model.last = number - 1  # refused for now: the same number comes again
            time.sleep(0.1)
        else:
            return True
    raise AssertionError(f"{what} was refused for ever")
