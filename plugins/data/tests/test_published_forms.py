"""Calls in the forms of published scripts: streams, samplers, packing without `encode`, a second `flush_save`."""

import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from twinkle.dataloader import DataLoader, RetrySampler
from twinkle.dataset import Dataset, DatasetMeta, IterableDataset, IterablePackingDataset, LazyDataset, PackingDataset
from twinkle.errors import ArgumentError, DataError, TrainingStateError, Unsupported
from twinkle.mesh import DeviceMesh

ROWS = [{"n": number} for number in range(6)]


class Letters:
    """A template that makes one token of a letter."""

    max_length = 5

    def batch_encode(self, columns: dict[str, list[str]], add_generation_prompt: bool = False) -> dict[str, Any]:
        ids = [[ord(letter) for letter in text] for text in columns["text"]]
        return {"input_ids": ids, "labels": [[*row[1:], -100] for row in ids]}


# Streams


def test_a_data_set_that_streams_is_a_stream(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    stream = Dataset(DatasetMeta(str(tmp_path / "rows.jsonl")), streaming=True)
    assert isinstance(stream, IterableDataset)
    assert list(stream) == [{"n": 1}, {"n": 2}]
    assert isinstance(Dataset(dataset_meta=DatasetMeta(data=ROWS), streaming=True), IterableDataset)
    assert len(Dataset(DatasetMeta(data=ROWS), streaming=False)) == 6
    assert list(inspect.signature(Dataset).parameters) == ["dataset_meta", "kwargs"]


@pytest.mark.parametrize("kind", [LazyDataset, PackingDataset])
def test_other_classes_hold_their_rows(kind: Any) -> None:
    with pytest.raises(Unsupported, match="does not stream; use IterableDataset"):
        kind(DatasetMeta(data=ROWS), streaming=True)


# Arguments of constructors

KINDS = [Dataset, LazyDataset, IterableDataset, PackingDataset, IterablePackingDataset]


def sources(folder: Path) -> list[DatasetMeta]:
    """The same rows in memory, in a file, in a folder, and in a folder that acts as a hub."""
    (folder / "rows").mkdir()
    (folder / "rows" / "train.jsonl").write_text("".join(f'{{"n": {row["n"]}}}\n' for row in ROWS))
    places = [folder / "rows" / "train.jsonl", folder / "rows", f"file://{folder / 'rows'}"]
    return [DatasetMeta(data=ROWS), *(DatasetMeta(str(place)) for place in places)]


@pytest.mark.parametrize("kind", KINDS)
def test_data_sets_take_the_arguments_of_components_and_of_downloads(kind: Any, tmp_path: Path) -> None:
    mesh = DeviceMesh.from_sizes(dp_size=1)
    for meta in sources(tmp_path):
        rows = kind(
            meta, device_mesh=mesh, remote_group="data", instance_id="one", num_proc=1, revision=None, token=None
        )
        assert rows.device_mesh is mesh
        assert (next(iter(rows)) if "Iterable" in kind.__name__ else rows[0]) == {"n": 0}
        assert pickle.loads(pickle.dumps(rows)).device_mesh == mesh
    assert Dataset(DatasetMeta(data=ROWS), device_mesh=mesh, streaming=True).device_mesh is mesh
    assert kind(device_mesh=mesh).device_mesh is mesh


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_that_would_do_nothing_are_named(kind: Any, tmp_path: Path) -> None:
    memory, file, *_ = sources(tmp_path)
    for meta in (memory, file):
        with pytest.raises(ArgumentError, match="revision= is for data sets of a hub, and these rows are on this mach"):
            kind(meta, revision="main")
        with pytest.raises(ArgumentError, match="num_proc is 0; give a whole number from 1"):
            kind(meta, num_proc=0)
        with pytest.raises(ArgumentError, match="device_mesh must be a DeviceMesh or None, got 'dp'"):
            kind(meta, device_mesh="dp")
    with pytest.raises(ArgumentError, match="take no options, but 'sep' was given"):
        kind(memory, sep=";")


def test_a_packed_stream_takes_its_template_under_the_published_name() -> None:
    template = Letters()
    for arguments in ({"template_cls": template}, {"template_func": template}):
        rows = IterablePackingDataset(DatasetMeta(data=[{"text": "ab"}]))
        rows.set_template(**arguments)
        assert rows.template is template
        assert [row["input_ids"] for row in rows] == [[97, 98]]
    for arguments in ({}, {"template_cls": template, "template_func": template}):
        with pytest.raises(ArgumentError, match="two names of one argument; give one"):
            rows.set_template(**arguments)


# Samplers


def read(loader: DataLoader) -> list[list[int]]:
    return [[row["n"] for row in batch] for batch in loader]


def test_a_sampler_determines_the_order() -> None:
    loader = DataLoader(Dataset(DatasetMeta(data=ROWS)), batch_size=2, sampler=[5, 0, 3, 3, 1])
    assert len(loader) == 3
    assert read(loader) == [[5, 0], [3, 3], [1]] == read(loader)


def test_the_order_is_that_of_torch() -> None:
    def sampler() -> Any:
        return torch.utils.data.RandomSampler(ROWS, generator=torch.Generator().manual_seed(3))

    reference = torch.utils.data.DataLoader(ROWS, batch_size=2, sampler=sampler(), collate_fn=list)
    loader = DataLoader(ROWS, batch_size=2, sampler=sampler())
    for _ in range(3):
        assert read(loader) == [[row["n"] for row in batch] for batch in reference]


def test_a_loader_with_a_sampler_resumes_in_a_later_epoch() -> None:
    def loader() -> DataLoader:
        sampler = torch.utils.data.RandomSampler(ROWS, generator=torch.Generator().manual_seed(1))
        return DataLoader(ROWS, batch_size=2, sampler=sampler)

    whole = loader()
    epochs = [read(whole) for _ in range(3)]
    assert epochs[0] != epochs[2]
    later = loader()
    later.resume_from_checkpoint(consumed_train_samples=2 * 6 + 2)
    assert read(later) == epochs[2][1:]


def test_a_sampler_with_set_epoch_gets_its_epoch() -> None:
    class Rotating:
        first = 0

        def set_epoch(self, epoch: int) -> None:
            self.first = epoch

        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Any:
            return iter([(self.first + place) % 4 for place in range(4)])

    loader = DataLoader(ROWS, batch_size=4, sampler=Rotating())
    assert [read(loader) for _ in range(2)] == [[[0, 1, 2, 3]], [[1, 2, 3, 0]]]
    loader.skip_consumed_samples(12)
    assert read(loader) == [[3, 0, 1, 2]]


def test_a_retry_sampler_works_without_a_known_length() -> None:
    assert read(DataLoader(ROWS, batch_size=3, sampler=RetrySampler(range(6), ROWS))) == [[0, 1, 2], [3, 4, 5]]
    assert len(DataLoader(ROWS, batch_size=4, sampler=filter_even(ROWS))) == 1


class filter_even:
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return (number for number in range(len(self.rows)) if number % 2 == 0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sampler": [0, 6]}, DataError, "the sampler yielded 6; it must yield row numbers from 0 to 5"),
        ({"sampler": [0.5, 1]}, DataError, "the sampler yielded 0.5"),
        ({"sampler": iter([0, 1])}, ArgumentError, "iterated once for each epoch, got list_iterator"),
        ({"sampler": 3}, ArgumentError, "iterated once for each epoch, got int"),
        ({"sampler": [1, 0], "shuffle": True}, ArgumentError, "give sampler= or shuffle=True, not both"),
        ({"batch_sampler": [[0]]}, ArgumentError, "use sampler= for the order of the rows"),
        (
            {"sampler": torch.utils.data.DistributedSampler(ROWS, 2, 0)},  # type: ignore[arg-type]
            ArgumentError,
            "divides the rows among 2 ranks",
        ),
    ],
)
def test_wrong_samplers_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        list(DataLoader(ROWS, batch_size=2, **arguments))


