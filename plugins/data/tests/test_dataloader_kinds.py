"""The data loader over every kind of data set: each row once an epoch, divided among ranks, continued at any point."""

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.dataloader import DataLoader
from twinkle.dataset import (
    Dataset,
    DatasetMeta,
    IterableDataset,
    IterablePackingDataset,
    LazyDataset,
    PackingDataset,
)
from twinkle.errors import ArgumentError, ComponentTypeError, DataError, Unsupported
from twinkle.mesh import DeviceMesh


class RankMesh(DeviceMesh):
    """A mesh seen from a chosen data rank."""

    rank = 0

    @property
    def data_rank(self) -> int:
        return self.rank


def mesh_of(ranks: int, rank: int) -> RankMesh:
    mesh = RankMesh(mesh=numpy.arange(ranks), mesh_dim_names=("dp",))
    mesh.rank = rank
    return mesh


def rows(count: int) -> list[dict[str, Any]]:
    return [{"input_ids": [index] * (1 + index * index % 7)} for index in range(count)]


def packing(kind: type) -> Callable[[int], Any]:
    def make(count: int) -> Any:
        dataset = kind(DatasetMeta(data=rows(count)))
        dataset.set_template(Limit())
        dataset.pack_dataset()
        return dataset

    return make


class Limit:
    max_length = 11

    def batch_encode(self, columns, add_generation_prompt=False):
        return columns


def lazily(count: int) -> LazyDataset:
    dataset = LazyDataset(DatasetMeta(data=rows(count)))
    dataset.map(lambda columns: columns)
    return dataset


def streamed(count: int) -> IterableDataset:
    """A stream with a filter that leaves `count` rows, so that raw and kept rows are numbered differently."""
    dataset = IterableDataset(
        DatasetMeta(data=lambda: (row for row in rows(count) for row in (row, {"input_ids": []})))
    )
    dataset.filter(lambda row: bool(row["input_ids"]))
    return dataset


KINDS: dict[str, Callable[[int], Any]] = {
    "list": rows,
    "Dataset": lambda count: Dataset(DatasetMeta(data=rows(count))),
    "LazyDataset": lazily,
    "PackingDataset": packing(PackingDataset),
    "IterableDataset": streamed,
    "IterablePackingDataset": packing(IterablePackingDataset),
}
STREAMS = ("IterableDataset", "IterablePackingDataset")


def items_of(dataset: Any) -> list[tuple[int, ...]]:
    return [key(row) for row in dataset]


def key(row: dict[str, Any]) -> tuple[int, ...]:
    """Tell a row, or a pack, by its tokens."""
    return tuple(row["input_ids"])


def read(loader: DataLoader) -> list[list[tuple[int, ...]]]:
    return [[key(row) for row in batch] for batch in loader]


def options_of(kind: str, shuffle: bool) -> dict[str, Any]:
    return {"shuffle": shuffle, **({"shuffle_buffer": 5} if shuffle and kind in STREAMS else {})}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=12)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.sampled_from(["rows", "tokens"]))
def test_every_row_comes_once_an_epoch_over_all_ranks(
    kind: str, count: int, ranks: int, per_rank: int, shuffle: bool, balance: str
) -> None:
    balance = "rows" if kind == "LazyDataset" else balance
    dataset = KINDS[kind](8 * ranks + count)
    options = {"batch_size": ranks * per_rank, "balance": balance, **options_of(kind, shuffle)}
    loaders = [DataLoader(dataset, device_mesh=mesh_of(ranks, rank), **options) for rank in range(ranks)]
    items = items_of(dataset)
    for _ in range(2):
        parts = [read(loader) for loader in loaders]
        assert all(part for of_rank in parts for part in of_rank), "no rank is left without rows"
        batches = [list(itertools.chain(*pieces)) for pieces in zip(*parts, strict=True)]
        assert [len(batch) for batch in batches[:-1]] == [ranks * per_rank] * (len(batches) - 1)
        seen = [item for batch in batches for item in batch]
        left_out = len(items) % (ranks * per_rank)
        assert len(items) - len(seen) == (left_out if left_out < ranks else 0)
        assert len(set(seen)) == len(seen)
        assert set(seen) <= set(items)
        if not shuffle and balance == "rows":
            assert seen == items[: len(seen)]
    assert {loader.get_state()["consumed_train_samples"] for loader in loaders} == {2 * len(seen)}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=12)
