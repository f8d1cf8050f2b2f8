"""What the trackers of services ask of the libraries, and what they do when these fail: with stand-ins for them."""

import logging
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from twinkle import Run
from twinkle.errors import ArgumentError
from twinkle_trackers.background import Background
from twinkle_trackers.mlflow import MLflowTracker
from twinkle_trackers.service import flat, kept_id, new_id, numbers
from twinkle_trackers.swanlab import SwanLabTracker
from twinkle_trackers.trackio import TrackioTracker
from twinkle_trackers.wandb import WandbTracker

ALL = (WandbTracker, SwanLabTracker, TrackioTracker, MLflowTracker)


class Library:
    """Stands in for wandb, swanlab or trackio, and for the run that it makes."""

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.ended: list[tuple[Any, ...]] = []
        self.failing: set[str] = set()
        self.calls = 0

    def init(self, **arguments: Any) -> Any:
        self._call("init")
        self.begun.append(arguments)
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._call("log")
        self.logged.append((step, metrics))

    def finish(self, *args: Any, **kwargs: Any) -> None:
        self._call("finish")
        self.ended.append((*args, *kwargs.values()))

    def Settings(self, **values: Any) -> Any:
        return values

    def _call(self, name: str) -> None:
        self.calls += 1
        if name in self.failing:
            raise ConnectionError(f"{name}: nobody there")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    for name in ("wandb", "swanlab", "trackio"):
        monkeypatch.setitem(sys.modules, name, found)
    return found


three = pytest.mark.parametrize("cls", [WandbTracker, SwanLabTracker, TrackioTracker])


@three
def test_a_run_is_begun_logged_and_ended(cls: Any, library: Library, tmp_path: Path) -> None:
    with Run("trial", config={"a": {"b": 1}}, trackers=[cls("mine")], root=tmp_path) as run:
        run.log({"loss": 1, "note": "text", "accuracy": 0.5}, step=1)
        run.log({"eval/loss": 2.0}, step=1)
    (begun,) = library.begun
    assert (begun["project"], begun["name"], begun["config"]) == ("mine", run.folder.name, {"a": {"b": 1}})
    assert library.logged == [(1, {"loss": 1, "accuracy": 0.5}), (1, {"eval/loss": 2.0})]
    assert len(library.ended) == 1


@pytest.mark.parametrize(
    ("cls", "error", "end"),
    [
        (WandbTracker, None, (0,)),
        (WandbTracker, ValueError("no"), (1,)),
        (WandbTracker, KeyboardInterrupt(), (1,)),
        (SwanLabTracker, None, ("success",)),
        (SwanLabTracker, ValueError("no"), ("crashed", "ValueError: no")),
        (SwanLabTracker, KeyboardInterrupt(), ("aborted", "KeyboardInterrupt: ")),
    ],
)
def test_the_service_hears_how_a_run_ended(
    cls: Any, error: BaseException | None, end: tuple[Any, ...], library: Library, tmp_path: Path
) -> None:
    def work() -> None:
        with Run("trial", trackers=[cls()], root=tmp_path):
            if error is not None:
                raise error

    if error is None:
        work()
    else:
        with pytest.raises(type(error)):
            work()
    assert library.ended == [end]


@pytest.mark.parametrize("cls", [WandbTracker, SwanLabTracker])
def test_a_run_that_continues_keeps_its_id(cls: Any, library: Library, tmp_path: Path) -> None:
    with Run("trial", trackers=[cls()], root=tmp_path) as run:
        pass
    with Run("trial", trackers=[cls()], folder=run.folder):
        pass
    first, second = library.begun
    assert first["id"] == second["id"]
    assert (first["resume"], second["resume"]) == (None, "allow")
    with Run("trial", trackers=[cls()], root=tmp_path):
        pass
    assert library.begun[2]["id"] != first["id"]


