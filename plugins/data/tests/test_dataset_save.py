"""Saving: every format reads back, files are whole or absent, rows are recorded as they are read."""

import json
from pathlib import Path

import pytest

from twinkle.dataset import Dataset, DatasetMeta
from twinkle.errors import ArgumentError, DataError, OutputError, TrainingStateError

ROWS = [
    {"n": 1, "text": "a,b", "messages": [{"role": "user", "content": "ä"}]},
    {"n": None, "text": 'c"d', "messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
    {"n": 3, "text": "e\nf", "messages": []},
]


def dataset() -> Dataset:
    return Dataset(DatasetMeta(data=ROWS))


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("batch_size", [1, 2, 1000])
def test_what_is_saved_reads_back(tmp_path: Path, ending: str, batch_size: int) -> None:
    path = tmp_path / "new" / f"rows.{ending}"
    dataset().save_as(str(path), batch_size=batch_size)
    assert list(Dataset(DatasetMeta(str(path)))) == ROWS
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_csv_holds_nested_values_as_json(tmp_path: Path) -> None:
    dataset().save_as(tmp_path / "rows.csv", batch_size=2)
    back = list(Dataset(DatasetMeta(str(tmp_path / "rows.csv"))))
    assert [row["n"] for row in back] == [1, None, 3]
    assert [row["text"] for row in back] == [row["text"] for row in ROWS]
    assert [json.loads(row["messages"]) for row in back] == [row["messages"] for row in ROWS]


def test_format_goes_before_the_ending(tmp_path: Path) -> None:
    dataset().save_as(tmp_path / "rows.txt", format="jsonl")
    assert len((tmp_path / "rows.txt").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output_path": "rows.jsnl"}, r"unknown format 'jsnl' \(nearest: 'jsonl'\); format is one of jsonl"),
        ({"output_path": "rows"}, "unknown format ''"),
        ({"format": "xml"}, "unknown format 'xml'"),
        ({"mode": "later"}, "mode is 'later'; use 'immediate' or 'training'"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"orient": "records"}, "has no argument 'orient'"),
    ],
)
def test_save_as_refuses_what_it_cannot_do(tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    arguments = {"output_path": "rows.jsonl", **arguments}
    arguments["output_path"] = tmp_path / str(arguments["output_path"])
    with pytest.raises(ArgumentError, match=message):
        dataset().save_as(**arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_save_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("old")
    unsaveable = Dataset(DatasetMeta(data=[{"a": b"\xff"}] * 3))
    with pytest.raises(DataError, match=r"a row has a value that is not JSON.*save it as parquet"):
        unsaveable.save_as(path, batch_size=1)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        dataset().save_as(tmp_path / "file" / "rows.jsonl")


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
def test_training_mode_writes_each_row_once_in_the_order_of_reading(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"rows.{ending}"
    data = dataset()
    data.save_as(path, mode="training", batch_size=1)
    assert not path.exists()
    for index in (2, 0, -1, 0):
        data[index]
    data.flush_save()
    assert [row["n"] for row in Dataset(DatasetMeta(str(path)))] == [3, 1]
    data[1]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_recording_has_a_beginning_and_an_end(tmp_path: Path) -> None:
    data = dataset()
    with pytest.raises(TrainingStateError, match="none was begun"):
        data.flush_save()
    data.save_as(tmp_path / "rows.jsonl", mode="training")
    with pytest.raises(TrainingStateError, match="call flush_save"):
        data.save_as(tmp_path / "others.jsonl", mode="training")
    with pytest.raises(TrainingStateError, match="call flush_save"):
        data.filter(lambda row: True)
    data.flush_save()
    assert (tmp_path / "rows.jsonl").read_text() == ""
