"""The recipe over streams: as long as `max_steps` says, resumed bit for bit, and refused where a length is needed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from twinkle.errors import ConfigError, EncodeError
from twinkle.run import Run
from twinkle.testing import tiny_model
from twinkle_recipes.config import SFTConfig
from twinkle_recipes.data import check_stream, with_source_rows
from twinkle_recipes.sft import sft


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    tiny_model(folder / "model")
    for name, count in (("rows", 10), ("others", 3)):
        rows = [conversation(f"say {name} {number}", "ab" * (number % 5 + 1)) for number in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def conversation(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def configured(place: Path, data: Mapping[str, Any] | None = None, **changes: Any) -> SFTConfig:
    values: dict[str, Any] = {
        "model": {"id": str(place / "model"), "mixed_precision": "no"},
        "data": {"id": str(place / "rows.jsonl"), "type": "IterableDataset", "eval_fraction": 0, **(data or {})},
        "lora": {"rank": 2, "dropout": 0.1},
        "batch_size": 4,
        "trackers": ["JsonlTracker"],
        "max_steps": 5,
        "eval_every": 2,
    }
    return SFTConfig.model_validate(values | changes)


def train(config: SFTConfig) -> tuple[Path, dict[str, Any]]:
    with Run("tiny", config=config.model_dump(), trackers=config.trackers, folder=config.run_folder) as run:
        return run.folder, sft(config, run)


def numbers(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.full
def test_a_stream_begins_again_until_max_steps_and_resumes_bit_for_bit(place: Path) -> None:
    data = {"eval_id": str(place / "others.jsonl"), "shuffle_buffer": 4}
    folder, summary = train(configured(place, data, save_every=4))  # batches of 4, 4 and 2 rows, then anew
    assert summary["steps"] == 5
    whole = numbers(folder)
    assert [line["step"] for line in whole] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in whole if "eval/loss" in line] == [2, 4, 5]
    later, _ = train(configured(place, data, save_every=4, resume_from=str(folder / "checkpoints" / "step-4")))
    assert numbers(later) == whole[4:]


@pytest.mark.full
def test_a_packed_stream_has_the_rows_of_the_stream(place: Path) -> None:
    folder, _ = train(configured(place, {"type": "IterablePackingDataset", "max_length": 4000}, max_steps=1))
    whole, _ = train(configured(place, {"slice": "0:10"}, max_steps=1, batch_size=10))
    assert numbers(folder)[0]["tokens"] == numbers(whole)[0]["tokens"]
    assert numbers(folder)[0]["loss"] == pytest.approx(numbers(whole)[0]["loss"], rel=1e-5)


def test_a_stream_that_teaches_nothing_at_first_is_told(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(configured(place, {"max_length": 3}, max_steps=1))
    assert "no token is trained in the first 10 rows of the stream" in caplog.text


def test_what_a_stream_cannot_do_is_told_at_once(place: Path) -> None:
    data = {"eval_fraction": 0.1, "slice": "-3:", "shuffle": False, "shuffle_buffer": 7}
    with pytest.raises(ConfigError, match="IterableDataset is a stream") as error:
        train(configured(place, data, max_steps=None, epochs=2, model={"id": "not loaded"}))
    text = str(error.value)
    for key in ("max_steps", "epochs", "data.eval_fraction", "data.shuffle_buffer", "data.slice"):
        assert f"\n  {key}" in text
    assert "data.eval_id or data.eval_split" in text
    assert list(Path("runs").iterdir()) == []


def test_a_buffer_is_for_streams_alone(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.type Dataset is not a stream; omit it"):
        check_stream(configured(place, {"type": "Dataset", "shuffle_buffer": 7}))


def test_a_bad_row_is_named_as_in_its_file(place: Path, tmp_path: Path) -> None:
    rows = [conversation(f"say {number}", "ab") for number in range(8)]
    rows[5] = {"mesages": rows[5]["messages"]}
    file = tmp_path / "bad.jsonl"
    file.write_text("\n\n".join(json.dumps(row) for row in rows))
    data = {"id": str(file), "type": "Dataset", "slice": "1::2"}
    with pytest.raises(EncodeError, match=r"bad.jsonl, row 5 \(line 11\): .* has no 'messages' .its keys: mesages."):
        train(configured(place, data))


def test_rows_of_other_sources_have_a_number_and_the_data_set_a_name() -> None:
    with pytest.raises(EncodeError, match=r"^data set hf://a/b, row 9: bad$"), with_source_rows("hf://a/b", [4, 9]):
        raise EncodeError("row 1: bad")
    with pytest.raises(EncodeError, match=r"^data set x.csv: row 1: bad$"), with_source_rows("x.csv", None):
        raise EncodeError("row 1: bad")


def test_a_loss_scale_is_an_argument_of_the_template(place: Path) -> None:
    data = {"type": "Dataset", "template_args": {"loss_scale": "LastRoundLossScale"}}
    scaled, _ = train(configured(place, data, max_steps=1))
    assert len(numbers(scaled)) == 1
