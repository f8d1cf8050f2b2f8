"""Runs: a fresh folder each, and lifecycle hooks in order, whatever happens."""

import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from twinkle import Run
from twinkle.errors import ArgumentError, MeshError, OutputError
from twinkle.tracker import Tracker
from twinkle_registry import hookimpl


class Notes(Tracker):
    """Writes down which hooks were called."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    @hookimpl
    def twinkle_run_start(self, run: Run) -> None:
        self.calls.append(("start", run.folder.is_dir()))

    @hookimpl
    def twinkle_step_end(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(("step", step, dict(metrics)))

    @hookimpl
    def twinkle_checkpoint_saved(self, run: Run, path: Path, step: int) -> None:
        self.calls.append(("saved", path, step))

    @hookimpl
    def twinkle_run_error(self, run: Run, error: BaseException) -> None:
        self.calls.append(("error", type(error).__name__))

    @hookimpl
    def twinkle_run_end(self, run: Run) -> None:
        self.calls.append(("end",))


class Failing(Tracker):
    """Breaks at every step."""

    @hookimpl
    def twinkle_step_end(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        raise OSError("disk full")


def test_a_tracker_hears_of_everything_in_order(tmp_path: Path) -> None:
    notes = Notes()
    with Run("trial", trackers=[notes], root=tmp_path) as run:
        run.log({"loss": 2.0}, step=1)
        run.checkpoint_saved(tmp_path, step=1)
    assert notes.calls == [("start", True), ("step", 1, {"loss": 2.0}), ("saved", tmp_path, 1), ("end",)]
    assert run.step == 1


def test_the_error_of_a_run_is_told_and_then_the_end(tmp_path: Path) -> None:
    notes = Notes()
    with pytest.raises(KeyboardInterrupt), Run("trial", trackers=[notes], root=tmp_path):
        raise KeyboardInterrupt
    assert notes.calls == [("start", True), ("error", "KeyboardInterrupt"), ("end",)]


def test_a_tracker_that_fails_harms_neither_the_run_nor_its_neighbours(tmp_path: Path) -> None:
    notes = Notes()
    with Run("trial", trackers=[Failing(), notes], root=tmp_path) as run:
        run.log({"loss": 1.0}, step=1)
    assert ("step", 1, {"loss": 1.0}) in notes.calls


def test_after_a_run_its_trackers_hear_nothing_more(tmp_path: Path) -> None:
    notes = Notes()
    with Run("first", trackers=[notes], root=tmp_path):
        pass
    before = list(notes.calls)
    with Run("second", root=tmp_path) as run:
        run.log({}, step=1)
    assert notes.calls == before


def test_two_runs_of_one_second_get_two_folders(tmp_path: Path) -> None:
    folders = {Run("trial", root=tmp_path).folder for _ in range(3)}
    assert len(folders) == 3
    assert all(folder.name.startswith("trial-") for folder in folders)


def test_two_runs_may_last_at_the_same_time(tmp_path: Path) -> None:
    one, two = Notes(), Notes()
    with Run("trial", trackers=[one], root=tmp_path), Run("trial", trackers=[two], root=tmp_path):
        pass
    assert one.calls[-1] == two.calls[-1] == ("end",)


def test_a_run_continues_in_its_folder(tmp_path: Path) -> None:
    assert Run("trial", folder=tmp_path).folder == tmp_path
    with pytest.raises(OutputError, match="does not exist; leave it out to start a fresh run"):
        Run("trial", folder=tmp_path / "absent")


@pytest.mark.parametrize("name", ["", "a/b", "a b", "../up"])
def test_a_name_that_is_no_folder_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run name"):
        Run(name, root=tmp_path)


def test_a_root_that_is_a_file_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="choose another with --runs DIR"):
        Run("trial", root=tmp_path / "file")


def test_a_run_that_fails_before_it_writes_leaves_no_folder_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="early"), Run("trial", root=tmp_path / "runs"):
        raise ValueError("early")
    assert list((tmp_path / "runs").iterdir()) == []
    late = Run("trial", root=tmp_path / "runs")
    (late.folder / "note").write_text("why")
    with pytest.raises(ValueError, match="late"), late:
        raise ValueError("late")
    assert (late.folder / "note").is_file()
    own = tmp_path / "own"
    own.mkdir()
    with pytest.raises(ValueError, match="again"), Run("trial", folder=own):
        raise ValueError("again")
    assert own.is_dir()


def test_of_several_processes_the_first_has_the_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, calls in (("1", []), ("0", [("start", True), ("step", 1, {"loss": 2.0}), ("end",)])):
        monkeypatch.setenv("RANK", rank)
        notes = Notes()
        with Run("trial", trackers=[notes], folder=tmp_path) as run:
            run.log({"loss": 2.0}, step=1)
        assert notes.calls == calls
        assert run.step == 1


def test_several_processes_must_know_each_other_before_they_make_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MeshError, match=r"twinkle\.initialize"):
        Run("trial", root=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


WRITER = """
import sys
from twinkle import Run
with Run("trial", folder=sys.argv[1]):
    print("writing", flush=True)
    sys.stdin.read()
