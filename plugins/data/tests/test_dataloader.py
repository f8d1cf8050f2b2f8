"""The data loader: batches, data ranks, resume, failing rows; and what it refuses."""

import itertools
from multiprocessing import active_children
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.dataloader import DataLoader, DataLoaderLike
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.errors import ArgumentError, ComponentTypeError, DataError, MeshError
from twinkle.mesh import DeviceMesh


def numbers(count: int) -> list[dict[str, int]]:
    return [{"i": index} for index in range(count)]


def read(loader: DataLoader) -> list[list[int]]:
    return [[row["i"] for row in batch] for batch in loader]


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


def test_batches_are_lists_of_rows() -> None:
    loader = DataLoader(Dataset(DatasetMeta(data=numbers(5))), batch_size=2)
    assert isinstance(loader, DataLoaderLike)
    assert list(loader) == [[{"i": 0}, {"i": 1}], [{"i": 2}, {"i": 3}], [{"i": 4}]]


def test_a_data_set_may_come_from_a_function() -> None:
    assert read(DataLoader(lambda: numbers(2), batch_size=2)) == [[0, 1]]


@pytest.mark.parametrize(
    ("count", "batch_size", "options", "expected"),
    [
        (10, 4, {}, [4, 4, 2]),
        (9, 4, {"min_batch_size": 2}, [4, 4]),
        (10, 4, {"min_batch_size": 2}, [4, 4, 2]),
        (10, 4, {"drop_last": True}, [4, 4]),
        (8, 4, {"drop_last": True}, [4, 4]),
        (3, 4, {}, [3]),
    ],
)
def test_length_and_count_know_of_a_dropped_batch(
    count: int, batch_size: int, options: dict[str, object], expected: list[int]
) -> None:
    loader = DataLoader(numbers(count), batch_size=batch_size, **options)
    assert len(loader) == len(expected)
    consumed = 0
    for batch, size in zip(loader, expected, strict=True):
        assert len(batch) == size
        consumed += size
        assert loader.get_state() == {"consumed_train_samples": consumed}


def test_a_last_batch_too_small_for_the_data_ranks_is_dropped() -> None:
    for rank in range(4):
        loader = DataLoader(numbers(11), batch_size=8, device_mesh=mesh_of(4, rank))
        assert len(loader) == 1
        assert len(read(loader)) == 1
        assert loader.get_state() == {"consumed_train_samples": 8}


def test_shuffling_is_a_function_of_seed_and_epoch_alone() -> None:
    first, second = (DataLoader(numbers(20), batch_size=3, shuffle=True, seed=7) for _ in range(2))
    torch.manual_seed(1)
    epochs = [read(first), read(first)]
    torch.manual_seed(2)
    assert [read(second), read(second)] == epochs
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == list(range(20))
    assert read(DataLoader(numbers(20), batch_size=3, shuffle=True, seed=8)) != epochs[0]


