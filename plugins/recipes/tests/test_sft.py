"""The recipe on a tiny model: what a run leaves, how it goes on after Ctrl-C, and what bad input does."""

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from twinkle.errors import (
    ArgumentError,
    CheckpointError,
    ComponentNotFound,
    ConfigError,
    DataError,
    ModelLoadError,
    NonFiniteError,
    OutputError,
)
from twinkle.run import Run
from twinkle.testing import tiny_model
from twinkle_recipes.config import SFTConfig
from twinkle_recipes.sft import sft

LOSSES = '''
import math, os, signal

from twinkle.loss import CrossEntropyLoss


class Eventful(CrossEntropyLoss):
    """Cross-entropy to which something happens at its call number `at`."""

    def __init__(self, at, event):
        super().__init__()
        self.at, self.event, self.calls = at, event, 0

    def __call__(self, inputs, outputs, **kwargs):
        self.calls += 1
        result = super().__call__(inputs, outputs, **kwargs)
        if self.calls == self.at and self.event == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        if self.calls == self.at and self.event == "nan":
            return type(result)(loss_sum=result.loss_sum * math.nan, denominator=result.denominator)
        return result
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    with path.open("w") as file:
        for number in range(30):
            turns = [("user", f"say {number}"), ("assistant", "ab" * (number % 5 + 1))]
            file.write(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}) + "\n")
    return path


@pytest.fixture
def values(model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "losses.py").write_text(LOSSES)
    return {
        "model": {"id": str(model), "mixed_precision": "no"},
        "data": {"id": str(rows), "eval_fraction": 0.2},
        "lora": {"rank": 4, "dropout": 0.1},
        "optimizer": {"lr": 0.01},
        "batch_size": 4,
        "epochs": 2,
        "eval_every": 3,
        "trackers": ["JsonlTracker"],
    }


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(values)
    for key, change in changes.items():
        inner = isinstance(change, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], change) if inner else change
    return result


def train(values: Mapping[str, Any], **changes: Any) -> tuple[Path, dict[str, Any]]:
    config = SFTConfig.model_validate(merged(values, changes))
    with Run("tiny", config=config.model_dump(), trackers=config.trackers, folder=config.run_folder) as run:
        return run.folder, sft(config, run)


def newest() -> Path:
    return max(Path("runs").iterdir(), key=lambda folder: folder.stat().st_ctime_ns).absolute()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def timeless(folder: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines(folder)]


def test_a_run_leaves_everything_that_says_how(values: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    folder, summary = train(values, questions=["say 1"])
    steps = lines(folder)
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert [line["step"] for line in steps if "eval/loss" in line] == [3, 6, 9, 12]
    assert {"learning_rate", "grad_norm", "accuracy", "tokens", "tokens_per_second", "eval/accuracy"} <= set(steps[2])
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "answers.json").read_text())[0]["after"] is not None
    assert SFTConfig.model_validate(yaml.safe_load((folder / "config.yaml").read_text())).optimizer.lr == 0.01
    assert summary["steps"] == 12
    assert summary["last_loss"] == steps[-1]["loss"]
    assert (summary["curve"], summary["answers"]) == (str(folder / "loss.png"), str(folder / "answers.json"))
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len([line for line in out.splitlines() if line.startswith("step ")]) == 12


def test_the_result_is_a_standard_peft_adapter(values: dict[str, Any]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, summary = train(values, max_steps=2)
    assert Path(summary["path"]) == folder / "adapter"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        path.name for path in (folder / "adapter").iterdir()
    }
    base = AutoModelForCausalLM.from_pretrained(values["model"]["id"])
    adapted = PeftModel.from_pretrained(base, str(folder / "adapter"))
    assert any(parameter.abs().sum() > 0 for name, parameter in adapted.named_parameters() if "lora_B" in name)


@pytest.mark.full
def test_full_parameter_training_leaves_a_model_that_transformers_loads(values: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    folder, summary = train(values, lora=None, max_steps=2, gradient_accumulation_steps=2)
    assert Path(summary["path"]) == folder / "model"
    AutoModelForCausalLM.from_pretrained(folder / "model")


@pytest.mark.full
def test_the_plan_names_the_plugin_behind_every_part(values: dict[str, Any]) -> None:
    folder, _ = train(
        values, max_steps=1, questions=["hello"], loss={"name": "./losses.py:Eventful", "args": {"at": 0, "event": ""}}
    )
    plan = json.loads((folder / "plugins.json").read_text())
    assert {path["path"]: path["exact"] for path in plan["paths"]} == {"packing": True, "prefixes": True}
    assert all(path["method"] in ("equal bits", "rounding") and path["dtype"] == "float32" for path in plan["paths"])
    parts = {part["kind"]: part for part in plan["parts"]}
    assert {
        "recipe",
        "dataset",
        "template",
        "dataloader",
        "model",
        "processor",
        "optimizer",
        "scheduler",
        "sampler",
        "tracker",
    } <= set(parts)
    assert parts["model"]["plugin"] == "twinkle-transformers"
    assert parts["model"]["version"]
    assert parts["model"]["ref"] == "twinkle_transformers.model:TransformersModel"
    assert parts["loss"]["asked"] == "./losses.py:Eventful"
    assert parts["loss"]["plugin"] == ""
    assert {"python", "torch", "transformers", "peft"} <= set(plan["packages"])
    metrics = [part["asked"] for part in plan["parts"] if part["kind"] == "metric"]
    assert metrics == ["LossMetric", "Accuracy", "TrainMetric"]


@pytest.mark.full
def test_best_and_last_name_whole_checkpoints(values: dict[str, Any]) -> None:
    folder, summary = train(values, save_every=1, save_total_limit=1)
    checkpoints = folder / "checkpoints"
    scores = {line["step"]: line["eval/loss"] for line in lines(folder) if "eval/loss" in line}
    best = f"step-{min(scores, key=scores.__getitem__)}"
    assert (checkpoints / "best").read_text() == best + "\n"
    assert (checkpoints / "last").read_text() == "step-12\n"
    assert Path(summary["best"]) == checkpoints / best
    assert {path.name for path in checkpoints.iterdir()} == {"best", "last", best, "step-12"}
    assert (checkpoints / best / "adapter_model.safetensors").is_file()


@pytest.mark.full
def test_an_unfinished_accumulation_at_the_end_is_a_step(values: dict[str, Any]) -> None:
    folder, _ = train(values, gradient_accumulation_steps=5)  # 12 batches: 5 + 5 + 2
    assert [line["step"] for line in lines(folder)] == [1, 2, 3]


@pytest.mark.full
def test_the_batch_size_in_memory_changes_no_number(values: dict[str, Any]) -> None:
    whole, _ = train(values, lora={"dropout": 0.0}, max_steps=4)
    parts, _ = train(values, lora={"dropout": 0.0}, max_steps=4, micro_batch_size=1)
    for one, other in zip(lines(whole), lines(parts), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)


def test_an_interrupted_run_goes_on_in_the_same_numbers(
    values: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = train(values, questions=["say 2"])
    capsys.readouterr()
    with pytest.raises(KeyboardInterrupt):
        train(
            values, questions=["say 2"], loss={"name": "./losses.py:Eventful", "args": {"at": 5, "event": "interrupt"}}
        )
    stopped = newest().relative_to(Path.cwd())
    out = capsys.readouterr().out
    kept = lines(stopped)[-1]["step"]
    assert kept < 12
    assert (stopped / "checkpoints" / "last").read_text() == f"step-{kept}\n"
    assert (stopped / "loss.png").is_file()
    assert f"twinkle run sft --resume_from {stopped}\n" in out
    loss = {"name": "./losses.py:Eventful", "args": {"at": 5, "event": "interrupt"}}
    monkeypatch.setattr(os, "kill", lambda *_: None)
    train(values, questions=["say 2"], loss=loss, resume_from=str(stopped))
    assert timeless(stopped) == timeless(whole)
    for name in ("adapter/adapter_model.safetensors", "answers.json"):
        assert (stopped / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.full
def test_a_run_may_start_afresh_from_a_checkpoint(values: dict[str, Any]) -> None:
    whole, _ = train(values)
    other, _ = train(values, save_every=4)
    fresh, _ = train(values, resume_from=str(other / "checkpoints" / "step-8"))
    assert fresh != other
    assert timeless(fresh) == timeless(whole)[8:]


def test_resuming_from_nothing_says_what_to_give(values: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such folder"):
        train(values, resume_from=str(tmp_path / "absent"))


@pytest.mark.full
def test_a_checkpoint_of_another_accumulation_is_refused_wherever_it_lies(
    values: dict[str, Any], tmp_path: Path
) -> None:
    folder, _ = train(values, max_steps=2)
    moved = (folder / "checkpoints" / "step-2").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="gradient_accumulation_steps 1"):
        train(values, resume_from=str(moved), gradient_accumulation_steps=2)


@pytest.mark.full
def test_a_run_goes_on_only_as_it_began_and_nothing_is_touched(values: dict[str, Any]) -> None:
    folder, _ = train(values, max_steps=2)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"seed: 42 in .*config\.yaml, 7 now") as caught:
        train(values, resume_from=str(folder), max_steps=2, seed=7)
    assert f"--resume_from {folder}/checkpoints/step-2" in str(caught.value)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.full
def test_stopping_earlier_this_time_shortens_neither_the_run_nor_its_schedule(values: dict[str, Any]) -> None:
    whole, _ = train(values)
    parts, _ = train(values, save_every=2, save_total_limit=None)
    (parts / "checkpoints" / "last").write_text("step-6\n")
    train(values, resume_from=str(parts), max_steps=8, log_every=5)
    assert [line["learning_rate"] for line in lines(parts)] == [line["learning_rate"] for line in lines(whole)[:8]]
    train(values, resume_from=str(parts))
    assert [line["loss"] for line in lines(parts)] == [line["loss"] for line in lines(whole)]


@pytest.mark.full
def test_a_start_from_a_checkpoint_takes_optimizer_and_schedule_from_it(values: dict[str, Any]) -> None:
    folder, _ = train(values, max_steps=2)
    checkpoint = str(folder / "checkpoints" / "step-2")
    with pytest.raises(ConfigError, match=r"optimizer\.lr: 0\.01 in .*, 0.5 now"):
        train(values, resume_from=checkpoint, max_steps=2, optimizer={"lr": 0.5})
    fresh, _ = train(values, resume_from=checkpoint, max_steps=2, seed=7)
    assert fresh != folder


def test_a_run_stopped_while_it_starts_makes_no_step(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pressing.py").write_text(
        "import os, signal\nfrom twinkle.loss import CrossEntropyLoss\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"
        "Loss = CrossEntropyLoss\n"
    )
    with pytest.raises(KeyboardInterrupt):
        train(values, loss={"name": "./pressing.py:Loss"})
    assert list(Path("runs").iterdir()) == []
    assert "interrupted before the first checkpoint" in capsys.readouterr().out


def test_rows_that_teach_nothing_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"no token of its \d+ encoded rows is trained.*max_length 3"):
        train(values, data={"max_length": 3})
    assert list(Path("runs").iterdir()) == []


@pytest.mark.full
def test_a_few_rows_that_teach_nothing_are_counted(
    values: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ab"}]
    rows = [{"messages": turns}] * 6 + [{"messages": [{**turns[0], "content": "hi" * 200}, turns[1]]}] * 2
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train(values, data={"id": "long.jsonl", "max_length": 100, "eval_fraction": 0}, max_steps=1)
    (warned,) = [record.getMessage() for record in caplog.records if "no token is trained" in record.getMessage()]
    assert "in 2 of 8 rows" in warned


def test_a_start_that_fails_before_anything_is_written_leaves_no_folder(values: dict[str, Any]) -> None:
    with pytest.raises(ComponentNotFound):
        train(values, loss={"name": "CrossEntropyLos"})
    assert list(Path("runs").iterdir()) == []


@pytest.mark.full
def test_a_nan_loss_stops_and_keeps_the_batch(values: dict[str, Any]) -> None:
    with pytest.raises(NonFiniteError) as caught:
        train(values, loss={"name": "./losses.py:Eventful", "args": {"at": 3, "event": "nan"}})
    folder = newest()
    batch = json.loads((folder / "nonfinite_batch.json").read_text())
    assert len(batch) == 4
    assert all(isinstance(token, int) for token in batch[0]["input_ids"])
    assert f"saved in {folder.relative_to(Path.cwd())}/nonfinite_batch.json" in str(caught.value)
    assert [line["step"] for line in lines(folder)] == [1, 2]
    assert (folder / "loss.png").is_file()


@pytest.mark.full
def test_a_nan_loss_can_be_left_out(values: dict[str, Any]) -> None:
    folder, _ = train(
        values, on_nonfinite="skip", loss={"name": "./losses.py:Eventful", "args": {"at": 3, "event": "nan"}}
    )
    steps = lines(folder)
    assert [line["step"] for line in steps if line.get("nonfinite_skipped")] == [3]
    assert steps[2]["loss"] is None
    assert len(steps) == 12
    assert all(math.isfinite(line["loss"]) for line in steps if line["step"] != 3)


def test_an_output_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot make the run folder"):
        Run("tiny", root=tmp_path / "file" / "runs")


def test_a_misspelt_component_is_found_before_anything_is_loaded(values: dict[str, Any]) -> None:
    with pytest.raises(ComponentNotFound, match="CrossEntropyLoss"):
        train(values, loss={"name": "CrossEntropyLos"}, model={"id": "/nowhere"})


def test_too_few_rows_to_hold_some_out_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="eval_fraction"):
        train(values, data={"slice": 1})


@pytest.mark.full
def test_evaluation_may_be_left_out(values: dict[str, Any]) -> None:
    folder, summary = train(values, data={"eval_fraction": 0.0}, max_steps=2)
    assert summary["best"] is None
    assert not any("eval/loss" in line for line in lines(folder))
    assert not (folder / "checkpoints" / "best").exists()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"loss": {"name": "CrossEntropyLos"}}, ComponentNotFound),
        ({"model": {"id": "./nowhere"}}, ModelLoadError),
        ({"data": {"id": "nowhere.jsonl"}}, DataError),
        ({"data": {"eval_id": "nowhere.jsonl"}}, DataError),
        ({"loss": {"name": "CrossEntropyLoss", "args": {"dtf": True}}}, ArgumentError),
        ({"optimizer": {"args": {"beta": 1}}}, ArgumentError),
        ({"data": {"preprocessor": "./none.py:F"}}, ComponentNotFound),
    ],
)
def test_a_run_that_is_refused_loads_nothing_and_leaves_nothing(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], error: type[Exception]
) -> None:
    monkeypatch.setattr("twinkle_recipes.run.opening.loaders", lambda config, encode: pytest.fail("rows were loaded"))
    with pytest.raises(error):
        train(values, **changes)
    assert list(Path("runs").iterdir()) == []


@pytest.mark.full
def test_rows_with_gaps_are_warned_of(values: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "{{NAME}}, of {{AUTHOR}}"}]
    (tmp_path / "gaps.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 4)
    train(values, data={"id": "gaps.jsonl", "eval_fraction": 0}, max_steps=1)
    (warned,) = [record.getMessage() for record in caplog.records if "{{" in record.getMessage()]
    assert "its rows contain {{AUTHOR}} and {{NAME}}, which the model would learn literally" in warned


@pytest.mark.full
def test_the_default_rows_have_their_names_filled_in(values: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    data = {**values["data"], "slice": 16}
    train({**values, "data": {"slice": data["slice"]}}, max_steps=1)
    assert not [record for record in caplog.records if "{{" in record.getMessage()]


@pytest.mark.full
def test_a_finished_run_has_nothing_left_to_do(values: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    folder, first = train(values, max_steps=2, questions=["say 1"])
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    capsys.readouterr()
    _, again = train(values, max_steps=2, questions=["say 1"], resume_from=str(folder))
    assert again == first
    assert "all 2 steps are done and the result is saved; nothing to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.full
def test_a_run_that_lost_its_result_saves_it_again(values: dict[str, Any]) -> None:
    folder, _ = train(values, max_steps=2)
    weights = (folder / "adapter" / "adapter_model.safetensors").read_bytes()
    shutil.rmtree(folder / "adapter")
    train(values, max_steps=2, resume_from=str(folder))
    assert (folder / "adapter" / "adapter_model.safetensors").read_bytes() == weights


@pytest.mark.full
def test_packed_and_padding_free_rows_make_the_same_losses(values: dict[str, Any]) -> None:
    changes: dict[str, Any] = {"lora": {"dropout": 0.0}, "max_steps": 3}
    plain, _ = train(values, **changes)
    free, _ = train(values, **changes, data={"padding_free": True})
    for one, other in zip(lines(plain), lines(free), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
    packed, _ = train(values, **changes, data={"type": "PackingDataset", "max_length": 256, "eval_fraction": 0})
    assert lines(packed)[0]["tokens"] > lines(plain)[0]["tokens"]


@pytest.mark.full
def test_recomputation_changes_no_number(values: dict[str, Any]) -> None:
    runs = [train(values, max_steps=2, model={"gradient_checkpointing": on})[0] for on in (False, True)]
    assert timeless(runs[0]) == timeless(runs[1])


@pytest.mark.full
def test_a_checkpoint_without_a_step_is_continued_as_before(values: dict[str, Any]) -> None:
    changes = {"gradient_accumulation_steps": 2, "save_every": 2, "max_steps": 4, "data": {"eval_fraction": 0.0}}
    whole, _ = train(values, **changes)
    checkpoint = whole / "checkpoints" / "step-2"
    state = checkpoint / "trainer_state.json"
    content = json.loads(state.read_text())
    assert content.pop("loop") == {"step": 2}  # checkpoints of earlier releases do not have it
    state.write_text(json.dumps(content))
    (checkpoint / "digests.json").unlink()  # it has the digest of the file that was just changed
    again, _ = train(values, **changes, resume_from=str(checkpoint))
    assert timeless(again) == timeless(whole)[2:]