@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 2), st.booleans(), st.integers(0, 12), st.booleans())
def test_a_resumed_loader_continues_with_the_rows_that_come_next(
    kind: str, count: int, ranks: int, extra: int, shuffle: bool, point: int, by_tokens: bool
) -> None:
    dataset = KINDS[kind](8 * ranks + count)
    balance = "tokens" if by_tokens and kind != "LazyDataset" else "rows"
    options = {"batch_size": ranks * (1 + extra), "balance": balance, **options_of(kind, shuffle)}
    for rank in {0, ranks - 1}:
        make = lambda rank=rank: DataLoader(dataset, device_mesh=mesh_of(ranks, rank), **options)  # noqa: E731
        straight = list(itertools.islice(for_ever(make()), point + 6))
        resumed = make()
        resumed.resume_from_checkpoint(straight[point - 1][1] if point else 0)
        assert list(itertools.islice(for_ever(resumed), 6)) == straight[point:]


def for_ever(loader: DataLoader) -> Iterator[tuple[list[tuple[int, ...]], int]]:
    while True:
        for batch in loader:
            yield [key(row) for row in batch], loader.get_state()["consumed_train_samples"]


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize(
    "options", [{"num_workers": 1}, {"num_workers": 3}, {"num_workers": 2, "persistent_workers": True}]
)
def test_workers_change_neither_order_nor_count(kind: str, options: dict[str, Any]) -> None:
    alone, helped = (DataLoader(KINDS[kind](200), batch_size=7, shuffle=True, **o) for o in ({}, options))
    for loader in (alone, helped):
        loader.resume_from_checkpoint(14)
    assert [read(helped), read(helped)] == [read(alone), read(alone)]
    for _ in helped:
        break  # what workers read ahead is not consumed
    assert helped.get_state()["consumed_train_samples"] == alone.get_state()["consumed_train_samples"] + 7


# Streams


def test_a_loader_over_a_stream_has_no_length() -> None:
    loader = DataLoader(streamed(5), batch_size=2)
    with pytest.raises(Unsupported, match="reads a stream, which has no length"):
        len(loader)
    with pytest.raises(NotImplementedError):
        len(loader)
    assert len(list(loader)) == 3


def test_a_last_batch_too_small_for_the_ranks_is_dropped_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    for kind in ("list", "IterableDataset"):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            loader = DataLoader(KINDS[kind](11), batch_size=8, device_mesh=mesh_of(4, 3))
            assert [len(read(loader)), len(read(loader))] == [1, 1]
        assert loader.get_state() == {"consumed_train_samples": 16}
        assert caplog.text.count("the last 3 rows of an epoch are dropped: a batch needs 4") == 1


def test_a_stream_that_makes_no_batch_is_an_error() -> None:
    for count in (1, 3):
        with pytest.raises(DataError, match=f"the stream gave {count} rows, which do not make one batch"):
            read(DataLoader(streamed(count), batch_size=8, device_mesh=mesh_of(4, 0)))
    empty = streamed(3)
    empty.filter(lambda row: False)
    with pytest.raises(DataError, match="the stream gave 0 rows"):
        read(DataLoader(empty, batch_size=1))
    resumed = DataLoader(empty, batch_size=1)
    resumed.resume_from_checkpoint(5)
    with pytest.raises(DataError, match="the stream gave 0 rows"):
        read(resumed)


def test_a_stream_without_end_is_read_as_far_as_asked() -> None:
    endless = IterableDataset(DatasetMeta(data=lambda: ({"input_ids": [i]} for i in itertools.count())))
    loader = DataLoader(endless, batch_size=3, shuffle=True, shuffle_buffer=4)
    assert [len(batch) for batch in itertools.islice(loader, 5)] == [3] * 5
    assert loader.get_state() == {"consumed_train_samples": 15}


def test_a_resume_far_behind_the_first_epoch_reads_the_stream_twice_at_most() -> None:
    reads = []

    def source() -> Iterator[dict[str, Any]]:
        reads.append(1)
        return iter(rows(10))

    loader = DataLoader(IterableDataset(DatasetMeta(data=source)), batch_size=4)
    loader.resume_from_checkpoint(10 * 1000 + 4)
    assert [key(row) for row in next(iter(loader))] == items_of(rows(10))[4:8]
    assert len(reads) == 2