def test_iterating_leaves_the_global_generators_alone() -> None:
    torch.manual_seed(3)
    before, numpy_before = torch.get_rng_state(), numpy.random.get_state()[1].tolist()
    read(DataLoader(numbers(20), batch_size=3, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)
    assert numpy.random.get_state()[1].tolist() == numpy_before


sizes = st.tuples(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.booleans())


@settings(deadline=None, max_examples=60)
@given(sizes, st.integers(0, 3))
def test_the_parts_of_the_data_ranks_make_up_the_global_batch(sizes: tuple[int, int, int, bool], epoch: int) -> None:
    count, ranks, per_rank, shuffle = sizes
    count += ranks
    options = {"batch_size": ranks * per_rank, "shuffle": shuffle}
    parts = []
    for rank in range(ranks):
        loader = DataLoader(numbers(count), device_mesh=mesh_of(ranks, rank), **options)
        loader.skip_consumed_samples(epoch * sum(map(len, DataLoader(numbers(count), min_batch_size=ranks, **options))))
        parts.append(read(loader))
    whole = DataLoader(numbers(count), min_batch_size=ranks, **options)
    for _ in range(epoch):
        read(whole)
    batches = read(whole)
    assert [list(itertools.chain(*pieces)) for pieces in zip(*parts, strict=True)] == batches
    assert all(piece for pieces in parts for piece in pieces)
    for pieces in zip(*parts, strict=True):
        assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


@settings(deadline=None, max_examples=60)
@given(sizes, st.integers(0, 25))
def test_resuming_at_any_point_gives_the_rows_that_were_to_come(sizes: tuple[int, int, int, bool], point: int) -> None:
    count, least, extra, shuffle = sizes
    count += least
    options = {"batch_size": least + extra, "min_batch_size": least, "shuffle": shuffle}

    def batches(loader):
        while True:
            yield from read_counting(loader)

    def read_counting(loader):
        for batch in loader:
            yield [row["i"] for row in batch], loader.get_state()["consumed_train_samples"]

    straight = list(itertools.islice(batches(DataLoader(numbers(count), **options)), point + 12))
    assert [consumed for _, consumed in straight] == list(itertools.accumulate(len(rows) for rows, _ in straight))
    resumed = DataLoader(numbers(count), **options)
    resumed.resume_from_checkpoint(straight[point - 1][1] if point else 0)
    assert list(itertools.islice(batches(resumed), 12)) == straight[point:]


def test_a_resume_with_another_batch_size_takes_up_at_the_row() -> None:
    loader = DataLoader(numbers(10), batch_size=4)
    loader.skip_consumed_samples(3)
    assert read(loader) == [[3, 4, 5, 6], [7, 8, 9]]
    assert loader.get_state() == {"consumed_train_samples": 10}


@pytest.mark.parametrize(
    ("consumed", "expected"), [(0, [0, 1, 2, 3]), (4, [4, 5, 6, 7]), (7, [0, 1, 2, 3]), (8, [0, 1, 2, 3])]
)
def test_a_resume_where_no_batch_is_left_begins_the_next_epoch(consumed: int, expected: list[int]) -> None:
    loader = DataLoader(numbers(9), batch_size=4, min_batch_size=2)
    loader.resume_from_checkpoint(consumed)
    assert read(loader)[0] == expected


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}])
def test_workers_change_neither_order_nor_count(options: dict[str, object]) -> None:
    alone = DataLoader(numbers(17), batch_size=4, shuffle=True)
    helped = DataLoader(numbers(17), batch_size=4, shuffle=True, **options)
    alone.resume_from_checkpoint(8)
    helped.resume_from_checkpoint(8)
    assert [read(helped), read(helped)] == [read(alone), read(alone)]
    for _ in helped:
        break  # what workers load ahead is not consumed
    assert helped.get_state()["consumed_train_samples"] == 17 + 17 + 4


def test_a_processor_makes_the_batches() -> None:
    loader = DataLoader(numbers(4), batch_size=2)
    loader.set_processor(lambda rows: sum(row["i"] for row in rows))
    assert list(loader) == [1, 5]
    loader.set_processor("InputProcessor", padding_side="left")
    loader.dataset = [{"input_ids": [1, 2], "labels": [2, -100]}, {"input_ids": [3], "labels": [-100]}]
    batch = next(iter(loader))
    assert batch["input_ids"].tolist() == [[1, 2], [0, 3]]
    with pytest.raises(ArgumentError, match="nearest: 'padding_side'"):
        loader.set_processor("InputProcessor", padding_sid="left")
    with pytest.raises(ArgumentError, match="'a' would be ignored"):
        loader.set_processor(len, a=1)
    with pytest.raises(ComponentTypeError, match="processor_cls is a int"):
        loader.set_processor(3)


def test_collate_fn_is_the_processor_one_starts_with() -> None:
    assert list(DataLoader(numbers(4), batch_size=2, collate_fn=len)) == [2, 2]


# Failing rows


class Flaky:
    """Ten rows; `bad` ones raise as often as said."""

    def __init__(self, bad: dict[int, int], error: Exception | None = None) -> None:
        self.bad, self.error = dict(bad), error or OSError("disk")
        self.loads: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, int]:
        self.loads.append(index)
        if self.bad.get(index, 0) > 0:
            self.bad[index] -= 1
            raise self.error
        return {"i": index}


FOR_EVER = 10**9


def test_every_row_is_loaded_once() -> None:
    rows = Flaky({})
    read(DataLoader(rows, batch_size=5))
    assert rows.loads == list(range(10))


def test_a_row_that_recovers_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    rows = Flaky({3: 20})
    assert read(DataLoader(rows, batch_size=10)) == [list(range(10))]
    assert rows.loads.count(3) == 21
    assert len(rows.loads) == 30
    assert caplog.text == ""


def test_a_row_that_keeps_failing_is_replaced_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    [batch] = read(DataLoader(Flaky({3: FOR_EVER}), batch_size=10, max_retries=2))
    other = batch[3]
    assert other != 3
    assert batch[:3] + batch[4:] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert f"row 3 could not be loaded (tried 3 times): OSError: disk; row {other} takes its place" in caplog.text
    assert read(DataLoader(Flaky({3: FOR_EVER}), batch_size=10, max_retries=2)) == [batch]