@three
@pytest.mark.parametrize("failing", ["init", "log", "finish"])
def test_a_service_that_fails_is_told_of_once_and_not_asked_again(
    cls: Any, failing: str, library: Library, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library.failing = {failing}
    tracker = cls()
    with caplog.at_level(logging.WARNING, logger="twinkle"), Run("trial", trackers=[tracker], root=tmp_path) as run:
        for step in range(1, 5):
            run.log({"loss": 1.0}, step)
    name = cls.__name__
    assert caplog.messages == [
        f"{name}: nothing more of this run is recorded: ConnectionError: {failing}: nobody there"
    ]
    assert library.calls == {"init": 1, "log": 3, "finish": 6}[failing]  # one that cannot log is ended all the same
    library.failing = set()
    with Run("trial", trackers=[tracker], root=tmp_path) as run:
        run.log({"loss": 1.0}, 1)
    assert library.logged[-1] == (1, {"loss": 1.0})


@three
def test_a_step_without_a_beginning_begins_the_run(cls: Any, library: Library, tmp_path: Path) -> None:
    tracker, run = cls(), SimpleNamespace(folder=tmp_path, config={}, name="trial")
    tracker.twinkle_step_end(run, 3, {"loss": 1.0})
    tracker.twinkle_run_end(run)
    tracker.twinkle_run_end(run)
    assert (len(library.begun), len(library.logged), len(library.ended)) == (1, 1, 1)


def test_files_stay_below_the_folder_of_the_run(library: Library, tmp_path: Path) -> None:
    for cls in (WandbTracker, SwanLabTracker):
        with Run("trial", trackers=[cls()], root=tmp_path) as run:
            pass
        given = library.begun[-1]
        assert Path(given.get("dir") or given["log_dir"]).is_relative_to(run.folder)


def test_swanlab_gets_finite_numbers_only(library: Library, tmp_path: Path) -> None:
    with Run("trial", trackers=[SwanLabTracker()], root=tmp_path) as run:
        run.log({"loss": float("nan"), "grad_norm": float("inf"), "accuracy": 0.5}, 1)
    assert library.logged == [(1, {"accuracy": 0.5})]


@pytest.mark.parametrize(
    ("cls", "arguments", "told"),
    [
        (WandbTracker, {"mode": "of"}, "WandbTracker: mode is 'of'; it is one of 'online', 'offline', 'disabled'"),
        (SwanLabTracker, {"mode": "cloud"}, "SwanLabTracker: mode is 'cloud'"),
        (WandbTracker, {"project": ""}, "WandbTracker: project is ''"),
        (TrackioTracker, {"project": 3}, "TrackioTracker: project is 3"),
        (MLflowTracker, {"experiment": " "}, "MLflowTracker: experiment is ' '"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(cls: Any, arguments: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        cls(**arguments)


@pytest.mark.parametrize("cls", ALL)
def test_an_absent_library_is_told_before_a_run_begins(cls: Any, tmp_path: Path) -> None:
    import twinkle
    from twinkle.errors import RequirementMissing

    library = {"MLflowTracker": "mlflow"}.get(cls.__name__, cls.__name__.removesuffix("Tracker").lower())
    if __import__("importlib.util").util.find_spec(library):
        pytest.skip(f"{library} is installed here")
    with pytest.raises(RequirementMissing, match=f"pip install .*{library}"):
        twinkle.registry().build(cls.__name__, "tracker")


def test_what_is_kept_and_sent_is_plain(tmp_path: Path) -> None:
    import torch

    run: Any = SimpleNamespace(folder=tmp_path)
    assert kept_id(run, "x", lambda: "one") == ("one", False)
    assert kept_id(run, "x", lambda: "two") == ("one", True)
    assert (tmp_path / "x.id").read_text() == "one\n"
    assert new_id() != new_id()
    assert numbers({"a": torch.tensor(0.5), "b": 2, "c": "text", "d": True}) == {"a": 0.5, "b": 2, "d": True}
    assert dict(flat({"a": {"b": {"c": 1}, "d": {}}, "e": [1, {"f": 2}]})) == {
        "a.b.c": 1,
        "a.d": {},
        "e": [1, {"f": 2}],
    }


def test_calls_are_made_in_order_and_none_after_a_failure() -> None:
    made: list[int] = []

    def fails() -> None:
        raise ConnectionError("no")

    background = Background("test")
    background.add(lambda: made.append(1))
    background.add(lambda: made.append(2))
    background.add(fails)
    background.add(lambda: made.append(3))
    background.close(30)
    assert made == [1, 2]
    assert isinstance(background.error, ConnectionError)


def test_a_call_that_does_not_end_is_left_behind() -> None:
    release = threading.Event()
    background = Background("test")
    background.add(lambda: release.wait(30))
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="take longer than"):
        background.close(0.05)
    assert time.monotonic() - began < 20
    release.set()
