"""Streams: sources, recorded steps, mixing, saving; and that they are what a data set with a length would be."""

import itertools
import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.dataset import Dataset, DatasetLike, DatasetMeta, IterableDataset, StreamLike
from twinkle.errors import ArgumentError, DataError, EncodeError, TrainingStateError, Unsupported
from twinkle.filter import Filter
from twinkle.preprocessor import Preprocessor


def rows(count: int, name: str = "t") -> list[dict[str, object]]:
    return [{"i": index, "text": f"{name}{index}"} for index in range(count)]


def stream(count: int = 5, name: str = "t", **options: object) -> IterableDataset:
    return IterableDataset(DatasetMeta(name, data=rows(count, name), **options))


def double(columns: dict[str, list[int]], by: int = 2) -> dict[str, list[int]]:
    return {"i": [by * value for value in columns["i"]]}


# Sources


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


MIXED = [
    {"a": 1, "t": "x", "f": 0.5, "l": [1, 2], "messages": [{"role": "user", "content": "ä"}]},
    {"a": None, "t": "", "f": 2.5, "l": [], "messages": []},
    {"a": 3, "t": "z", "f": None, "l": None, "messages": [{"role": "tool", "tool_call_id": "1"}]},
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet", "csv", "txt", "arrow", "feather", "stream.arrow"])
def test_a_file_gives_the_rows_that_a_data_set_holds(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{ending}"
    if ending == "txt":
        write(path, "one\n\ntwo\n")
    elif ending.endswith(("arrow", "feather")):
        write_arrow(path, as_stream=ending.startswith("stream"))
    else:
        Dataset(DatasetMeta(data=MIXED)).save_as(path, batch_size=2)
    read = IterableDataset(DatasetMeta(str(path)))
    assert list(read) == list(read) == list(Dataset(DatasetMeta(str(path))))


def write_arrow(path: Path, *, as_stream: bool) -> None:
    import pyarrow

    table = pyarrow.Table.from_pylist(rows(2500))
    make = pyarrow.ipc.new_stream if as_stream else pyarrow.ipc.new_file
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)


@pytest.mark.full
@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from(["", "1", "-2", "0.5", "2.25", "x", "01"]), min_size=1, max_size=8), st.integers(0, 1))
def test_the_types_of_csv_are_those_of_the_whole_file(cells: list[str], late: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        filler = ["1,x"] * (1000 * late)
        text = "\n".join(["c,other", *filler, *(f"{cell},x" for cell in cells)]) + "\n"
        path = write(Path(folder) / "c.csv", text)
        assert list(IterableDataset(DatasetMeta(str(path)))) == list(Dataset(DatasetMeta(str(path))))


def test_folders_are_read_by_split_file_after_file(tmp_path: Path) -> None:
    write(tmp_path / "train-1.jsonl", '{"n": 1}\n')
    write(tmp_path / "train-2.jsonl", '{"n": 2, "more": 3}\n')
    write(tmp_path / "test.jsonl", '{"n": 9}\n')
    assert list(IterableDataset(DatasetMeta(str(tmp_path)))) == [{"n": 1}, {"n": 2, "more": 3}]
    assert list(IterableDataset(DatasetMeta(str(tmp_path), split="test"))) == [{"n": 9}]


def test_what_datasets_saved_is_read_by_both(tmp_path: Path) -> None:
    import datasets

    hf = datasets.Dataset.from_list(rows(3))
    hf.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=hf, test=hf.select([1])).save_to_disk(str(tmp_path / "splits"))
    for kind in (Dataset, IterableDataset):
        assert list(kind(DatasetMeta(str(tmp_path / "one")))) == rows(3)
        assert list(kind(DatasetMeta(str(tmp_path / "splits"), split="test"))) == rows(3)[1:2]
        with pytest.raises(DataError, match="holds one set and has no split 'test'"):
            kind(DatasetMeta(str(tmp_path / "one"), split="test"))
        with pytest.raises(ArgumentError, match="takes no options, not even 'sep'"):
            kind(DatasetMeta(str(tmp_path / "one")), sep=";")


