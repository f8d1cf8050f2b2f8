"""What the trackers leave on disk, in a fresh run and in one that continues."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from twinkle.errors import ArgumentError
from twinkle.run import Run
from twinkle_trackers.jsonl import JsonlTracker, plain_number
from twinkle_trackers.tensorboard import TensorBoardTracker


def at(folder: Path) -> Any:
    return SimpleNamespace(folder=folder)


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_each_step_is_one_json_line_written_at_once(tmp_path: Path) -> None:
    tracker = JsonlTracker()
    tracker.twinkle_step_end(at(tmp_path), 1, {"loss": 2.5, "eval/loss": 3.0})
    assert lines(tmp_path) == [{"step": 1, "loss": 2.5, "eval/loss": 3.0}]
    tracker.twinkle_step_end(at(tmp_path), 2, {"loss": 2.0})
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    tracker.twinkle_run_end(at(tmp_path))


def test_lines_are_valid_json_whatever_the_numbers(tmp_path: Path) -> None:
    import torch

    tracker = JsonlTracker()
    numbers = {"loss": math.nan, "grad_norm": math.inf, "accuracy": torch.tensor(0.5), "rows": 3}
    tracker.twinkle_step_end(at(tmp_path), 1, numbers)
    tracker.twinkle_run_end(at(tmp_path))
    assert lines(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "accuracy": 0.5, "rows": 3}]
    assert plain_number(3) == 3
    assert isinstance(plain_number(3), int)


def test_a_continued_file_holds_no_step_twice_and_no_torn_line(tmp_path: Path) -> None:
    before = "".join(json.dumps({"step": n, "loss": float(n)}) + "\n" for n in (1, 2, 3, 4))
    (tmp_path / "metrics.jsonl").write_text(before + '{"step": 5, "lo')
    tracker = JsonlTracker()
    tracker.twinkle_step_end(at(tmp_path), 3, {"loss": 30.0})
    tracker.twinkle_step_end(at(tmp_path), 4, {"loss": 40.0})
    tracker.twinkle_run_end(at(tmp_path))
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]


@pytest.mark.parametrize("name", ["", "a/b.jsonl", "..", "/tmp/x"])
def test_a_tracker_cannot_be_pointed_out_of_the_run_folder(name: str) -> None:
    with pytest.raises(ArgumentError):
        JsonlTracker(filename=name)
    with pytest.raises(ArgumentError):
        TensorBoardTracker(folder=name)


def test_tensorboard_reads_back_every_scalar(tmp_path: Path) -> None:
    tracker = TensorBoardTracker()
    for step, loss in enumerate([3.0, 2.0, 1.5], start=1):
        tracker.twinkle_step_end(at(tmp_path), step, {"loss": loss, "note": "text"})
    tracker.twinkle_run_end(at(tmp_path))
    assert scalars(tmp_path / "tensorboard", "loss") == [(1, 3.0), (2, 2.0), (3, 1.5)]


def test_tensorboard_shows_no_step_twice_when_a_run_continues(tmp_path: Path) -> None:
    for first, factor in ((1, 1.0), (3, 10.0)):
        tracker = TensorBoardTracker(flush_seconds=0)
        for step in range(first, 5):
            tracker.twinkle_step_end(at(tmp_path), step, {"loss": step * factor})
        tracker.twinkle_run_end(at(tmp_path))
    assert scalars(tmp_path / "tensorboard", "loss") == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]


def test_a_run_drives_its_trackers_found_by_name(tmp_path: Path) -> None:
    with Run("mine", trackers=["JsonlTracker", "twinkle-trackers/TensorBoardTracker"], root=tmp_path) as run:
        run.log({"loss": 1.0}, step=1)
    assert lines(run.folder) == [{"step": 1, "loss": 1.0}]
    assert scalars(run.folder / "tensorboard", "loss") == [(1, 1.0)]


def test_two_runs_in_one_process_keep_their_numbers_apart(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        with Run(name, trackers=["JsonlTracker"], root=tmp_path) as run:
            run.log({"loss": value}, step=1)
        assert lines(run.folder) == [{"step": 1, "loss": value}]
