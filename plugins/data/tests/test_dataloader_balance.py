"""Balance: rows dealt to data ranks by their tokens; and samplers for loops that drive torch's own loader."""

import itertools
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.dataloader import DataLoader, DeviceMeshIterableFetcher, DeviceMeshSampler, RetrySampler
from twinkle.dataset import Dataset, DatasetMeta, LazyDataset
from twinkle.errors import ArgumentError, DataError, Unsupported
from twinkle.mesh import DeviceMesh
from twinkle_data.dataloader.batches import deal


class RankMesh(DeviceMesh):
    rank = 0

    @property
    def data_rank(self) -> int:
        return self.rank


def mesh_of(ranks: int, rank: int) -> RankMesh:
    mesh = RankMesh(mesh=numpy.arange(ranks), mesh_dim_names=("dp",))
    mesh.rank = rank
    return mesh


def heaviest(parts: list[list[int]], lengths: list[int]) -> int:
    return max(sum(lengths[row] for row in part) for part in parts)


@given(
    st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, 99), min_size=n, max_size=40)))
)
def test_every_row_is_dealt_once_and_every_rank_gets_one(given: tuple[int, list[int]]) -> None:
    ranks, lengths = given
    parts = deal(lengths, ranks)
    assert len(parts) == ranks
    assert all(parts)
    assert all(part == sorted(part) for part in parts)
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    assert parts == deal(lengths, ranks)


@pytest.mark.full
@given(st.lists(st.integers(1, 50), min_size=3, max_size=8), st.integers(2, 3))
def test_the_heaviest_part_is_near_the_best_possible(lengths: list[int], ranks: int) -> None:
    best = min(
        heaviest([[row for row, at in enumerate(places) if at == rank] for rank in range(ranks)], lengths)
        for places in itertools.product(range(ranks), repeat=len(lengths))
    )
    assert best <= heaviest(deal(lengths, ranks), lengths) <= best * (4 / 3 - 1 / (3 * ranks))


def test_deals_that_can_be_checked_by_hand() -> None:
    assert deal([8, 7, 6, 5, 4], 2) == [[0, 3], [1, 2, 4]] or heaviest(deal([8, 7, 6, 5, 4], 2), [8, 7, 6, 5, 4]) <= 16
    assert deal([5, 5, 5, 5], 4) == [[0], [1], [2], [3]]
    assert deal([9, 1, 1, 1], 2) == [[0], [1, 2, 3]]
    assert deal([3], 1) == [[0]]
    assert sorted(map(len, deal([0, 0, 0, 0], 3))) == [1, 1, 2]
    with pytest.raises(DataError, match="2 rows cannot be dealt to 3 data ranks"):
        deal([1, 2], 3)


@pytest.mark.parametrize(("rows", "ranks"), [(32, 4), (64, 8), (128, 8)])
def test_lognormal_lengths_are_nearly_even_where_the_longest_row_allows_it(rows: int, ranks: int) -> None:
    draw = numpy.random.default_rng(0)
    dealt, sliced = [], []
    for _ in range(20):
        lengths = [int(value) + 1 for value in numpy.exp(draw.normal(5.5, 1, rows))]
        even = sum(lengths) / ranks
        slices = [list(range(rows))[mesh_of(ranks, rank).get_slice(rows)] for rank in range(ranks)]
        dealt.append(heaviest(deal(lengths, ranks), lengths) / max(even, max(lengths)))
        sliced.append(heaviest(slices, lengths) / max(even, max(lengths)))
    assert max(dealt) < 1.03
    assert numpy.mean(sliced) > 1.3


def rows_of(lengths: list[int]) -> list[dict[str, Any]]:
    return [{"i": number, "input_ids": [0] * length} for number, length in enumerate(lengths)]


@pytest.mark.parametrize("make", [rows_of, lambda lengths: Dataset(DatasetMeta(data=rows_of(lengths)))])
def test_the_loader_deals_each_global_batch(make: Any) -> None:
    lengths = [9, 1, 1, 1, 2, 2, 8, 4]
    parts = []
    for rank in range(2):
        loader = DataLoader(make(lengths), batch_size=4, device_mesh=mesh_of(2, rank), balance="tokens")
        parts.append([[row["i"] for row in batch] for batch in loader])
    assert parts == [[[0], [4, 5, 7]], [[1, 2, 3], [6]]]
    alone = DataLoader(make(lengths), batch_size=4, balance="tokens")
    assert [[row["i"] for row in batch] for batch in alone] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_lengths_must_be_known() -> None:
    options = {"batch_size": 2, "device_mesh": mesh_of(2, 0), "balance": "tokens"}
    with pytest.raises(DataError, match="row 0 has neither 'length' nor 'input_ids'"):
        DataLoader([{"text": "a"}, {"text": "b"}], **options)
    with pytest.raises(DataError, match="row 0 has neither"):
        DataLoader(Dataset(DatasetMeta(data=[{"text": "a"}, {"text": "b"}])), **options)
    with pytest.raises(Unsupported, match="a LazyDataset knows the length of a row only when it makes it"):
        DataLoader(LazyDataset(DatasetMeta(data=rows_of([1, 2]))), **options)


