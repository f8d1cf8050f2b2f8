"""Lazy data sets: what is recorded, what is done at once, and what a row must be."""

import pickle

import pytest

from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta, LazyDataset
from twinkle.errors import ArgumentError, DataError, EncodeError, TrainingStateError, Unsupported


def rows(count: int, name: str = "t") -> list[dict[str, object]]:
    return [{"i": index, "text": f"{name}{index}"} for index in range(count)]


def lazy(count: int = 5, name: str = "t") -> LazyDataset:
    return LazyDataset(DatasetMeta(name, data=rows(count, name)))


def double(columns: dict[str, list[int]], by: int = 2) -> dict[str, list[int]]:
    return {"i": [by * value for value in columns["i"]]}


def only_i(size: int = 5) -> LazyDataset:
    return LazyDataset(DatasetMeta(data=[{"i": row["i"]} for row in rows(size)]))


class Letters:
    """Counts letters; 'bad' cannot be encoded, and empty text has no tokens."""

    def __init__(self, truncation_strategy: str = "raise") -> None:
        self.truncation_strategy = truncation_strategy

    def batch_encode(self, columns, add_generation_prompt=False):
        if "bad" in columns["text"]:
            raise EncodeError("row 0: the text is bad")
        return {"input_ids": [list(range(len(text) + add_generation_prompt)) for text in columns["text"]]}

    def batch_check(self, rows):
        return [row if row["text"] != "bad" else None for row in rows]


def texts(*values: str, strategy: str = "raise") -> LazyDataset:
    dataset = LazyDataset(DatasetMeta(data=[{"text": value} for value in values]))
    dataset.set_template(Letters(strategy))
    return dataset


def test_steps_run_when_a_row_is_read_and_only_for_that_row() -> None:
    seen: list[list[int]] = []

    def noted(columns):
        seen.append(columns["i"])
        return double(columns)

    dataset = only_i()
    dataset.map(noted)
    dataset.map(double, fn_kwargs={"by": 5})
    assert (len(dataset), seen) == (5, [])
    assert dataset[3] == {"i": 30}
    assert dataset[-1] == {"i": 40}
    assert seen == [[3], [4]]
    with pytest.raises(IndexError):
        dataset[5]


def test_rows_are_those_of_a_data_set_that_did_the_same_at_once() -> None:
    eager, late = Dataset(DatasetMeta(data=rows(7))), lazy(7)
    for dataset in (eager, late):
        dataset.filter(lambda row: row["i"] != 2)
        dataset.map(double, remove_columns=["i"])
    assert list(late) == list(eager)
    assert late[1:4] == eager[1:4]
    assert late[[5, 0]] == eager[[5, 0]]
    assert late["i"] == eager["i"]
    assert sorted(late.column_names) == sorted(eager.column_names)
    with pytest.raises(ArgumentError, match="row 0 has no column 'none'"):
        late["none"]


def test_encoding_is_recorded_too() -> None:
    dataset = texts("abc", "de")
    dataset.encode(add_generation_prompt=True)
    assert list(dataset) == [{"input_ids": [0, 1, 2, 3]}, {"input_ids": [0, 1, 2]}]


def test_a_row_that_would_be_dropped_is_an_error_and_the_loader_takes_another(caplog: pytest.LogCaptureFixture) -> None:
    dataset = texts("abc", "", "bad")
    dataset.encode()
    with pytest.raises(DataError, match="row 1: encode made 0 rows of it"):
        dataset[1]
    with pytest.raises(EncodeError, match="row 2: the text is bad"):
        dataset[2]
    assert list(DataLoader(dataset, batch_size=3)) == [[{"input_ids": [0, 1, 2]}] * 3]
    assert caplog.text.count("row 0 takes its place") == 2
    checked = texts("bad", "ok")
    checked.check()
    assert checked[1] == {"text": "ok"}
    with pytest.raises(DataError, match="row 0: check made 0 rows"):
        checked[0]


def test_what_needs_all_rows_or_makes_several_is_refused() -> None:
    with pytest.raises(Unsupported, match="'split' makes several rows of one"):
        texts("abc", strategy="split").encode()
    many = only_i()
    many.map(lambda columns: {"i": columns["i"] * 2})
    with pytest.raises(DataError, match=r"row 0: map.* made 2 rows of it"):
        many[0]
    with pytest.raises(ArgumentError, match="give DataLoader num_workers="):
        lazy().map(double, num_proc=4)
    with pytest.raises(ArgumentError, match="unknown argument 'with_indices'"):
        lazy().map(double, with_indices=True)
    with pytest.raises(Unsupported, match="load_from_cache_file=True"):
        lazy().map(double, load_from_cache_file=True)
    with pytest.raises(TrainingStateError, match="encode needs a template"):
        lazy().encode()
    with pytest.raises(Unsupported, match="only when it makes it"):
        lazy().row_lengths()
    lazy().map(double, load_from_cache_file=False, batched=True, batch_size=8)


