"""Rows one after the other without padding, and back: nothing is lost, nothing is mixed up."""

from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.errors import ArgumentError, DataError, Unsupported
from twinkle.processor import InputProcessor
from twinkle_torch.collate import Layout

SHORT = {"input_ids": [5, 6], "labels": [6, -100], "loss_scale": [0.5, 0.0]}
LONG = {"input_ids": [7, 8, 9], "labels": [-100, 9, -100], "loss_scale": [1.0, 1.0, 0.0]}
PACK = {
    "input_ids": [5, 6, 7, 8, 9],
    "labels": [6, -100, -100, 9, -100],
    "loss_scale": [0.5, 0.0, 1.0, 1.0, 0.0],
    "position_ids": [0, 1, 0, 1, 2],
}


def listed(batch: Any) -> dict[str, Any]:
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def rows(lengths: list[int]) -> list[dict[str, Any]]:
    made = []
    for number, length in enumerate(lengths):
        ids = [10 * number + place for place in range(length)]
        made.append({"input_ids": ids, "labels": [*ids[1:], -100], "tag": f"row {number}", "score": number / 4})
    return made


def packs(made: list[dict[str, Any]], sizes: list[int]) -> list[dict[str, Any]]:
    """The rows as a packing data set gives them."""
    found, start = [], 0
    for size in sizes:
        members = made[start : start + size]
        start += size
        pack: dict[str, Any] = {key: [x for row in members for x in row[key]] for key in ("input_ids", "labels")}
        pack["position_ids"] = [place for row in members for place in range(len(row["input_ids"]))]
        pack |= {key: [row[key] for row in members] for key in ("tag", "score")}
        found.append(pack)
    return found


def test_rows_lie_one_after_the_other_without_a_mask() -> None:
    batch = InputProcessor(padding_free=True)([SHORT, LONG])
    assert listed(batch) == {
        "input_ids": [[5, 6, 7, 8, 9]],
        "labels": [[6, -100, -100, 9, -100]],
        "loss_scale": [[0.5, 0.0, 1.0, 1.0, 0.0]],
        "position_ids": [[0, 1, 0, 1, 2]],
    }
    assert batch["loss_scale"].dtype is torch.float32


def test_a_packed_row_is_never_padded() -> None:
    free, padded = InputProcessor(padding_free=True), InputProcessor(pad_to_multiple_of=8)
    assert listed(padded([PACK])) == listed(free([SHORT, LONG]))
    both = listed(padded([PACK, LONG | {"position_ids": [0, 1, 2]}]))
    assert both["input_ids"] == [[5, 6, 7, 8, 9, 7, 8, 9]]
    assert both["position_ids"] == [[0, 1, 0, 1, 2, 0, 1, 2]]


@pytest.mark.parametrize("side", ["left", "right"])
@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4), data=st.data())
def test_unpacked_batches_are_those_of_padding(side: Any, sizes: list[int], data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=sum(sizes), max_size=sum(sizes)))
    processor = InputProcessor(padding_free=True, padding_side=side)
    wanted = listed(InputProcessor(padding_side=side)(rows(lengths)))
    for given_rows in (rows(lengths), packs(rows(lengths), sizes)):
        batch = processor(given_rows)
        assert batch["input_ids"].shape == (1, sum(lengths))
        found = listed(processor.unpack_inputs(batch))
        if max(sizes) == 1:  # without several sequences in a row, ["a"] may be a value or a list with one entry
            found["tag"] = wanted["tag"]
        if len(lengths) < sum(lengths):
            assert found == wanted


def test_a_batch_that_was_packed_before_stays_what_it_is() -> None:
    for processor in (InputProcessor(padding_free=True), InputProcessor()):
        once = InputProcessor(padding_free=True)(rows([2, 3]))
        assert listed(processor(once)) == listed(once)