def test_wrong_data_is_not_tried_again() -> None:
    rows = Flaky({3: FOR_EVER}, DataError("malformed"))
    read(DataLoader(rows, batch_size=10))
    assert rows.loads.count(3) == 1


def test_when_too_many_rows_fail_the_error_is_raised() -> None:
    rows = Flaky(dict.fromkeys(range(10), FOR_EVER))
    message = r"row 0 could not be loaded \(tried 4 times\): OSError: disk; so did 3 rows tried in its place"
    with pytest.raises(DataError, match=message) as caught:
        read(DataLoader(rows, batch_size=5, max_retries=3))
    assert isinstance(caught.value.__cause__, OSError)
    assert len(rows.loads) == 4 + 3
    with pytest.raises(DataError, match=r"row 0 could not be loaded \(tried 1 times\): OSError: disk$"):
        read(DataLoader(rows, batch_size=5, max_retries=0))
    with pytest.raises(DataError, match="row 0 could not be loaded"):
        read(DataLoader(rows, batch_size=5, num_workers=1))


def test_after_an_error_of_a_worker_no_process_is_left() -> None:
    before = active_children()
    with pytest.raises(DataError, match="Original Traceback") as caught:
        read(DataLoader(Flaky(dict.fromkeys(range(10), FOR_EVER)), batch_size=5, num_workers=1))
    assert active_children() == before
    assert "row 0 could not be loaded" in str(caught.value)


def test_an_error_in_this_process_has_its_traceback() -> None:
    def broken(rows: list[Any]) -> None:
        raise ValueError(f"{len(rows)} rows")

    loader = DataLoader(numbers(4), batch_size=2)
    loader.set_processor(broken)
    with pytest.raises(ValueError, match="2 rows") as caught:
        read(loader)
    assert caught.traceback[-1].name == "broken"


# What it refuses


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 0}, ArgumentError, "batch_size is 0; give a whole number of at least 1"),
        ({"batch_size": 2.0}, ArgumentError, "batch_size is 2.0"),
        ({"batch_size": True}, ArgumentError, "batch_size is True"),
        ({"batch_size": 2, "min_batch_size": 0}, ArgumentError, "min_batch_size is 0"),
        ({"batch_size": 2, "min_batch_size": 3}, MeshError, "min_batch_size 3 must lie between .* 1 .* 2"),
        ({"batch_size": 2, "min_batch_size": 1, "drop_last": True}, ArgumentError, "means min_batch_size=2, but 1"),
        ({"batch_size": 2, "seed": -1}, ArgumentError, "seed is -1"),
        ({"batch_size": 2, "max_retries": None}, ArgumentError, "max_retries is None"),
        ({"batch_size": 2, "shufle": True}, ArgumentError, "no argument 'shufle', nearest: 'shuffle'"),
        ({"batch_size": 2, "num_worker": 2}, ArgumentError, "no argument 'num_worker', nearest: 'num_workers'"),
        ({"batch_size": 2, "sampler": []}, DataError, "0 rows do not make one batch of batch_size 2"),
        (
            {"batch_size": 2, "device_mesh": mesh_of(4, 0)},
            MeshError,
            "batch_size 2 does not divide by the 4 data ranks",
        ),
        ({"batch_size": 8, "min_batch_size": 2, "device_mesh": mesh_of(4, 0)}, MeshError, "min_batch_size 2 must lie"),
        ({"batch_size": 40, "drop_last": True}, DataError, "10 rows do not make one batch of batch_size 40"),
    ],
)
def test_wrong_sizes_and_keywords(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DataLoader(numbers(10), **options)


def test_what_has_no_rows_is_refused() -> None:
    with pytest.raises(DataError, match="the data set is empty"):
        DataLoader([], batch_size=1)
    with pytest.raises(ComponentTypeError, match="dataset is a int; a data loader needs rows by number"):
        DataLoader(3, batch_size=1)
    with pytest.raises(ComponentTypeError, match="dataset is a generator"):
        DataLoader(lambda: (row for row in numbers(3)), batch_size=1)


def test_resume_checks_what_it_is_given() -> None:
    loader = DataLoader(numbers(3), batch_size=1)
    with pytest.raises(ArgumentError, match="consumed_train_samples is -1"):
        loader.resume_from_checkpoint(-1)
    with pytest.raises(ArgumentError, match="no argument 'consumed_samples', nearest: 'consumed_train_samples'"):
        loader.resume_from_checkpoint(1, consumed_samples=2)
