"""Data on the service gives the same rows as data in this process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_data import DataService

import twinkle
import twinkle.dataloader
import twinkle.dataset
from twinkle.dataset import DatasetMeta
from twinkle.processor import InputProcessor as LocalProcessor
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset, IterableDataset, IterablePackingDataset, LazyDataset, PackingDataset
from twinkle_client.processor import InputProcessor

META = {"dataset_id": "builtin://self-cognition", "data_slice": range(40)}
NAMES = {"model_name": "Twinkle", "model_author": "us"}


def prepared(dataset: Any, model: str, pack: bool) -> Any:
    """The data part of the published script."""
    dataset.set_template("Template", model_id=model, max_length=512)
    dataset.map("SelfCognitionProcessor", init_args=NAMES)
    dataset.encode(batched=True) if not isinstance(
        dataset, (LazyDataset, twinkle.dataset.LazyDataset)
    ) else dataset.encode()
    if pack:
        dataset.pack_dataset()
    return dataset


def batches(loader: Any) -> list[Any]:
    return list(loader)


@pytest.mark.parametrize(
    ("remote", "name"),
    [
        (Dataset, "Dataset"),
        pytest.param(LazyDataset, "LazyDataset", marks=pytest.mark.full),
        pytest.param(PackingDataset, "PackingDataset", marks=pytest.mark.full),
        pytest.param(IterableDataset, "IterableDataset", marks=pytest.mark.full),
        pytest.param(IterablePackingDataset, "IterablePackingDataset", marks=pytest.mark.full),
    ],
)
def test_rows_and_batches_are_those_of_a_local_script(
    service: DataService, model: Path, remote: Any, name: str
) -> None:
    client = service.tenant("a")
    pack = "Packing" in name
    meta = DatasetMeta(**META)
    there = prepared(remote(meta, client=client), "ms://org/tiny", pack)
    here = prepared(getattr(twinkle.dataset, name)(meta), str(model), pack)
    assert list(there) == list(here)
    with there:
        options = {"batch_size": 4, "shuffle": "Iterable" not in name, "seed": 3}
        theirs, ours = DataLoader(there, **options), twinkle.dataloader.DataLoader(here, **options)
        for _ in range(2):  # two epochs in different orders
            assert batches(theirs) == batches(ours)
        assert theirs.get_state() == ours.get_state()
        if "Iterable" not in name:
            assert len(theirs) == len(ours)
            assert len(there) == len(here)
            assert there[3] == here[3]
            assert there.column_names == here.column_names
            theirs.resume_from_checkpoint(8)
            ours.resume_from_checkpoint(8)
            assert batches(theirs) == batches(ours)
        theirs.close()


def test_a_processor_collates_to_the_same_numbers(service: DataService, model: Path) -> None:
    client = service.tenant("a")
    rows = prepared(twinkle.dataset.Dataset(DatasetMeta(**META)), str(model), pack=False)
    inputs = [rows[index] for index in range(3)]
    expected = LocalProcessor(padding_side="left")(inputs)
    with InputProcessor(padding_side="left", client=client) as processor:
        batch = processor(inputs)
        assert set(batch) == set(expected)
        for key, value in expected.items():
            if hasattr(value, "numpy"):
                np.testing.assert_array_equal(batch[key], value.numpy())
                assert batch[key].dtype == value.numpy().dtype
        with Dataset(DatasetMeta(data=inputs), client=client) as dataset, DataLoader(dataset, batch_size=3) as loader:
            loader.set_processor(processor)
            [collated] = loader
            np.testing.assert_array_equal(collated["input_ids"], expected["input_ids"].numpy())


@pytest.mark.full
def test_the_same_script_gives_the_same_rows_over_http(service: DataService, model: Path) -> None:
    def script(model_id: str) -> list[Any]:
        dataset = prepared(twinkle.dataset.Dataset(DatasetMeta(**META)), model_id, pack=False)
        return list(twinkle.dataloader.DataLoader(dataset, batch_size=8, shuffle=True))

    expected = script(str(model))
    twinkle.initialize(mode="http", client=service.tenant("a"))
    try:
        assert script("org/tiny") == expected
        assert isinstance(twinkle.dataset.Dataset(DatasetMeta(**META)), Dataset)
    finally:
        twinkle.initialize("local")