def test_memory_may_be_anything_that_can_be_read_again() -> None:
    import datasets
    import pyarrow

    hf = datasets.Dataset.from_list(ROWS := rows(3))
    splits = datasets.IterableDatasetDict({"train": hf.to_iterable_dataset(), "test": hf.to_iterable_dataset()})
    columns = {"i": [0, 1, 2], "text": ["t0", "t1", "t2"]}
    functions = (lambda: ROWS, lambda: iter(ROWS), lambda: (row for row in ROWS), lambda: hf)
    for data in (ROWS, tuple(ROWS), columns, hf, hf.to_iterable_dataset(), splits, pyarrow.table(columns), *functions):
        read = IterableDataset(DatasetMeta(data=data))
        assert list(read) == list(read) == ROWS
    assert list(Dataset(DatasetMeta(data=pyarrow.table(columns)))) == ROWS


def test_typed_streams_lose_the_keys_that_arrow_added() -> None:
    import datasets

    given = [{"messages": [{"role": "user", "content": "a"}]}, {"messages": [{"role": "tool", "tool_call_id": "1"}]}]
    typed = datasets.Dataset.from_list(given).to_iterable_dataset()
    assert list(IterableDataset(DatasetMeta(data=typed))) == given


def test_a_stream_has_no_end_unless_it_has_one() -> None:
    endless = IterableDataset(DatasetMeta(data=lambda: ({"i": i} for i in itertools.count())))
    endless.map(double)
    endless.filter(lambda row: row["i"] % 3 == 0)
    assert list(itertools.islice(endless, 3)) == [{"i": 0}, {"i": 6}, {"i": 12}]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (iter([{"a": 1}]), "a list_iterator can be read only once; give the function"),
        (3, "data is a int; give a list of dicts"),
        ("text", "data is a str"),
        (dict, "data is a type"),
    ],
)
def test_what_cannot_be_streamed_is_refused_at_once(data: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        IterableDataset(DatasetMeta(data=data))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "has no rows after loading"),
        (lambda: iter(()), "has no rows after loading"),
        ([{"a": 1}, 2], "row 1: a row must be a dict, but this is a int"),
        ({"a": [1], "b": [1, 2]}, "columns have different lengths"),
        ({"a": "text"}, "column 'a' is a str"),
        (lambda: 3, "data is a int"),
    ],
)
def test_what_only_reading_shows_is_said_then(data: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(IterableDataset(DatasetMeta(data=data)))


def test_files_are_checked_before_and_while_they_are_read(tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.jsonl", '{"a": 1}\n{"a": \n')
    with pytest.raises(DataError, match=r"bad.jsonl, line 2: not JSON"):
        list(IterableDataset(DatasetMeta(str(bad))))
    for name, text in (("a.parquet", "no"), ("b.arrow", "no"), ("c.csv", "a,b\n1,2\n1,2,3\n"), ("d.csv", "")):
        with pytest.raises(DataError, match=f"{name}: not a"):
            list(IterableDataset(DatasetMeta(str(write(tmp_path / name, text)))))
    with pytest.raises(DataError, match=r"there is no file or folder .*nearest: .*bad.jsonl"):
        IterableDataset(DatasetMeta(str(tmp_path / "bda.jsonl")))
    with pytest.raises(DataError, match=r"unknown format '.jsnl'"):
        IterableDataset(DatasetMeta(str(write(tmp_path / "a.jsnl", ""))))
    with pytest.raises(ArgumentError, match="unknown argument 'sepp', nearest: 'sep'"):
        IterableDataset(DatasetMeta(str(tmp_path / "c.csv")), sepp=";")
    with pytest.raises(DataError, match="is one file: it has no subset"):
        IterableDataset(DatasetMeta(str(bad), split="test"))
    with pytest.raises(ArgumentError, match="takes no streaming=False; use Dataset"):
        IterableDataset(DatasetMeta(str(bad)), streaming=False)
    with pytest.raises(ArgumentError, match="revision= is for data sets of a hub"):
        IterableDataset(DatasetMeta(data=rows(1)), revision="x")
    with pytest.raises(DataError, match="names no data"):
        IterableDataset(DatasetMeta())


def test_a_hub_that_can_stream_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    import twinkle.hub

    class Streams:
        def load_dataset(self, reference, subset_name, split, streaming=False, revision="main"):
            return [{"asked": f"{reference} {subset_name} {split} {streaming} {revision}"}]

    class Loads:
        def load_dataset(self, reference, subset_name, split):
            return [{"asked": reference}]

    monkeypatch.setattr(twinkle.hub, "open_hub", lambda reference: Streams() if "s://" in reference else Loads())
    assert list(IterableDataset(DatasetMeta("s://x"), revision="v1")) == [{"asked": "s://x default train True v1"}]
    assert list(IterableDataset(DatasetMeta("l://x"), streaming=True)) == [{"asked": "l://x"}]


@settings(deadline=None)
@given(st.integers(1, 7), st.lists(st.integers(0, 25), min_size=1, max_size=12).map(sorted))
def test_an_ascending_slice_means_the_same_rows_as_in_a_data_set(size: int, wanted: list[int]) -> None:
    assert [row["i"] for row in stream(size, data_slice=wanted)] == [number % size for number in wanted]


def test_slices_go_forwards() -> None:
    assert [row["i"] for row in stream(3, data_slice=range(7))] == [0, 1, 2, 0, 1, 2, 0]
    assert [row["i"] for row in stream(9, data_slice=slice(1, None, 3))] == [1, 4, 7]
    assert [row["i"] for row in stream(9, data_slice=range(4, 5))] == [4]
    for wanted in ([2, 1], range(3, 0, -1), slice(-2, None), slice(None, None, -1), [-1]):
        with pytest.raises(DataError, match="a stream goes forwards"):
            stream(3, data_slice=wanted)
    for wanted, message in (([], "chooses no rows"), ("0:5", "it must be a range"), ([1.5], "whole row numbers")):
        with pytest.raises(DataError, match=message):
            stream(3, data_slice=wanted)


# Steps


class Letters:
    """Counts letters; text 'bad' cannot be encoded, and empty text has no tokens."""

    truncation_strategy = "raise"

    def batch_encode(self, columns, add_generation_prompt=False):
        found = Preprocessor.map_col_to_row(columns)
        for number, row in enumerate(found):
            if row["text"] == "bad":
                raise EncodeError(f"row {number}: the text is bad")
        return {**columns, "input_ids": [list(range(len(row["text"]))) for row in found]}

    def batch_check(self, rows):
        return [row if row["text"] != "bad" else None for row in rows]


def texts(*values: str) -> IterableDataset:
    dataset = IterableDataset(DatasetMeta(data=[{"text": value} for value in values]))
    dataset.set_template(Letters())
    return dataset


@pytest.mark.full
@settings(deadline=None, max_examples=30)
@given(st.integers(2, 200), st.sampled_from([1, 2, 4, 5]), st.sampled_from([1, 7, 64, 1000]), st.integers(1, 4))
def test_steps_give_what_a_data_set_gives_for_any_number_of_workers(
    count: int, modulus: int, batch_size: int, workers: int
) -> None:
    late, eager = stream(count), Dataset(DatasetMeta(data=rows(count)))
    for dataset in (late, eager):
        dataset.map(
            lambda c: {"i": [v for v in c["i"] for _ in range(v % 3)]}, batch_size=batch_size, remove_columns=["text"]
        )
        dataset.map(lambda c: {"j": [str(v) for v in c["i"]]}, remove_columns=[])
        if count > 10:
            dataset.filter(lambda row, by: row["i"] % by == 0, fn_kwargs={"by": modulus})
    expected = list(eager)
    assert list(late) == expected
    parts = [list(late.chunks(worker, workers)) for worker in range(workers)]
    taken_in_turn = [part for turn in itertools.zip_longest(*parts, fillvalue=[]) for part in turn]
    assert list(late.in_order(taken_in_turn)) == expected


def test_encoding_drops_rows_without_tokens_and_names_bad_ones() -> None:
    dataset = texts("abc", "", "d")
    dataset.encode()
    assert [row["input_ids"] for row in dataset] == [[0, 1, 2], [0]]
    bad = texts(*["ok"] * 70, "bad", "ok")
    bad.encode(batch_size=3)
    with pytest.raises(EncodeError, match=r"^row 70: the text is bad$"):
        list(bad)
    doubled = texts(*["ok"] * 70, "bad", "ok")
    doubled.map(lambda columns: {"text": [text for text in columns["text"] for _ in range(2)]})
    doubled.encode()
    with pytest.raises(EncodeError, match=r"^row 64 to 71: the text is bad$"):
        list(doubled)
    bad.check()
    checked = texts("ok", "bad", "fine")
    checked.check()
    checked.encode()
    assert [row["text"] for row in checked] == ["ok", "fine"]


def test_when_no_row_is_left_it_is_an_error() -> None:
    dataset = stream()
    dataset.filter(lambda row: False)
    with pytest.raises(DataError, match=r"has no rows after filter\(<lambda>\)"):
        list(dataset)


def test_a_preprocessor_that_changes_rows_in_place_meets_them_fresh_in_the_next_epoch() -> None:
    def append(columns):
        for value in columns["list"]:
            value.append(1)
        return columns

    for data in ([{"list": []}], {"list": [[]]}):
        dataset = IterableDataset(DatasetMeta(data=data))
        dataset.map(append)
        assert list(dataset) == list(dataset) == [{"list": [1]}]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_proc": 2}, "give DataLoader num_workers="),
        ({"with_indices": True}, "unknown argument 'with_indices'"),
        ({"batch_sise": 2}, "unknown argument 'batch_sise', nearest: 'batch_size'"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batched": False}, "always gets a batch of columns"),
    ],
)
def test_map_refuses_what_nobody_reads(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        stream().map(double, **kwargs)


@pytest.mark.parametrize("result", [None, {"i": 1}, {}, {"i": [1], "j": [1, 2]}])
def test_a_wrong_result_of_map_is_explained(result: object) -> None:
    dataset = stream()
    dataset.map(lambda columns: result)
    with pytest.raises(DataError, match=r"map\(<lambda>\)"):
        list(dataset)


def test_a_stream_has_no_length_and_no_index() -> None:
    dataset = stream()
    assert isinstance(dataset, DatasetLike)
    assert isinstance(dataset, StreamLike)
    for use in (lambda: len(dataset), lambda: dataset[0]):
        with pytest.raises(NotImplementedError, match="IterableDataset is a stream and has no"):
            use()
        with pytest.raises(Unsupported):
            use()


def test_it_pickles() -> None:
    dataset = stream()
    dataset.map(double)
    assert list(pickle.loads(pickle.dumps(dataset))) == list(dataset)


def test_images_are_decoded_as_they_come(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (2, 3)).save(tmp_path / "black.png")
    dataset = IterableDataset(DatasetMeta(data=[{"picture": str(tmp_path / "black.png")}, {"n": 1}]))
    dataset.cast_column("picture")
    first, second = list(dataset)
    assert first["picture"].size == (2, 3)
    assert second == {"n": 1}
    wrong = IterableDataset(DatasetMeta(data=[{"picture": 3}]))
    wrong.cast_column("picture")
    with pytest.raises(DataError, match="column 'picture' cannot hold images"):
        list(wrong)


# Several sets


def three(*counts: int) -> tuple[IterableDataset, Dataset]:
    both = IterableDataset(), Dataset()
    for dataset in both:
        for name, count in zip("abc", counts, strict=False):
            dataset.add_dataset(DatasetMeta(name, data=rows(count, name)))
    return both


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.booleans())
def test_mixing_streams_is_mixing_data_sets(counts: list[int], interleave: bool) -> None:
    late, eager = three(*counts)
    late.mix_dataset(interleave)
    eager.mix_dataset(interleave)
    assert list(late) == list(eager)


def test_a_mix_with_an_endless_stream_ends_with_the_shortest() -> None:
    dataset = stream(2, "a")
    dataset.add_dataset(DatasetMeta("endless", data=lambda: ({"i": i, "text": "e"} for i in itertools.count())))
    dataset.mix_dataset()
    assert [row["text"] for row in dataset] == ["a0", "e", "a1", "e"]


def test_steps_before_mixing_are_those_of_one_set() -> None:
    dataset, _ = three(3, 4)
    second = DatasetMeta("b", data=rows(4, "b"))
    dataset.filter(lambda row: row["i"] > 0, dataset_meta=second)
    dataset.mix_dataset()
    dataset.map(lambda columns: {"text": [text.upper() for text in columns["text"]]})
    assert [row["text"] for row in dataset] == ["A0", "B1", "A1", "B2", "A2", "B3"]
    for change in (lambda: dataset.map(double, dataset_meta=second), lambda: dataset.mix_dataset()):
        with pytest.raises(TrainingStateError, match="mixed already"):
            change()


def test_unmixed_sets_have_no_rows_yet() -> None:
    dataset, _ = three(1, 2)
    for use in (lambda: list(dataset), lambda: dataset.map(double)):
        with pytest.raises(TrainingStateError, match=r"2 data sets were added .*mix_dataset\(\)"):
            use()
    with pytest.raises(DataError, match="is there already"):
        dataset.add_dataset(DatasetMeta("a", data=rows(1, "a")))
    with pytest.raises(DataError, match="no data set 'x' was added"):
        dataset.map(double, dataset_meta=DatasetMeta("x"))
    with pytest.raises(DataError, match="no data set to mix"):
        IterableDataset().mix_dataset()
    with pytest.raises(DataError, match="give IterableDataset a DatasetMeta"):
        list(IterableDataset())


# Saving


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet", "csv"])
def test_a_stream_is_saved_to_its_end(tmp_path: Path, ending: str) -> None:
    dataset = stream(70)
    dataset.map(double)
    dataset.save_as(tmp_path / f"rows.{ending}", batch_size=32)
    assert list(Dataset(DatasetMeta(str(tmp_path / f"rows.{ending}")))) == list(dataset)


def test_training_mode_writes_each_row_once(tmp_path: Path) -> None:
    dataset = stream(5)
    dataset.save_as(tmp_path / "rows.jsonl", mode="training")
    with pytest.raises(TrainingStateError, match="call flush_save"):
        dataset.map(double)
    list(itertools.islice(dataset, 2))
    list(itertools.islice(dataset, 3))
    dataset.flush_save()
    assert [json.loads(line)["i"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == [0, 1, 2]


def test_a_late_column_has_no_place_in_a_table(tmp_path: Path) -> None:
    dataset = IterableDataset(DatasetMeta(data=[{"a": 1}, {"a": 2, "b": 3}]))
    for ending in ("csv", "parquet"):
        with pytest.raises(DataError, match="a row has the column 'b', but the file has a as the first row does"):
            dataset.save_as(tmp_path / f"rows.{ending}")
    dataset.save_as(tmp_path / "rows.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    with pytest.raises(ArgumentError, match="unknown format 'xml'"):
        dataset.save_as(tmp_path / "rows", format="xml")


def test_what_remembers_rows_forgets_them_when_they_come_anew() -> None:
    class New(Filter):
        def __init__(self) -> None:
            self.seen: set[object] = set()

        def reset(self) -> None:
            self.seen.clear()

        def __call__(self, row):
            new = row["i"] % 3 not in self.seen
            self.seen.add(row["i"] % 3)
            return new

    dataset = stream(9)
    dataset.filter(New())
    assert [row["i"] for row in dataset] == [row["i"] for row in dataset] == [0, 1, 2]
    mixed, _ = three(9, 2)
    mixed.filter(New(), dataset_meta=DatasetMeta("a", data=rows(9, "a")))
    mixed.mix_dataset(interleave=False)
    mixed.filter(New())
    assert [row["i"] for row in mixed] == [row["i"] for row in mixed] == [0, 1, 2]
