"""Packing: which rows share a pack, what a pack is, and that nothing is learnt across its borders."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.dataset import Dataset, DatasetMeta, IterableDataset, IterablePackingDataset, PackingDataset
from twinkle.errors import ArgumentError, DataError, TrainingStateError, Unsupported
from twinkle_data.dataset.encoding import row_length
from twinkle_data.dataset.packed import pack_lengths


class Limit:
    """A template that is only asked how long a pack may be."""

    def __init__(self, max_length: int | None) -> None:
        self.max_length = max_length

    def batch_encode(self, columns, add_generation_prompt=False):
        return {**columns, "input_ids": [list(range(length)) for length in columns["size"]]}


def encoded(*lengths: int, first: int = 0) -> list[dict[str, Any]]:
    """Rows whose tokens tell which row they are of, and which place they have in it."""
    return [
        {
            "input_ids": [100 * number + place for place in range(length)],
            "labels": [*(100 * number + place for place in range(1, length)), -100],
            "loss_scale": [float(number)] * length,
            "length": length,
            "user_data": [["row", str(number)]],
        }
        for number, length in enumerate(lengths, first)
    ]


def packed(lengths: Sequence[int], capacity: int, **options: Any) -> PackingDataset:
    dataset = PackingDataset(DatasetMeta(data=encoded(*lengths)), **options)
    dataset.set_template(Limit(capacity))
    dataset.pack_dataset()
    return dataset


def packed_stream(lengths: Sequence[int], capacity: int, **options: Any) -> IterablePackingDataset:
    dataset = IterablePackingDataset(DatasetMeta(data=encoded(*lengths)), **options)
    dataset.set_template(Limit(capacity))
    dataset.pack_dataset()
    return dataset


def unpacked(pack: dict[str, Any]) -> list[dict[str, Any]]:
    """Cut a pack where its positions begin again, in a plain loop."""
    parts: list[dict[str, Any]] = []
    for place, position in enumerate(pack["position_ids"]):
        if position == 0:
            parts.append({"input_ids": [], "labels": [], "loss_scale": [], "user_data": pack["user_data"][len(parts)]})
        for key in ("input_ids", "labels", "loss_scale"):
            parts[-1][key].append(pack[key][place])
    return [{**part, "length": len(part["input_ids"])} for part in parts]


lists_of_lengths = st.lists(st.integers(1, 20), min_size=1, max_size=60)


@given(lists_of_lengths)
def test_packs_hold_every_row_once_and_never_too_many_tokens(lengths: list[int]) -> None:
    packs = pack_lengths(lengths, 20)
    assert sorted(row for pack in packs for row in pack) == list(range(len(lengths)))
    assert all(pack == sorted(pack) for pack in packs)
    assert packs == sorted(packs) == pack_lengths(lengths, 20)
    sums = [sum(lengths[row] for row in pack) for pack in packs]
    assert max(sums) <= 20
    assert sum(total <= 10 for total in sums) <= 1, "two packs that fit together would be one"


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7))
def test_packs_are_hardly_more_than_the_fewest(lengths: list[int]) -> None:
    assert len(pack_lengths(lengths, 20)) <= 11 / 9 * fewest(lengths, [], 20) + 6 / 9  # Dosa 2007


def fewest(lengths: list[int], room: list[int], capacity: int) -> int:
    """Try every division."""
    if not lengths:
        return len(room)
    first, rest = lengths[0], lengths[1:]
    tried = [fewest(rest, [*room, capacity - first], capacity)]
    for place in {free: place for place, free in enumerate(room) if free >= first}.values():
        tried.append(fewest(rest, [*room[:place], room[place] - first, *room[place + 1 :]], capacity))
    return min(tried)


def test_packs_are_the_best_ones_where_they_can_be_counted_by_hand() -> None:
    assert pack_lengths([6, 5, 4, 5], 10) == [[0, 2], [1, 3]]
    assert pack_lengths([10, 1, 9], 10) == [[0], [1, 2]]
    assert pack_lengths([1] * 5, 2) == [[0, 1], [2, 3], [4]]


@settings(deadline=None, max_examples=30)
@given(lists_of_lengths)
def test_a_pack_taken_apart_is_the_rows_that_were_put_in(lengths: list[int]) -> None:
    dataset = packed(lengths, 20)
    parts = [part for pack in dataset for part in unpacked(pack)]
    assert sorted(parts, key=lambda part: part["input_ids"][0]) == encoded(*lengths)
    assert [pack["length"] for pack in dataset] == [len(pack["input_ids"]) for pack in dataset] == dataset.row_lengths()


@settings(deadline=None, max_examples=30)
@given(lists_of_lengths, st.integers(1, 9))
def test_a_stream_packed_in_windows_holds_every_row_once(lengths: list[int], interval: int) -> None:
    dataset = packed_stream(lengths, 20, packing_interval=interval)
    packs = list(dataset)
    assert packs == list(dataset)
    assert all(pack["length"] == len(pack["input_ids"]) <= 20 for pack in packs)
    parts = [part for pack in packs for part in unpacked(pack)]
    assert sorted(parts, key=lambda part: part["input_ids"][0]) == encoded(*lengths)


def test_keys_of_a_pack_are_joined_by_what_they_are() -> None:
    rows = [
        {
            "input_ids": [1, 2],
            "labels": [2, -100],
            "attention_mask": [1, 1],
            "completion_mask": [0, 1],
            "routed_experts": [[[1, 2]], [[3, 4]]],
            "own": [0.5, 1.5],
            "messages": [{"role": "user", "content": "a"}],
            "reward": 1.0,
            "length": 2,
        },
        {
            "input_ids": [3],
            "labels": [-100],
            "attention_mask": [1],
            "completion_mask": [1],
            "routed_experts": [[[5, 6]]],
            "own": [2.5],
            "messages": [{"role": "user", "content": "b"}],
            "reward": 2.0,
            "length": 1,
        },
    ]
    expected = {
        "input_ids": [1, 2, 3],
        "labels": [2, -100, -100],
        "attention_mask": [1, 1, 1],
        "completion_mask": [0, 1, 1],
        "routed_experts": [[[1, 2]], [[3, 4]], [[5, 6]]],
        "own": [0.5, 1.5, 2.5],
        "messages": [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]],
        "reward": [1.0, 2.0],
        "position_ids": [0, 1, 0],
        "length": 3,
    }
    sized, flow = (kind(DatasetMeta(data=rows)) for kind in (PackingDataset, IterablePackingDataset))
    sized.pack_dataset()
    flow.pack_dataset()
    assert sized[0] == expected
    assert list(flow) == [expected]
    assert sized[:] == {key: [value] for key, value in expected.items()}
    assert sized["length"] == [3]
    assert set(sized.column_names) == set(expected)


def test_positions_of_a_row_that_is_a_pack_already_are_kept() -> None:
    rows = [{"input_ids": [1, 2, 3], "position_ids": [0, 0, 1]}, {"input_ids": [4], "position_ids": [0]}]
    dataset = PackingDataset(DatasetMeta(data=rows))
    dataset.pack_dataset()
    assert dataset[0]["position_ids"] == [0, 0, 1, 0]
    assert "labels" not in dataset[0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [1, 2], "labels": [1, 2]}, "row 1: the last label is 2, but labels.i. is the target"),
        ({"input_ids": [1, 2], "labels": [-100]}, "row 1 has 1 entries of 'labels', for 2 tokens"),
        ({"input_ids": [1, 2]}, "row 1 has no 'labels', which other rows have, for 2 tokens"),
        ({"input_ids": [], "labels": []}, "row 1 has no tokens, so it cannot be packed"),
        (
            {"input_ids": [1] * 30, "labels": [-100] * 30},
            "row 1 has 30 tokens, but a pack holds 20; set max_length=30",
        ),
    ],
)
@pytest.mark.parametrize("kind", [PackingDataset, IterablePackingDataset])
def test_a_row_that_cannot_be_packed_is_named(kind: type, row: dict[str, Any], message: str) -> None:
    dataset = kind(DatasetMeta(data=[{"input_ids": [1], "labels": [-100]}, row]))
    dataset.set_template(Limit(20))
    with pytest.raises(DataError, match=message):
        packs_of(dataset)


def packs_of(dataset: Any) -> list[dict[str, Any]]:
    dataset.pack_dataset()
    return list(dataset)


def test_positions_that_do_not_begin_at_zero_are_refused() -> None:
    dataset = PackingDataset(DatasetMeta(data=[{"input_ids": [1, 2], "position_ids": [1, 2]}]))
    dataset.pack_dataset()
    with pytest.raises(DataError, match="row 0: position_ids begin at 1"):
        dataset[0]


def test_packing_comes_after_encoding_and_before_nothing() -> None:
    raw = [{"size": size} for size in (3, 4, 5)]
    sized, flow = (kind(DatasetMeta(data=raw)) for kind in (PackingDataset, IterablePackingDataset))
    with pytest.raises(TrainingStateError, match=r"no column input_ids .there is size.; call encode"):
        sized.pack_dataset()
    for dataset in (sized, flow):
        dataset.set_template(Limit(None))
        with pytest.raises(TrainingStateError, match="max_length is None, so there is no size for a pack"):
            dataset.pack_dataset()
        dataset.set_template(Limit(9))
    flow_too_soon = IterablePackingDataset(DatasetMeta(data=raw))
    flow_too_soon.pack_dataset()
    with pytest.raises(TrainingStateError, match=r"row 0 has no input_ids .it has size.; call encode"):
        list(flow_too_soon)
    assert len(sized) == 3
    assert sized[0] == {"size": 3}
    for dataset in (sized, flow):
        dataset.encode()
        dataset.pack_dataset()
        assert sorted(pack["size"] for pack in dataset) == [[3], [4, 5]]
        for change in ("pack_dataset", "encode", "mix_dataset"):
            with pytest.raises(TrainingStateError, match="packed already"):
                getattr(dataset, change)()
        with pytest.raises(TrainingStateError, match="packed already"):
            dataset.add_dataset(DatasetMeta("more", data=raw))


def test_without_a_template_a_pack_holds_2048_tokens() -> None:
    dataset = PackingDataset(DatasetMeta(data=encoded(2000, 48, 1)))
    dataset.pack_dataset()
    assert dataset.row_lengths() == [2048, 1]


def test_the_log_says_how_full_packs_are(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        packed([10, 6, 4, 5], 10)
        list(packed_stream([10, 6, 4, 5], 10, packing_interval=2))
    assert caplog.text.count("packed 4 rows of 25 tokens into 3 packs of 10: 83.3% full") == 2
    assert "packed 1 rows of 10 tokens into 1 packs of 10: 100.0% full, so far" in caplog.text


def test_processes_change_nothing() -> None:
    lengths = [1 + number * number % 17 for number in range(2300)]
    one, two = packed(lengths, 50), packed(lengths, 50, packing_num_proc=2)
    assert one.row_lengths() == two.row_lengths()
    assert one[0] == two[0]
    assert list(packed_stream(lengths[:300], 50)) == list(packed_stream(lengths[:300], 50, packing_num_proc=2))


def test_long_lists_of_short_rows_make_nearly_full_packs() -> None:
    import random

    draw = random.Random(0)
    lengths = [min(2048, int(draw.lognormvariate(5.5, 0.8)) + 1) for _ in range(1000)]
    assert sum(lengths) / (2048 * len(pack_lengths(lengths, 2048))) > 0.98


def test_a_cyclic_stream_begins_again() -> None:
    dataset = packed_stream([3, 3], 6, cyclic=True, packing_interval=2)
    rows = iter(dataset)
    assert [next(rows)["user_data"] for _ in range(3)] == [[[["row", "0"]], [["row", "1"]]]] * 3


def test_numbers_are_checked() -> None:
    for options in ({"packing_interval": 0}, {"packing_num_proc": True}):
        with pytest.raises(ArgumentError, match="give a whole number from 1"):
            IterablePackingDataset(**options)
    with pytest.raises(ArgumentError, match="packing_num_proc is 0"):
        PackingDataset(packing_num_proc=0)
    assert isinstance(IterablePackingDataset(), IterableDataset)


def test_packs_are_saved_as_they_are_read(tmp_path) -> None:
    dataset = packed([3, 4, 5], 9)
    dataset.save_as(tmp_path / "all.jsonl")
    assert list(Dataset(DatasetMeta(str(tmp_path / "all.jsonl")))) == list(dataset)
    dataset.save_as(tmp_path / "read.jsonl", mode="training")
    dataset[1]
    dataset.flush_save()
    assert list(Dataset(DatasetMeta(str(tmp_path / "read.jsonl")))) == [dataset[1]]


# Lengths of rows


def test_the_length_of_a_row_is_the_one_it_says_or_that_of_its_tokens() -> None:
    rows = [{"input_ids": [1, 2]}, {"input_ids": [3]}]
    assert Dataset(DatasetMeta(data=rows)).row_lengths() == [2, 1]
    assert Dataset(DatasetMeta(data=[{"length": 7}, {"length": 8}])).row_lengths() == [7, 8]
    assert Dataset(DatasetMeta(data=[{"length": None, "input_ids": [1]}])).row_lengths() == [1]
    pairs = [{"positive": {"input_ids": [1, 2]}, "negative": {"input_ids": [1]}}]
    assert Dataset(DatasetMeta(data=pairs)).row_lengths() == [3]
    with pytest.raises(DataError, match="row 0 has neither 'length' nor 'input_ids'"):
        Dataset(DatasetMeta(data=[{"text": "a"}])).row_lengths()
    with pytest.raises(DataError, match="row 5 has neither"):
        row_length(3, 5)
    with pytest.raises(Unsupported):
        len(IterablePackingDataset(DatasetMeta(data=rows)))


def test_lengths_follow_the_order_of_rows() -> None:
    dataset = Dataset(DatasetMeta(data=encoded(5, 6, 7), data_slice=[2, 0, 2]))
    assert dataset.row_lengths() == [7, 5, 7]
    dataset.filter(lambda row: row["length"] == 7)
    assert dataset.row_lengths() == [7, 7]