"""


def writer(folder: Path) -> "subprocess.Popen[str]":
    """Start a process that writes a run, and wait until it does."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def test_a_second_writer_of_a_run_is_refused_until_the_first_has_ended_even_by_sigkill(tmp_path: Path) -> None:
    first = writer(tmp_path)
    with pytest.raises(OutputError, match=f"process {first.pid} on .* is still writing"), Run("trial", folder=tmp_path):
        pass
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert (tmp_path / ".lock").is_file()  # the file is left, its lock is not
    with Run("trial", folder=tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_one_process_cannot_write_a_run_twice_at_a_time(tmp_path: Path) -> None:
    with Run("trial", folder=tmp_path), pytest.raises(OutputError, match="still writing"), Run("t", folder=tmp_path):
        pass
    with Run("trial", folder=tmp_path):
        pass


def test_a_file_system_without_locks_is_said_and_hinders_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import errno
    import fcntl

    def flock(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with caplog.at_level("WARNING", "twinkle"), Run("trial", folder=tmp_path):
        pass
    assert "has no locks" in caplog.text


def test_a_tracker_may_be_a_mapping_of_its_type_and_arguments(tmp_path: Path) -> None:
    given = {"type": "JsonlTracker", "filename": "numbers.jsonl"}
    with Run("trial", trackers=[given], root=tmp_path) as run:
        run.log({"loss": 1.0}, step=1)
    assert (run.folder / "numbers.jsonl").read_text() == '{"step": 1, "loss": 1.0}\n'
    assert given["type"] == "JsonlTracker"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"filename": "a"}, r"needs the key 'type', such as 'JsonlTracker'; it has \['filename'\]"),
        ({"type": "JsonlTracker", "filname": "a"}, "unknown argument 'filname', nearest: 'filename'"),
    ],
)
def test_a_mapping_that_is_no_tracker_is_refused(given: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=told):
        Run("trial", trackers=[given], root=tmp_path)


class _Two:
    """Like a tensor of two numbers."""

    def __float__(self) -> float:
        raise RuntimeError("2 elements")

    __index__ = __float__  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ([1], "metrics is of type list; give a mapping"),
        (None, "metrics is of type NoneType"),
        ({1: 2.0}, "a metric is called 1; its name is a text"),
        ({"loss": None}, "metric 'loss' is of type NoneType and not one number"),
        ({"loss": [1.0]}, "metric 'loss' is of type list"),
        ({"loss": b"2"}, "metric 'loss' is of type bytes"),
        ({"loss": _Two()}, "metric 'loss' is of type _Two and not one number"),
    ],
)
def test_metrics_that_are_none_are_refused_and_nothing_is_recorded(metrics: Any, told: str, tmp_path: Path) -> None:
    notes = Notes()
    with Run("trial", trackers=[notes], root=tmp_path) as run, pytest.raises(ArgumentError, match=told):
        run.log(metrics, step=4)
    assert run.step == 0
    assert notes.calls == [("start", True), ("end",)]


@pytest.mark.parametrize(
    ("step", "told"),
    [
        ("2", "step is '2'; give a whole number from 0"),
        (-1, "step is -1"),
        (True, "step is True"),
        (2.0, "step is 2.0"),
        (None, "step is of type NoneType"),
        (_Two(), "step is of type _Two"),
        (2, "step 2 comes after step 3; log the steps in their order"),
    ],
)
def test_a_step_that_is_none_or_goes_back_is_refused(step: Any, told: str, tmp_path: Path) -> None:
    notes = Notes()
    with Run("trial", trackers=[notes], root=tmp_path) as run:
        run.log({"loss": 1.0}, step=3)
        with pytest.raises(ArgumentError, match=told):
            run.log({"loss": 2.0}, step=step)
    assert run.step == 3
    assert notes.calls[1:-1] == [("step", 3, {"loss": 1.0})]


def test_a_step_is_logged_several_times_and_as_numpy_has_it(tmp_path: Path) -> None:
    import numpy as np

    notes = Notes()
    with Run("trial", trackers=[notes], root=tmp_path) as run:
        for step in (0, np.int64(1), 1):
            run.log({"loss": np.float32(0.5), "note": "text", "flat": True, "size": float("nan")}, step=step)
        assert type(run.step) is int
    assert [call[1] for call in notes.calls[1:-1]] == [0, 1, 1]
