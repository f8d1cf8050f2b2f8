"""Best and last are always there to go back to; old checkpoints go."""

import math
import os
from pathlib import Path

import pytest

from twinkle.errors import CheckpointError
from twinkle_recipes.history import History
from twinkle_recipes.run.checkpoints import Checkpoints, find_checkpoint, loop_state, run_folder_of, score_of


def write(name: str, output_dir: str) -> None:
    folder = Path(output_dir) / name
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text("{}")


def saved(folder: Path, scores: dict[int, float | None], limit: int | None) -> Checkpoints:
    checkpoints = Checkpoints(folder, limit)
    for step, score in scores.items():
        checkpoints.save(step, score, write)
    return checkpoints


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_best_is_the_lowest_evaluation_and_last_the_newest(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: math.nan}, limit=None)
    assert checkpoints.path("best") == tmp_path / "step-2"
    assert checkpoints.path("last") == tmp_path / "step-5"
    assert (tmp_path / "best").read_text() == "step-2\n"


def test_old_checkpoints_go_but_best_and_last_stay(tmp_path: Path) -> None:
    saved(tmp_path, {2: 1.0, 4: 2.0, 6: 2.0, 8: 2.0, 10: 2.0}, limit=2)
    assert names(tmp_path) == ["best", "last", "step-10", "step-2", "step-8"]


def test_pointers_move_only_after_the_folder_stands(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, {1: 1.0}, limit=1)

    def fails(name: str, output_dir: str) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(2, 0.5, fails)
    assert checkpoints.path("last") == tmp_path / "step-1"
    assert checkpoints.path("best") == tmp_path / "step-1"


def test_a_checkpoint_is_found_by_run_folder_pointer_or_name(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    saved(folder, {1: 1.0, 2: 2.0}, limit=None)
    assert find_checkpoint(str(tmp_path)) == folder / "step-2"
    assert find_checkpoint(str(folder / "best")) == folder / "step-1"
    assert find_checkpoint(str(folder / "step-1")) == folder / "step-1"
    assert run_folder_of(folder / "step-1") == tmp_path.resolve()


def test_a_place_without_a_checkpoint_is_an_error_that_says_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="use a run folder"):
        find_checkpoint(str(tmp_path))


def test_a_folder_that_is_not_there_is_told_with_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="nope: there is no such folder; use a run folder"):
        find_checkpoint("nope")
    for name in range(7):
        (tmp_path / "runs" / f"sft-{name}").mkdir(parents=True)
        (tmp_path / "runs" / f"sft-{name}" / "config.yaml").touch()
        os.utime(tmp_path / "runs" / f"sft-{name}", (name, name))
    (tmp_path / "runs" / "sft-now").mkdir()  # that of the very run that is refused
    (tmp_path / "runs" / "sft-now" / ".lock").touch()
    for place in ("nope", "runs/sft-9", "runs/sft-9/checkpoints/step-3"):
        with pytest.raises(CheckpointError, match=r"no such folder; runs/ has sft-6, sft-5, .* and 2 older ones"):
            find_checkpoint(place)


def test_a_continued_run_knows_the_score_to_beat(tmp_path: Path) -> None:
    history = History()
    history.add(1, {"loss": 1.0, "eval/loss": 0.75})
    assert score_of(history, tmp_path / "step-1") == 0.75
    assert score_of(history, tmp_path / "step-2") == math.inf
    assert score_of(history, None) == math.inf


def test_what_a_loop_kept_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "trainer_state.json"
    file.write_text('{"cur_step": 9}')
    assert loop_state(tmp_path) == {}
    file.write_text('{"cur_step": 9, "loop": {"step": 3}}')
    assert loop_state(tmp_path) == {"step": 3}
    for damaged in ('{"loop": [1]}', "{", "[]"):
        file.write_text(damaged)
        with pytest.raises(CheckpointError, match="the checkpoint is damaged"):
            loop_state(tmp_path)


def test_where_more_is_better_the_highest_score_is_to_beat(tmp_path: Path) -> None:
    history = History()
    history.add(1, {"eval/reward": 0.75})
    assert score_of(history, tmp_path / "step-1", "eval/reward", highest=True) == -0.75
    assert score_of(history, tmp_path / "step-2", "eval/reward", highest=True) == math.inf
