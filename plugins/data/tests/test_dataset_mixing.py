"""Mixing data sets by weight: the order is that of `datasets`, for rows in memory, lazy rows and streams alike."""

import itertools
import pickle
from typing import Any

import datasets
import pytest

from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta, IterableDataset, LazyDataset
from twinkle.errors import ArgumentError
from twinkle_data.dataset.mixing import Mix

SIZES = (3, 7, 4)
KINDS = (Dataset, LazyDataset, IterableDataset)
ARGUMENTS: list[dict[str, Any]] = [
    {"stopping_strategy": "first_exhausted"},
    {"stopping_strategy": "all_exhausted"},
    {"probabilities": [0.2, 0.5, 0.3], "seed": 3, "stopping_strategy": "first_exhausted"},
    {"probabilities": [0.2, 0.5, 0.3], "seed": 3, "stopping_strategy": "all_exhausted"},
    {"probabilities": [0.9, 0.05, 0.05], "seed": 0, "stopping_strategy": "all_exhausted"},
]


def parts(sizes: tuple[int, ...] = SIZES) -> list[list[dict[str, str]]]:
    return [[{"row": f"{letter}{number}"} for number in range(size)] for letter, size in zip("abc", sizes, strict=True)]


def mixed(kind: Any, **arguments: Any) -> Any:
    dataset = kind()
    for name, rows in zip("abc", parts(), strict=True):
        dataset.add_dataset(DatasetMeta(name, data=rows))
    dataset.mix_dataset(**arguments)
    return dataset


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_order_is_that_of_the_library_datasets(kind: Any, arguments: dict[str, Any]) -> None:
    reference = datasets.interleave_datasets([datasets.Dataset.from_list(rows) for rows in parts()], **arguments)
    found = mixed(kind, **arguments)
    assert [row["row"] for row in found] == reference["row"]
    assert [row["row"] for row in found] == reference["row"], "a second pass has another order"


@pytest.mark.parametrize("kind", KINDS)
def test_weights_need_not_add_up_to_one(kind: Any) -> None:
    wanted = mixed(kind, probabilities=[0.25, 0.5, 0.25], seed=9)
    assert list(mixed(kind, probabilities=[1, 2, 1], seed=9)) == list(wanted)
    assert list(mixed(kind, probabilities=[1, 2, 1], seed=10)) != list(wanted)


def test_every_row_is_there_when_all_sets_are_used_up() -> None:
    found = [row["row"] for row in mixed(Dataset, probabilities=[1, 1, 1], stopping_strategy="all_exhausted")]
    assert set(found) == {row["row"] for rows in parts() for row in rows}


def test_shares_follow_the_weights() -> None:
    turns = list(itertools.islice(Mix((1.0, 3.0), seed=0).turns(2), 20_000))
    assert turns.count(1) / len(turns) == pytest.approx(0.75, abs=0.01)  # standard deviation 0.003


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_resumes_within_a_mixture(kind: Any) -> None:
    arguments = {"probabilities": [1, 2, 2], "seed": 5, "stopping_strategy": "all_exhausted"}
    whole = [row["row"] for batch in DataLoader(mixed(kind, **arguments), batch_size=2) for row in batch]
    later = DataLoader(pickle.loads(pickle.dumps(mixed(kind, **arguments))), batch_size=2)
    later.resume_from_checkpoint(consumed_train_samples=6)
    assert [row["row"] for batch in later for row in batch] == whole[6:]


def test_a_filter_with_a_memory_starts_again_with_its_set() -> None:
    stream = IterableDataset()
    metas = [DatasetMeta(name, data=rows) for name, rows in zip("ab", parts((2, 5, 0)), strict=False)]
    for meta in metas:
        stream.add_dataset(meta)
        stream.filter("DeduplicationFilter", dataset_meta=meta, column="row")
    stream.mix_dataset(stopping_strategy="all_exhausted")
    assert [row["row"] for row in stream] == ["a0", "b0", "a1", "b1", "a0", "b2", "a1", "b3", "a0", "b4"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"probabilities": [0.5, 0.5]}, "one number above 0 for each of the 3 sets"),
        ({"probabilities": [0.5, 0.5, 0]}, "one number above 0 for each of the 3 sets"),
        ({"probabilities": ["a", 1, 1]}, "one number above 0"),
        ({"probabilities": 0.5}, "one number above 0"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"stopping_strategy": "last"}, "must be one of first_exhausted, all_exhausted, got 'last'"),
        ({"interleave": False, "probabilities": [1, 1, 1]}, "probabilities has no effect with interleave=False"),
    ],
)
def test_wrong_arguments_are_refused(kind: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        mixed(kind, **arguments)