def test_padding_of_collated_rows_is_left_out() -> None:
    for side in ("left", "right"):
        padded: Any = InputProcessor(padding_side=side)([SHORT, LONG])
        assert listed(InputProcessor(padding_free=True)(padded)) == listed(
            InputProcessor(padding_free=True)([SHORT, LONG])
        )


def test_what_belongs_to_rows_belongs_to_sequences() -> None:
    first = PACK | {"score": [0.5, 1.5], "messages": [["a"], ["b"]], "source": "web", "length": 5}
    second = LONG | {"position_ids": [0, 1, 2], "score": [2.5], "messages": [["c"]], "source": "book", "length": 3}
    processor = InputProcessor()
    batch: Any = processor([first, second])
    assert batch["score"].tolist() == [[0.5, 1.5, 2.5]]
    assert batch["messages"] == [[["a"], ["b"], ["c"]]]
    assert batch["source"] == [["web", "web", "book"]]
    unpacked: Any = processor.unpack_inputs(batch)
    assert unpacked["score"].tolist() == [0.5, 1.5, 2.5]
    assert unpacked["messages"] == [["a"], ["b"], ["c"]]
    assert unpacked["source"] == ["web", "web", "book"]
    assert unpacked["length"].tolist() == [2, 3, 3]


def test_arrays_and_tensors_hold_one_entry_a_sequence_too() -> None:
    for make in (np.array, torch.tensor):
        batch: Any = InputProcessor()([PACK | {"score": make([0.5, 1.5])}])
        assert batch["score"].tolist() == [[0.5, 1.5]]
    with pytest.raises(DataError, match="row 0 packs 2 sequences but 'score' is one number; give a list"):
        InputProcessor()([PACK | {"score": 0.5}])