# For torch's own loader


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(1, 4), st.integers(1, 3), st.integers(0, 12), st.booleans())
def test_a_mesh_sampler_divides_batches(count: int, ranks: int, per_rank: int, skip: int, drop: bool) -> None:
    size = ranks * per_rank
    batches = torch.utils.data.BatchSampler(range(count), size, drop)
    samplers = [DeviceMeshSampler(batches, mesh_of(ranks, rank), skip_samples=skip) for rank in range(ranks)]
    expected = [[row for row in batch if row >= skip] for batch in batches]
    expected = [batch for batch in expected if len(batch) >= ranks]
    parts = [list(sampler) for sampler in samplers]
    assert [list(itertools.chain(*pieces)) for pieces in zip(*parts, strict=True)] == expected
    assert {len(sampler) for sampler in samplers} == {len(expected)}


def test_a_mesh_sampler_checks_its_numbers() -> None:
    with pytest.raises(ArgumentError, match="min_batch_size is 1; give a whole number of at least 2"):
        DeviceMeshSampler([[0, 1]], mesh_of(2, 0), min_batch_size=1)
    with pytest.raises(TypeError, match="how many batches a list makes is not known"):
        len(DeviceMeshSampler([[0, 1]], None))
    assert list(DeviceMeshSampler([[0, 1], [2]], None)) == [[0, 1], [2]]


class Flaky:
    def __init__(self, bad: set[int]) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise OSError("disk")
        return index


def test_a_retry_sampler_fills_up_with_rows_that_load(caplog: pytest.LogCaptureFixture) -> None:
    sampler = RetrySampler(range(6), Flaky({1, 4}), max_retries=1)
    found = list(sampler)
    assert found[:4] == [0, 2, 3, 5]
    assert len(found) == len(sampler) == 6
    assert not {1, 4} & set(found)
    assert "row 4 could not be loaded" in caplog.text
    assert list(sampler) == found
    assert list(RetrySampler(range(6), Flaky({1, 4}), skip_samples=3)) == found[3:]
    assert list(RetrySampler(range(6), Flaky(set()))) == list(range(6))
    with pytest.raises(DataError, match="only 0 of 6 rows could be loaded"):
        list(RetrySampler(range(6), Flaky(set(range(6)))))


def fetched(fetcher: DeviceMeshIterableFetcher) -> list[Any]:
    found = []
    while True:
        try:
            found.append(fetcher.fetch(None))
        except StopIteration:
            return found


def test_a_fetcher_hands_out_parts_of_global_batches() -> None:
    parts = [fetched(DeviceMeshIterableFetcher(range(11), True, list, False, 4, mesh_of(2, rank))) for rank in range(2)]
    assert parts == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]]
    assert fetched(DeviceMeshIterableFetcher(range(5), True, list, True, 2, None)) == [[0, 1], [2, 3]]
    assert fetched(DeviceMeshIterableFetcher(range(5), True, list, False, 4, mesh_of(2, 0))) == [[0, 1]]
    assert fetched(DeviceMeshIterableFetcher(range(2), False, str, False, 4, None)) == ["0", "1"]


def test_a_fetcher_tries_again_where_the_iterator_can() -> None:
    class Once:
        def __init__(self) -> None:
            self.steps = iter([1, OSError("disk"), 2])

        def __iter__(self) -> "Once":
            return self

        def __next__(self) -> int:
            step = next(self.steps)
            if isinstance(step, Exception):
                raise step
            return step

    def broken():
        yield 1
        raise OSError("disk")

    assert fetched(DeviceMeshIterableFetcher(Once(), True, list, False, 2, None)) == [[1, 2]]
    fetcher = DeviceMeshIterableFetcher(broken(), True, list, False, 2, None)
    with pytest.raises(OSError, match="disk"):
        fetcher.fetch()