def test_shuffling_a_stream_is_drawing_from_a_buffer() -> None:
    items = items_of(rows(50))
    loader = DataLoader(streamed(50), batch_size=1, shuffle=True, shuffle_buffer=8, seed=3)
    torch.manual_seed(1)
    first, second = ([item for [item] in read(loader)] for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second) == sorted(items)
    assert max(items.index(item) - place for place, item in enumerate(first)) <= 8
    assert [item for [item] in read(DataLoader(streamed(50), batch_size=1, shuffle=True, shuffle_buffer=1))] == items
    other = DataLoader(streamed(50), batch_size=1, shuffle=True, shuffle_buffer=8, seed=4)
    assert [item for [item] in read(other)] != first


def test_a_processor_makes_the_batches_of_a_stream() -> None:
    loader = DataLoader(streamed(4), batch_size=2)
    loader.set_processor("InputProcessor")
    assert [batch["input_ids"].shape for batch in loader] == [(2, 2), (2, 5)]


def test_rows_with_other_keys_meet_in_a_batch() -> None:
    stream = IterableDataset(DatasetMeta(data=[{"a": 1}, {"b": 2}]))
    assert list(DataLoader(stream, batch_size=2)) == [[{"a": 1, "b": None}, {"a": None, "b": 2}]]


@pytest.mark.full
def test_other_peoples_streams_are_read_too() -> None:
    import datasets

    class Torch(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(rows(5))

    hf = datasets.Dataset.from_list(rows(130)).to_iterable_dataset(num_shards=3)
    assert list(itertools.chain(*read(DataLoader(Torch(), batch_size=2)))) == items_of(rows(5))
    assert list(itertools.chain(*read(DataLoader(lambda: Torch(), batch_size=2, num_workers=1)))) == items_of(rows(5))
    assert list(itertools.chain(*read(DataLoader(hf, batch_size=7, num_workers=2)))) == items_of(rows(130))
    with pytest.raises(Unsupported, match="a Torch may divide its rows among workers by itself"):
        DataLoader(Torch(), batch_size=2, num_workers=2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pin_memory": True}, Unsupported, "pin_memory=True"),
        ({"shuffle_buffer": 3}, ArgumentError, "shuffle_buffer goes with shuffle=True"),
        ({"shuffle": True, "shuffle_buffer": 0}, ArgumentError, "shuffle_buffer is 0"),
        ({"in_order": False}, ArgumentError, "takes no in_order=False"),
        ({"num_worker": 2}, ArgumentError, "nearest: 'num_workers'"),
        ({"balance": "token"}, ArgumentError, "balance is 'token'; use 'rows' or 'tokens'"),
    ],
)
def test_what_does_not_go_with_a_stream_is_refused(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        DataLoader(streamed(3), batch_size=2, **options)
    with pytest.raises(ComponentTypeError, match=r"generator, which can be read only once; .*IterableDataset"):
        DataLoader((row for row in rows(2)), batch_size=1)


def test_errors_of_a_stream_reach_the_reader_from_any_worker() -> None:
    stream = streamed(100)
    stream.map(lambda columns: {} if [99] * len(columns["input_ids"][-1]) in columns["input_ids"] else columns)
    for workers in (0, 2):
        with pytest.raises(DataError, match="returned no columns at all"):
            read(DataLoader(stream, batch_size=50, num_workers=workers))


def test_processes_for_packing_and_workers_are_one_too_many() -> None:
    stream = IterablePackingDataset(DatasetMeta(data=rows(10)), packing_num_proc=2)
    stream.pack_dataset()
    assert len(read(DataLoader(stream, batch_size=1))) == 1
    with pytest.raises(ArgumentError, match="packing_num_proc=2 starts processes, and so does num_workers=1"):
        DataLoader(stream, batch_size=1, num_workers=1)
    with pytest.raises(ArgumentError, match="which a worker process may not"):
        next(stream.chunks(1, 2))


def test_rows_handed_out_by_workers_are_saved_in_this_process(tmp_path) -> None:
    stream = streamed(20)
    stream.save_as(tmp_path / "rows.jsonl", mode="training")
    read(DataLoader(stream, batch_size=7, num_workers=2))
    stream.flush_save()
    assert items_of(Dataset(DatasetMeta(str(tmp_path / "rows.jsonl")))) == items_of(rows(20))