def test_outputs_are_unpacked_with_their_gradients() -> None:
    processor = InputProcessor(padding_side="left")
    logps = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]], requires_grad=True)
    outputs: Any = {"logps": logps, "predictions": torch.tensor([[1, 2, 3, 4, 5]]), "loss": 0.5}
    inputs, made = processor.unpack_packed_sequences(processor([PACK]), outputs)
    assert inputs["labels"].tolist() == [[-100, 6, -100], [-100, 9, -100]]
    assert made is not None
    assert made["logps"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert made["predictions"].tolist() == [[-100, 1, 2], [3, 4, 5]]
    assert made["loss"] == 0.5
    (made["logps"] * torch.tensor([[9.0, 1.0, 2.0], [3.0, 4.0, 5.0]])).sum().backward()
    assert logps.grad is not None
    assert logps.grad.tolist() == [[1.0, 2.0, 3.0, 4.0, 5.0]]
    vectors = processor.unpack_packed_sequences(processor([PACK]), {"logits": torch.ones(1, 5, 7)})[1]
    assert vectors is not None
    assert vectors["logits"].shape == (2, 3, 7)


def test_flash_attention_is_told_where_sequences_lie() -> None:
    processor = InputProcessor(padding_free=True)
    extra: Any = processor.add_extra_padding_free_args(processor([SHORT, LONG]))
    assert extra["cu_seq_lens_q"].tolist() == extra["cu_seq_lens_k"].tolist() == [0, 2, 5]
    assert (extra["max_length_q"], extra["max_length_k"]) == (3, 3)
    with pytest.raises(ArgumentError, match="not without padding"):
        processor.add_extra_padding_free_args(InputProcessor()([SHORT, LONG]))


def test_micro_batches_count_rows_as_given() -> None:
    parts: Any = InputProcessor(padding_free=True).collate_fn([SHORT, LONG, PACK][:2] * 2, micro_batch_size=3)
    assert [part["input_ids"].tolist() for part in parts] == [[[5, 6, 7, 8, 9, 5, 6]], [[7, 8, 9]]]


def test_sequences_of_one_token_are_sequences() -> None:
    layout = Layout.of({"input_ids": torch.zeros(1, 4), "position_ids": torch.tensor([[0, 0, 1, 0]])})
    assert layout.lengths == (1, 2, 1)
    assert layout.counts == (3,)


def test_a_subclass_and_a_task_are_named() -> None:
    with pytest.raises(Unsupported, match="task is 'embedding'"):
        InputProcessor().unpack_inputs(InputProcessor()([SHORT]), task="embedding")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (LONG | {"position_ids": [4, 5, 6]}, "row 0: position_ids begin at 4"),
        (LONG | {"position_ids": [0, 1, 1]}, "row 0 of the batch: position_ids go from 1 to 1 at 2"),
        (LONG | {"attention_mask": [1, 0, 1]}, "row 0: a token whose attention_mask is 0 has a label"),
        (LONG | {"attention_mask": [0, 0, 0]}, "row 0 of the batch has no tokens"),
    ],
)
def test_rows_that_would_be_told_apart_wrongly_are_refused(row: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        InputProcessor(padding_free=True)([row])


@settings(deadline=None)
@given(data=st.data())
def test_sequences_are_found_as_a_loop_over_the_tokens_finds_them(data: st.DataObject) -> None:
    rows_, width = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    table = st.lists(st.lists(st.integers(0, 3), min_size=width, max_size=width), min_size=rows_, max_size=rows_)
    mask = [[int(value > 0) for value in row] for row in data.draw(table)]
    counted = st.just([[max(0, sum(row[: at + 1]) - 1) for at in range(width)] for row in mask])
    positions = data.draw(counted | st.just([list(range(width))] * rows_) | table)
    batch = {
        "input_ids": torch.ones(rows_, width, dtype=torch.int64),
        "attention_mask": torch.tensor(mask),
        "position_ids": torch.tensor(positions),
    }
    wanted = by_a_loop(mask, positions)
    if isinstance(wanted, str):
        with pytest.raises(DataError, match=wanted):
            Layout.of(batch)
        return
    found = Layout.of(batch)
    assert (list(found.counts), list(found.lengths)) == wanted
    assert found.source.tolist() == [at for at, keep in enumerate(chain.from_iterable(mask)) if keep]


def by_a_loop(mask: list[list[int]], positions: list[list[int]]) -> tuple[list[int], list[int]] | str:
    """Sequences in each row and tokens in each sequence, or what is wrong."""
    if not all(map(any, mask)):
        return "has no tokens"
    counts, lengths = [], []
    for row, places in zip(mask, positions, strict=True):
        real = [place for keep, place in zip(row, places, strict=True) if keep]
        starts = [at for at, place in enumerate(real) if at == 0 or place == 0]
        if any(real[at] <= real[at - 1] for at in range(len(real)) if at not in starts):
            return "count up"
        counts.append(len(starts))
        lengths += [b - a for a, b in pairwise([*starts, len(real)])]
    return counts, lengths


@pytest.mark.parametrize("side", ["left", "right"])
def test_masks_and_positions_are_made_for_rows_that_bring_one_of_them_or_none(side: Any) -> None:
    processor = InputProcessor(padding_side=side)
    bare = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}]
    masks, places = [[1, 1, 1], [1]], [[0, 1, 2], [0]]
    masked = [row | {"attention_mask": mask} for row, mask in zip(bare, masks, strict=True)]
    placed = [row | {"position_ids": place} for row, place in zip(bare, places, strict=True)]
    whole = listed(processor(bare))
    assert whole["attention_mask"][1] == ([0, 0, 1] if side == "left" else [1, 0, 0])
    assert whole["position_ids"] == [[0, 1, 2], [0, 0, 0]]
    assert listed(processor(masked)) == listed(processor(placed)) == whole


def test_a_batch_never_shares_memory_with_its_rows() -> None:
    row = {"input_ids": torch.tensor([1, 2]), "attention_mask": torch.ones(2, dtype=torch.int64)}
    batch: Any = InputProcessor()([row])
    batch["input_ids"][0, 0], batch["attention_mask"][0, 0] = 9, 0
    assert (row["input_ids"].tolist(), row["attention_mask"].tolist()) == ([1, 2], [1, 1])