def test_a_filter_sees_raw_rows_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    dataset = lazy()
    dataset.map(double)
    dataset.filter(lambda row: row["i"] >= 3)
    assert "does not see the result of map(double)" in caplog.text
    assert dataset["i"] == [6, 8]
    with pytest.raises(DataError, match="no rows after filter"):
        dataset.filter(lambda row: False)


def two() -> tuple[LazyDataset, DatasetMeta, DatasetMeta]:
    first, second = (DatasetMeta(name, data=rows(count, name)) for name, count in (("a", 3), ("b", 2)))
    dataset = LazyDataset(first)
    dataset.add_dataset(second)
    return dataset, first, second


@pytest.mark.parametrize(
    ("interleave", "expected"),
    [(True, ["a0", "b0", "a1", "b1", "a2", "b0"]), (False, ["a0", "a1", "a2", "b0", "b1"])],
)
def test_interleaving_wraps_shorter_sets_and_concatenating_keeps_all(interleave: bool, expected: list[str]) -> None:
    dataset, _, _ = two()
    dataset.mix_dataset(interleave)
    assert dataset["text"] == expected
    assert len(dataset) == len(expected)


def test_steps_before_mixing_are_those_of_one_set() -> None:
    dataset, _, second = two()
    dataset.map(double, dataset_meta=second)
    dataset.mix_dataset()
    dataset.map(lambda columns: {"i": [1 + value for value in columns["i"]]})
    assert dataset["i"] == [1, 1, 2, 3, 3, 1]
    with pytest.raises(TrainingStateError, match="filter each before mix_dataset"):
        dataset.filter(lambda row: True)
    with pytest.raises(TrainingStateError, match="mixed already"):
        dataset.mix_dataset()
    with pytest.raises(TrainingStateError, match="mixed already"):
        dataset.add_dataset(DatasetMeta(data=rows(1)))


def test_unmixed_sets_have_no_rows_yet() -> None:
    dataset, _, _ = two()
    for use in (lambda: len(dataset), lambda: dataset[0], lambda: dataset.map(double)):
        with pytest.raises(TrainingStateError, match=r"2 data sets were added .*mix_dataset\(\)"):
            use()


def test_it_pickles_and_works_in_worker_processes() -> None:
    dataset = only_i(6)
    dataset.map(double)
    assert list(pickle.loads(pickle.dumps(dataset))) == list(dataset)
    assert list(DataLoader(dataset, batch_size=4, num_workers=2)) == [
        [{"i": 0}, {"i": 2}, {"i": 4}, {"i": 6}],
        [{"i": 8}, {"i": 10}],
    ]


def test_rows_of_sets_with_other_columns_meet_in_a_batch() -> None:
    dataset = LazyDataset(DatasetMeta("a", data=[{"x": 1}]))
    dataset.add_dataset(DatasetMeta("b", data=[{"y": 2}]))
    dataset.mix_dataset()
    assert list(DataLoader(dataset, batch_size=2)) == [[{"x": 1, "y": None}, {"x": None, "y": 2}]]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_saving_writes_rows_as_they_are_made(tmp_path, ending: str) -> None:
    dataset = only_i(4)
    dataset.map(double)
    dataset.save_as(tmp_path / f"all.{ending}")
    assert list(Dataset(DatasetMeta(str(tmp_path / f"all.{ending}")))) == list(dataset)
    dataset.save_as(tmp_path / f"read.{ending}", mode="training")
    assert (dataset[2], dataset[0], dataset[2]) == ({"i": 4}, {"i": 0}, {"i": 4})
    with pytest.raises(TrainingStateError, match="call flush_save"):
        dataset.map(double)
    dataset.flush_save()
    assert list(Dataset(DatasetMeta(str(tmp_path / f"read.{ending}")))) == [{"i": 4}, {"i": 0}]


def test_images_are_decoded_in_every_set_that_has_them(tmp_path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (2, 3)).save(tmp_path / "black.png")
    dataset = LazyDataset(DatasetMeta("a", data=[{"picture": str(tmp_path / "black.png")}]))
    dataset.add_dataset(DatasetMeta("b", data=[{"n": 1}]))
    dataset.cast_column("picture")
    dataset.mix_dataset()
    assert dataset[0]["picture"].size == (2, 3)
    assert dataset[1] == {"n": 1}