def test_a_stream_takes_no_sampler() -> None:
    with pytest.raises(Unsupported, match="a stream has none"):
        DataLoader(IterableDataset(DatasetMeta(data=ROWS)), batch_size=2, sampler=[0])


# Packing


@pytest.mark.parametrize("workers", [0, 2])
def test_a_packed_stream_encodes_rows_that_are_not(workers: int) -> None:
    def stream() -> IterablePackingDataset:
        made = IterablePackingDataset(DatasetMeta(data=[{"text": text} for text in ("abc", "de", "f")]))
        made.set_template(Letters())
        return made

    before = stream()
    before.encode()
    before.pack_dataset()
    wanted = list(before)
    assert [pack["length"] for pack in wanted] == [5, 1]
    called = stream()
    called.pack_dataset()
    assert list(called) == wanted
    assert list(stream()) == wanted
    assert list(DataLoader(stream(), batch_size=2, num_workers=workers)) == [wanted]
    encoded = IterablePackingDataset(DatasetMeta(data=[{"input_ids": [1, 2]}, {"input_ids": [3]}]))
    encoded.set_template(Letters())
    assert [pack["input_ids"] for pack in encoded] == [[1, 2, 3]]


# Saving


@pytest.mark.parametrize("kind", [Dataset, LazyDataset, IterableDataset])
def test_a_second_flush_has_no_effect(kind: Any, tmp_path: Path) -> None:
    data = kind(DatasetMeta(data=ROWS))
    with pytest.raises(TrainingStateError, match="none was begun"):
        data.flush_save()
    data.save_as(tmp_path / "rows.jsonl", mode="training")
    assert len(list(data)) == 6
    data.flush_save()
    written = (tmp_path / "rows.jsonl").read_text()
    data.flush_save()
    assert (tmp_path / "rows.jsonl").read_text() == written
    assert len(written.splitlines()) == 6
