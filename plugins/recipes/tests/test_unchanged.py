"""Which keys may change when a run goes on in its folder, and which when another starts from its checkpoint."""

from pathlib import Path
from typing import Any

import pytest

from twinkle.errors import CheckpointError, ConfigError
from twinkle_recipes.config import SFTConfig
from twinkle_recipes.run.checkpoints import whole_run, write_config


@pytest.fixture
def run(tmp_path: Path) -> Path:
    checkpoint = tmp_path / "checkpoints" / "step-4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    (checkpoint.parent / "last").write_text("step-4\n")
    write_config(SFTConfig(max_steps=10), tmp_path)
    return tmp_path


def changed(place: Path, **changes: Any) -> SFTConfig:
    return SFTConfig.model_validate({"max_steps": 10, **changes, "resume_from": str(place)})


NUMBERS: list[tuple[dict[str, Any], str]] = [
    ({"epochs": 3}, "epochs: 1 in"),
    ({"max_steps": 11}, "max_steps: 10 in"),
    ({"max_steps": None}, "null now"),
    ({"optimizer": {"lr": 0.5}}, "optimizer.lr: 0.0002 in"),
    ({"scheduler": {"args": {"num_cycles": 2}}}, "scheduler.args: {} in"),
    ({"lora": {"alpha": 3}}, "lora.alpha: 32.0 in"),
    ({"lora": None}, "lora: {"),
    ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps: 1 in"),
]
DATA: list[tuple[dict[str, Any], str]] = [
    ({"seed": 7}, "seed: 42 in"),
    ({"batch_size": 4}, "batch_size: 8 in"),
    ({"data": {"slice": 20}}, "data.slice: null in"),
    ({"data": {"shuffle": False}}, "data.shuffle: true in"),
]


@pytest.mark.parametrize(("changes", "told"), NUMBERS + DATA)
def test_a_run_that_goes_on_keeps_every_key_that_decides_its_numbers(
    run: Path, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        whole_run(changed(run, **changes))
    assert told in str(caught.value)
    assert "restore them" in str(caught.value)
    helps = (changes, told) in DATA
    assert (f"--resume_from {run}/checkpoints/step-4" in str(caught.value)) == helps


def test_every_changed_key_is_named_at_once(run: Path) -> None:
    with pytest.raises(ConfigError, match="2 differ") as caught:
        whole_run(changed(run, seed=1, batch_size=2))
    assert "seed: 42" in str(caught.value)
    assert "batch_size: 8" in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"log_every": 5, "save_every": 1, "save_total_limit": None, "eval_every": 7},
        {"questions": ["who?"], "sampler": {"max_tokens": 3}, "trackers": []},
        {"micro_batch_size": 2},
    ],
)
def test_what_decides_no_number_may_change(run: Path, changes: dict[str, Any]) -> None:
    config = changed(run, **changes)
    assert whole_run(config) == config


def test_a_smaller_max_steps_is_of_this_time_and_not_of_the_run(run: Path) -> None:
    assert whole_run(changed(run, max_steps=6)).max_steps == 10


@pytest.mark.parametrize(("changes", "told"), NUMBERS)
def test_a_start_from_a_checkpoint_keeps_what_the_checkpoint_holds(
    run: Path, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        whole_run(changed(run / "checkpoints" / "step-4", **changes))
    assert told in str(caught.value)


@pytest.mark.parametrize("changes", [changes for changes, _ in DATA])
def test_a_start_from_a_checkpoint_may_use_other_data(run: Path, changes: dict[str, Any]) -> None:
    config = changed(run / "checkpoints" / "step-4", **changes)
    assert whole_run(config) == config


def test_a_run_that_does_not_say_how_it_began_cannot_go_on(run: Path) -> None:
    for text in ("epochs: [", "epochs: many", "\x00"):
        (run / "config.yaml").write_text(text)
        with pytest.raises(ConfigError, match="cannot be read"):
            whole_run(changed(run))
    (run / "config.yaml").unlink()
    with pytest.raises(ConfigError, match="start a new run from the checkpoint"):
        whole_run(changed(run))
    alone = changed(run / "checkpoints" / "step-4", epochs=9)
    assert whole_run(alone) == alone


def test_what_is_no_checkpoint_is_found_first(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such folder"):
        whole_run(changed(tmp_path / "absent"))
