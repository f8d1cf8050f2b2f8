"""Where rows come from: memory, files, folders, hubs; slices; and malformed sources."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twinkle.dataset import Dataset, DatasetMeta, IterableDataset, LazyDataset
from twinkle.errors import ArgumentError, ComponentNotFound, DataError, HubError, Unsupported
from twinkle_data.dataset.sources import files_of_split, slice_indices

ROWS = [{"a": 1, "t": "x"}, {"a": 2, "t": "ü"}]


def load(path: object, **kwargs: object) -> list[dict[str, object]]:
    return list(Dataset(DatasetMeta(str(path), **kwargs)))


def test_memory_may_be_rows_columns_a_data_set_or_a_function() -> None:
    import datasets

    hf = datasets.Dataset.from_list(ROWS)
    columns = {"a": [1, 2], "t": ["x", "ü"]}
    for data in (ROWS, columns, hf, hf.with_format("torch"), iter(ROWS), lambda: ROWS, lambda: (row for row in ROWS)):
        assert list(Dataset(DatasetMeta(data=data))) == ROWS
    splits = datasets.DatasetDict(train=hf, test=hf.select([1]))
    assert list(Dataset(DatasetMeta(data=splits, split="test"))) == ROWS[1:]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "has no rows after loading"),
        ({}, "has no rows after loading"),
        (3, "data is a int; give a list of dicts"),
        ("text", "data is a str"),
        ([1], "row 0: a row must be a dict, but this is a int"),
        ({"a": "text"}, "column 'a' is a str"),
        ({"a": [1], "b": [1, 2]}, "columns have different lengths: {'a': 1, 'b': 2}"),
        ([{"a": 1}, {"a": "x"}], r"column 'a' mixes types \(int, str\)"),
    ],
)
def test_wrong_data_is_explained(data: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Dataset(DatasetMeta(data=data))


@pytest.mark.parametrize("texts", [["ok", "a\ud800b"], [["ok"], ["a\ud800b"]], [{"ok": 1}, {"x": "a\ud800b"}]])
def test_text_that_is_not_unicode_is_named_by_row_and_column(texts: list[object], tmp_path: Path) -> None:
    rows = [{"n": 0, "t": text} for text in texts]
    message = r"row 1, column 't': not valid Unicode, a lone surrogate in '.*a\\ud800b"
    for data in (rows, {"n": [0, 0], "t": texts}):
        with pytest.raises(DataError, match=message):
            Dataset(DatasetMeta(data=data))
    with pytest.raises(DataError, match=f"a.jsonl: {message}"):
        load(write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows)))


def test_rows_that_are_not_unicode_are_counted_over_chunks() -> None:
    with pytest.raises(DataError, match="row 10001, column 't'"):
        Dataset(DatasetMeta(data=({"t": "\ud800" if number == 10_001 else "x"} for number in range(10_003))))


def test_a_meta_without_any_source_is_an_error() -> None:
    with pytest.raises(DataError, match="names no data"):
        Dataset(DatasetMeta())
    with pytest.raises(ArgumentError, match="revision= is for data sets of a hub"):
        Dataset(DatasetMeta(data=ROWS), revision="x")


def test_streams_are_not_for_this_class(tmp_path: Path) -> None:
    import datasets

    with pytest.raises(Unsupported, match="is a stream"):
        Dataset(DatasetMeta(data=datasets.Dataset.from_list(ROWS).to_iterable_dataset()))
    with pytest.raises(Unsupported, match="does not stream"):
        LazyDataset(DatasetMeta(data=ROWS), streaming=True)
    assert len(Dataset(DatasetMeta(data=ROWS), streaming=False)) == 2


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def write_parquet(path: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    assert load(write(tmp_path / "a.jsonl", lines)) == ROWS
    assert load(write(tmp_path / "b.jsonl", "\ufeff\n" + lines + "\n\n")) == ROWS
    assert load(write(tmp_path / "lines.json", lines)) == ROWS
    assert load(write(tmp_path / "list.json", json.dumps(ROWS, indent=1))) == ROWS
    assert load(write(tmp_path / "columns.json", '{"a": [1, 2], "t": ["x", "ü"]}')) == ROWS
    assert load(write(tmp_path / "one.json", '{"a": 1, "t": "x"}')) == ROWS[:1]
    assert load(write(tmp_path / "a.csv", "a,t\n1,x\n2,ü\n")) == ROWS
    assert load(write_parquet(tmp_path / "a.parquet")) == ROWS
    assert load(write(tmp_path / "a.txt", "eins\n\nzwei\n")) == [{"text": "eins"}, {"text": "zwei"}]
    assert not list(tmp_path.glob("*cache*"))


def test_dates_and_empty_fields_stay_what_they_are(tmp_path: Path) -> None:
    assert load(write(tmp_path / "d.jsonl", '{"d": "2024-01-01"}\n')) == [{"d": "2024-01-01"}]
    assert load(write(tmp_path / "d.csv", "d,e\n2024-01-01,\nx,y\n")) == [
        {"d": "2024-01-01", "e": None},
        {"d": "x", "e": "y"},
    ]


def column(folder: Path, *cells: str) -> list[object]:
    text = "".join(f"{cell},x\n" for cell in cells)
    return [row["c"] for row in load(write(folder / "c.csv", f"c,other\n{text}"))]


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["NA", "null", "None", "nan", ""], ["NA", "null", "None", "nan", None]),
        (["01234", "", "98765"], ["01234", None, "98765"]),
        (["1", "", "-3"], [1, None, -3]),
        (["0.5", "-2.25", ""], [0.5, -2.25, None]),
        (["1", "0.5"], ["1", "0.5"]),
        (["1.50", "2.0"], ["1.50", "2.0"]),
        (["True", "False"], ["True", "False"]),
        (["inf", "1.0"], ["inf", "1.0"]),
        (["9223372036854775808", "1"], ["9223372036854775808", "1"]),
        ([" 1", "1_000"], [" 1", "1_000"]),
        (["", '""'], [None, None]),
    ],
)
def test_a_column_of_csv_is_numbers_only_if_nothing_is_lost(
    cells: list[str], values: list[object], tmp_path: Path
) -> None:
    assert column(tmp_path, *cells) == values


@pytest.mark.full
@given(st.lists(st.integers() | st.floats() | st.text("0123456789.-+e_ NAnul", max_size=6), min_size=1, max_size=4))
def test_cells_of_csv_keep_their_text(values: list[object]) -> None:
    import tempfile

    cells = [str(value) for value in values]
    with tempfile.TemporaryDirectory() as folder:
        read = column(Path(folder), *cells)
    assert ["" if value is None else str(value) for value in read] == cells


def test_a_line_of_csv_may_end_early_but_not_late(tmp_path: Path) -> None:
    assert load(write(tmp_path / "a.csv", "a,b\n1\n2,x\n")) == [{"a": 1, "b": None}, {"a": 2, "b": "x"}]
    with pytest.raises(DataError, match="not a table separated by ','"):
        load(write(tmp_path / "b.csv", "a,b\n1,2,3\n4,5,6\n"))


def test_readers_have_options_of_their_own(tmp_path: Path) -> None:
    semicolons = write(tmp_path / "a.csv", "1;x\n2;ü\n")
    assert list(Dataset(DatasetMeta(str(semicolons)), sep=";", names=["a", "t"])) == ROWS
    parquet = write_parquet(tmp_path / "a.parquet")
    assert list(Dataset(DatasetMeta(str(parquet)), columns=["a"])) == [{"a": 1}, {"a": 2}]
    with pytest.raises(DataError, match="no column 'b'; it has a, t"):
        Dataset(DatasetMeta(str(parquet)), columns=["b"])
    with pytest.raises(ArgumentError, match="unknown argument 'sepp', nearest: 'sep'"):
        Dataset(DatasetMeta(str(semicolons)), sepp=";")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": \n', r"a.jsonl, line 2: not JSON: .*column 6"),
        ("a.jsonl", '{"a": 1}\n\n[1]\n', r"a.jsonl, line 3: a row must be a JSON object, but this is a list"),
        ("a.jsonl", "", "has no rows after loading"),
        ("a.json", '[{"a": 1},\n {"a": }]', r"a.json, line 2: not JSON"),
        ("a.json", '{"a": 1}\n{"a": oops}\n', r"a.json, line 2: not JSON"),
        ("a.json", "[1]", "item 0: a row must be a JSON object"),
        ("a.csv", "a,b\n1,2\n1,2,3\n", r"a.csv: not a table separated by ',': .*line 3"),
        ("a.csv", "", r"a.csv: not a table"),
        ("a.txt", "\n\n", "has no rows after loading"),
        ("a.parquet", "nonsense", r"a.parquet: not a Parquet file"),
        ("a.josnl", "{}", r"a.josnl: unknown format '.josnl' \(nearest: .jsonl\); a data file ends in .jsonl, .json"),
    ],
)
def test_a_malformed_file_is_named_with_the_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(write(tmp_path / name, text))


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(DataError, match=r"a.jsonl: not UTF-8 text at byte 7"):
        load(tmp_path / "a.jsonl")


def test_a_missing_file_names_the_nearest_and_the_hubs(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", "{}")
    with pytest.raises(DataError, match=r"no file or folder .*trian.jsonl.*nearest: .*train.jsonl.*hf://owner/name"):
        load(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match=r"no file or folder '.*org/rows.jsonl'"):
        load("org/rows.jsonl")


def test_an_id_without_a_prefix_belongs_to_the_default_hub_unless_it_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import twinkle.hub

    class Fake:
        def load_dataset(self, reference: str, subset_name: str, split: str):
            if reference.endswith("nothing"):
                raise HubError(f"{reference}: there is no such repository")
            return [{"asked": reference}]

    monkeypatch.setattr(twinkle.hub, "open_hub", lambda reference: Fake())
    monkeypatch.chdir(tmp_path)
    assert list(Dataset(DatasetMeta("org/rows"))) == [{"asked": "ms://org/rows"}]
    assert list(IterableDataset(DatasetMeta("org/rows"))) == [{"asked": "ms://org/rows"}]
    monkeypatch.setenv("TWINKLE_DEFAULT_HUB", "hf")
    assert list(Dataset(DatasetMeta("org/rows"))) == [{"asked": "hf://org/rows"}]
    for cls in (Dataset, IterableDataset):
        with pytest.raises(
            HubError, match=r"hf://org/nothing: there is no such repository; there is no local '.*nothing'"
        ):
            cls(DatasetMeta("org/nothing"))
    write(tmp_path / "org" / "rows" / "train.jsonl", '{"local": 1}\n')
    assert list(Dataset(DatasetMeta("org/rows"))) == [{"local": 1}]


def test_a_folder_is_read_by_split_and_subset(tmp_path: Path) -> None:
    write(tmp_path / "train-2.jsonl", '{"n": 2}\n')
    write(tmp_path / "train-1.jsonl", '{"n": 1, "more": [{"k": 1}]}\n')
    write(tmp_path / "test" / "data.jsonl", '{"n": 3}\n')
    write(tmp_path / "other" / "rows.csv", "n\n4\n")
    write(tmp_path / "README.md", "not data")
    write(tmp_path / ".hidden" / "train.jsonl", '{"n": 9}\n')
    assert load(tmp_path) == [{"n": 1, "more": [{"k": 1}]}, {"n": 2, "more": None}]
    assert load(tmp_path, split="test") == [{"n": 3}]
    assert load(tmp_path, subset_name="other") == [{"n": 4}]
    with pytest.raises(DataError, match="no file of split 'validation'; it has"):
        load(tmp_path, split="validation")
    with pytest.raises(DataError, match=r"there is no folder .*missing"):
        load(tmp_path, subset_name="missing")


def test_a_folder_without_split_words_is_the_training_split(tmp_path: Path) -> None:
    write(tmp_path / "part.jsonl", '{"n": 1}\n')
    assert load(tmp_path) == [{"n": 1}]
    with pytest.raises(DataError, match="no file of split 'test'"):
        load(tmp_path, split="test")
    write(tmp_path / "part.csv", "n\n2\n")
    with pytest.raises(DataError, match="mixes formats"):
        load(tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="holds no data file"):
        load(tmp_path / "none")


@pytest.mark.parametrize(
    ("file", "split"),
    [
        ("tr/test/train-like_train.jsonl", "test"),
        ("train/eval_questions.jsonl", "train"),
        ("mixed-train/test-00000.jsonl", "test"),
        ("gsm-train/part.jsonl", "train"),
        ("test/train/part.jsonl", "train"),
        ("dev.jsonl", "validation"),
    ],
)
def test_a_file_belongs_to_one_split(file: str, split: str, tmp_path: Path) -> None:
    for name in (file, "other/train.jsonl", "other/test.jsonl", "other/validation.jsonl"):
        write(tmp_path / name, "{}\n")
    splits = {name: files_of_split(tmp_path, name) for name in ("train", "test", "validation")}
    assert [name for name, files in splits.items() if tmp_path / file in files] == [split]


def test_a_split_may_have_the_name_that_its_files_have(tmp_path: Path) -> None:
    write(tmp_path / "dev.jsonl", "{}\n")
    assert files_of_split(tmp_path, "dev") == files_of_split(tmp_path, "validation") == [tmp_path / "dev.jsonl"]


def test_a_file_that_names_two_splits_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "train_test.jsonl", "{}\n")
    for split in ("train", "test"):
        with pytest.raises(DataError, match=r"train_test.jsonl names the splits test and train; rename it"):
            files_of_split(tmp_path, split)


def test_one_file_has_no_splits(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "{}\n")
    for meta in (DatasetMeta(str(path), split="test"), DatasetMeta(str(path), subset_name="x")):
        with pytest.raises(DataError, match="is one file: it has no subset"):
            Dataset(meta)


def test_a_scheme_that_no_hub_offers_is_an_error() -> None:
    with pytest.raises(ComponentNotFound, match="nowhere://x"):
        load("nowhere://x")


def test_a_hub_gives_rows_for_subset_split_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    import twinkle.hub

    class Fake:
        def load_dataset(self, reference: str, subset_name: str, split: str, revision: str = "main"):
            return [{"asked": f"{reference} {subset_name} {split} {revision}"}]

    monkeypatch.setattr(twinkle.hub, "open_hub", lambda reference: Fake())
    dataset = Dataset(DatasetMeta("fake://x", subset_name="s", split="test"), revision="v1")
    assert list(dataset) == [{"asked": "fake://x s test v1"}]
    with pytest.raises(ArgumentError, match="unknown argument 'revison', nearest: 'revision'"):
        Dataset(DatasetMeta("fake://x"), revison="v1")


# Slices


def chosen(data_slice: object) -> list[object]:
    return Dataset(DatasetMeta(data=[{"i": i} for i in range(5)], data_slice=data_slice))["i"]


def test_slices_may_be_ranges_slices_lists_or_iterators() -> None:
    assert chosen(range(2)) == [0, 1]
    assert chosen(slice(1, None, 2)) == [1, 3]
    assert chosen([4, 0, 4]) == [4, 0, 4]
    assert chosen(index for index in (2, 3)) == [2, 3]
    assert chosen(numpy.array([1, 2])) == [1, 2]
    assert chosen({3}) == [3]


def test_indices_beyond_the_length_wrap() -> None:
    assert chosen(range(12)) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert chosen([-1, 5]) == [4, 0]


@given(st.lists(st.integers(-1000, 1000)), st.integers(1, 50))
def test_an_index_means_the_row_modulo_the_length(indices: list[int], size: int) -> None:
    assert slice_indices(indices, size) == [index % size for index in indices]


@pytest.mark.parametrize(
    ("data_slice", "message"),
    [
        ([], "no rows after data_slice"),
        (range(0), "no rows after data_slice"),
        ([1.5], "data_slice holds 1.5; it must hold whole row numbers"),
        ("0:5", "data_slice is '0:5'; it must be a range"),
        ([True, False], r"data_slice holds True; it must hold row numbers. .* enumerate\(mask\) if wanted\]"),
        (numpy.array([True, False]), "it must hold row numbers"),
        (torch.tensor([True, False]), "it must hold row numbers"),
    ],
)
def test_a_wrong_slice_is_explained(data_slice: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        chosen(data_slice)


def test_the_id_tells_source_split_slice_and_data_apart() -> None:
    metas = [
        DatasetMeta("x"),
        DatasetMeta("x", split="test"),
        DatasetMeta("x", subset_name="s"),
        DatasetMeta("x", data_slice=range(3)),
        DatasetMeta("x", data_slice=list(range(100))),
        DatasetMeta("x", data_slice=list(range(101))),
        DatasetMeta(data=ROWS),
        DatasetMeta(data=ROWS[:1]),
        DatasetMeta(data=chosen),
    ]
    ids = [meta.get_id() for meta in metas]
    assert len(set(ids)) == len(ids)
    assert [meta.get_id() for meta in metas] == ids
    assert DatasetMeta("x").get_id() == "x:default:train"


@pytest.mark.parametrize("rows", [[{"a": 1}], {"a": [1]}, 3])
def test_rows_given_as_the_id_of_a_data_set_are_told_where_they_belong(rows: Any) -> None:
    with pytest.raises(ArgumentError, match=r"dataset_id is a \w+, not a text; rows in memory go into data"):
        DatasetMeta(rows)
