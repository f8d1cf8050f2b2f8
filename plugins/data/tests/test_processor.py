"""Rows become batches of tensors: padding, types, micro-batches, and what is refused."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.errors import ArgumentError, DataError, Unsupported
from twinkle.processor import InputProcessor
from twinkle.template import Template
from twinkle.testing import tiny_model, tiny_tokenizer

SHORT = {"input_ids": [5, 6], "labels": [6, -100]}
LONG = {"input_ids": [7, 8, 9], "labels": [-100, 9, -100]}


def rows(*lengths: int) -> list[dict[str, Any]]:
    return [{"input_ids": list(range(1, length + 1)), "labels": [-100] * length} for length in lengths]


@pytest.mark.parametrize(
    ("side", "ids", "labels", "mask", "positions"),
    [
        (
            "right",
            [[5, 6, 0], [7, 8, 9]],
            [[6, -100, -100], [-100, 9, -100]],
            [[1, 1, 0], [1, 1, 1]],
            [[0, 1, 0], [0, 1, 2]],
        ),
        (
            "left",
            [[0, 5, 6], [7, 8, 9]],
            [[-100, 6, -100], [-100, 9, -100]],
            [[0, 1, 1], [1, 1, 1]],
            [[0, 0, 1], [0, 1, 2]],
        ),
    ],
)
def test_shorter_rows_are_filled_up(side: Any, ids: Any, labels: Any, mask: Any, positions: Any) -> None:
    batch: Any = InputProcessor(padding_side=side)([SHORT, LONG])
    expected = {"input_ids": ids, "labels": labels, "attention_mask": mask, "position_ids": positions}
    assert {key: value.tolist() for key, value in batch.items()} == expected
    assert {value.dtype for value in batch.values()} == {torch.int64}


def test_every_key_of_a_feature_has_its_type_and_padding() -> None:
    first = SHORT | {"completion_mask": [1, 0], "loss_scale": [1, 2], "length": 2, "advantage": 0.5, "good": True}
    second = LONG | {
        "completion_mask": [0, 1, 0],
        "loss_scale": [0.5, 1, 1],
        "length": 3,
        "advantage": 2,
        "good": False,
    }
    first |= {"weights": [0.1, 0.2], "groups": [3, 3], "pixels": np.ones((2, 2)), "messages": [{"role": "user"}]}
    second |= {
        "weights": [1.0, 1, 1],
        "groups": [4, 4, 4],
        "pixels": np.zeros((2, 2)),
        "messages": [{"role": "user"}] * 3,
    }
    first |= {"logprobs": [0.5], "tag": "ab", "user_data": [("a", "1"), ("b", "2")]}
    second |= {"logprobs": [], "tag": "abc", "user_data": None}
    batch: Any = InputProcessor()([first, second])
    assert batch["completion_mask"].tolist() == [[1, 0, 0], [0, 1, 0]]
    assert batch["loss_scale"].tolist() == [[1.0, 2.0, 0.0], [0.5, 1.0, 1.0]]
    assert batch["loss_scale"].dtype == batch["weights"].dtype == batch["advantage"].dtype == torch.float32
    assert batch["weights"][0].tolist() == pytest.approx([0.1, 0.2, 0.0])
    assert batch["groups"].tolist() == [[3, 3, 0], [4, 4, 4]]
    assert batch["length"].tolist() == [2, 3]
    assert batch["advantage"].tolist() == [0.5, 2.0]
    assert batch["good"].tolist() == [True, False]
    assert (batch["pixels"].shape, batch["pixels"].dtype) == ((2, 2, 2), torch.float32)
    assert batch["messages"] == [first["messages"], second["messages"]]
    assert batch["logprobs"] == [[0.5], []]
    assert batch["tag"] == ["ab", "abc"]
    assert batch["user_data"] == [first["user_data"], None]


def test_one_row_lists_arrays_and_tensors_are_the_same_to_it() -> None:
    lists: Any = InputProcessor()([LONG])
    for make in (np.array, torch.tensor, lambda values: torch.tensor(values, dtype=torch.int32)):
        batch: Any = InputProcessor()({key: make(value) for key, value in LONG.items()})
        assert all(torch.equal(batch[key], lists[key]) and batch[key].dtype == torch.int64 for key in lists)


def test_a_collated_batch_stays_what_it_is() -> None:
    features = [row | {"messages": [index], "length": len(row["input_ids"])} for index, row in enumerate((SHORT, LONG))]
    once: Any = InputProcessor()(features)
    twice: Any = InputProcessor()(once)
    assert once.keys() == twice.keys()
    for key, value in once.items():
        assert torch.equal(value, twice[key]) if isinstance(value, torch.Tensor) else value == twice[key]
    with pytest.raises(DataError, match="'advantage' of the collated batch has no entry for each of its 2 rows"):
        InputProcessor()(once | {"advantage": 1.0})


def test_keys_that_are_none_everywhere_are_left_out() -> None:
    assert "images" not in InputProcessor()([SHORT | {"images": None}, LONG | {"images": None}])
    assert InputProcessor()([SHORT | {"attention_mask": None}])["attention_mask"].tolist() == [[1, 1]]


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6), multiple=st.integers(1, 8))
def test_the_width_is_the_smallest_multiple_that_holds_all(lengths: list[int], multiple: int) -> None:
    batch: Any = InputProcessor(pad_to_multiple_of=multiple)(rows(*lengths))
    width = batch["input_ids"].shape[1]
    assert width % multiple == 0
    assert max(lengths) <= width < max(lengths) + multiple
    assert batch["attention_mask"].sum(1).tolist() == lengths


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=7), size=st.integers(1, 8))
def test_micro_batches_hold_every_row_once_in_order(lengths: list[int], size: int) -> None:
    given_rows = rows(*lengths)
    parts = InputProcessor().split_rows(given_rows, size)
    assert [row for part in parts for row in part] == given_rows
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert 1 <= len(parts[-1]) <= size
    equal: Any = InputProcessor().collate_fn(given_rows, micro_batch_size=size)
    assert {batch["input_ids"].shape[1] for batch in equal} == {max(lengths)}
    own: Any = InputProcessor().collate_fn(given_rows, micro_batch_size=size, variable_seq_lengths=True)
    assert [batch["input_ids"].shape[1] for batch in own] == [
        max(len(row["input_ids"]) for row in part) for part in parts
    ]


def test_without_a_size_there_is_one_micro_batch() -> None:
    assert len(InputProcessor().collate_fn([SHORT, LONG])) == 1
    assert InputProcessor().split_rows([SHORT, LONG], None) == [[SHORT, LONG]]
    with pytest.raises(ArgumentError, match="micro_batch_size is 0"):
        InputProcessor().split_rows([SHORT], 0)


def test_tensors_go_to_the_device_asked_for() -> None:
    batch: Any = InputProcessor()([SHORT | {"tag": "a"}], device="meta")
    assert batch["input_ids"].device.type == "meta"
    assert batch["tag"] == ["a"]
    parts: Any = InputProcessor().collate_fn([SHORT], device=torch.device("meta"))
    assert parts[0]["labels"].device.type == "meta"


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([], "no rows"),
        ("text", "not str"),
        (3, "not int"),
        ([3], "row 0 is a int"),
        ([SHORT, {"messages": []}], r"row 1 has no 'input_ids' \(it has: messages\); encode it with a template"),
        ([{"positive": SHORT, "negative": LONG}], "positive0, negative0, positive1"),
        ([SHORT, {"input_ids": [], "labels": []}], "row 1 has no tokens"),
        ([{"input_ids": 3}], "row 0: 'input_ids' is not a flat sequence"),
        ([{"input_ids": ["a"]}], "row 0: 'input_ids' is not a flat sequence"),
        ([{"input_ids": None}], "row 0: 'input_ids' is not a flat sequence"),
        ([{"input_ids": [[1]]}], "row 0: 'input_ids' is not a flat sequence"),
        ([SHORT, {"input_ids": [1, 2, 3], "labels": [1, 2]}], "row 1: 'labels' is 2 values, for 3 tokens"),
        ([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [1, 2], "labels": [1]}], "need one shape"),
        ([SHORT | {"loss_scale": 1.0}], "row 0: 'loss_scale' is no flat sequence, for 2 tokens"),
        ([SHORT, {"input_ids": [1]}], "row 0 has 'labels' and row 1 has not"),
        ([{"input_ids": [1]}, SHORT], "row 1 has 'labels' and row 0 has not"),
        ([SHORT, SHORT | {"input_ids": [1, -2]}], "row 1: 'input_ids' holds -2; it must not be negative"),
        ([SHORT | {"position_ids": [-1, 0]}], "row 0: 'position_ids' holds -1"),
        ([{"input_ids": [1.5]}], "row 0: 'input_ids' holds fractions"),
        ([SHORT, SHORT | {"input_ids": [1.5, 2]}], "row 1: 'input_ids' holds fractions"),
        ([SHORT, SHORT | {"input_ids": [1, 2j]}], "row 1: 'input_ids' holds complex numbers"),
        ([SHORT, SHORT | {"input_ids": [1, 2**70]}], "row 1: 'input_ids' does not hold numbers: Overflow"),
        ([SHORT, SHORT | {"labels": None}], "row 1: 'labels' does not hold numbers"),
        ([{"input_ids": [1, "a"]}], "row 0: 'input_ids' does not hold numbers"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_number_and_key(inputs: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        InputProcessor()(inputs)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"padding_free": 1}, ArgumentError, "padding_free is 1"),
        ({"padding_free": True, "pad_to_multiple_of": 8}, ArgumentError, "no effect with padding_free=True"),
        ({"framework": "megatron"}, Unsupported, "megatron"),
        ({"framework": "jax"}, ArgumentError, "'jax'"),
        ({"padding_side": "top"}, ArgumentError, "'top'"),
        ({"pad_to_multiple_of": 0}, ArgumentError, "pad_to_multiple_of is 0"),
        ({"padding_sid": "left"}, ArgumentError, "'padding_sid', nearest: 'padding_side'"),
    ],
)
def test_options_that_do_not_work_are_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        InputProcessor(**options)


def test_unknown_keywords_of_a_call_are_refused() -> None:
    with pytest.raises(ArgumentError, match="'devise', nearest: 'device'"):
        InputProcessor()([SHORT], devise="cpu")
    with pytest.raises(ArgumentError, match="'micro_batchsize', nearest: 'micro_batch_size'"):
        InputProcessor().collate_fn([SHORT], micro_batchsize=2)


def test_a_processor_pickles() -> None:
    again = pickle.loads(pickle.dumps(InputProcessor(padding_side="left", pad_to_multiple_of=4)))
    assert again([SHORT])["input_ids"].tolist() == [[0, 0, 5, 6]]


def test_padding_on_either_side_leaves_the_log_probabilities_of_a_model_as_they_are(tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    encoder = Template(tokenizer=tiny_tokenizer())
    features: Any = [
        encoder.encode({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]})
        for answer in ("a", "a longer answer")
    ]
    model = AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path)).eval()

    def trained_logps(inputs: Any, **options: Any) -> torch.Tensor:
        batch: Any = InputProcessor(**options)(inputs)
        labels = batch["labels"]
        with torch.no_grad():
            logits = model(**{key: batch[key] for key in ("input_ids", "attention_mask", "position_ids")}).logits
        return logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0][labels != -100]

    alone = torch.cat([trained_logps([feature]) for feature in features])
    for options in ({}, {"padding_side": "left"}, {"pad_to_multiple_of": 16}):
        torch.testing.assert_close(trained_logps(features, **options), alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padding_free", [False, True])
def test_labels_of_whole_rows_are_one_number_or_some_fractions_each(padding_free: bool) -> None:
    processor = InputProcessor(padding_free=padding_free)

    def labels(*values: Any) -> Any:
        rows = [{"input_ids": [1, 2, 3], "labels": values[0]}, {"input_ids": [4, 5], "labels": values[1]}]
        batch = processor(rows)
        return processor.unpack_inputs(batch)["labels"] if padding_free else batch["labels"]

    assert torch.equal(labels(1, 0), torch.tensor([1, 0]))
    assert torch.equal(labels([1], [0]), torch.tensor([1, 0]))
    assert torch.equal(labels([1], 0), torch.tensor([1, 0]))
    assert torch.equal(labels(0.5, 2), torch.tensor([0.5, 2.0]))
    torch.testing.assert_close(labels([0.5, 1.0, 3.0, 4.0], [1.0] * 4), torch.tensor([[0.5, 1, 3, 4], [1, 1, 1, 1]]))
    at_tokens = labels([0.5, 1.0, 3.0], [1.0, 2.0])
    torch.testing.assert_close(at_tokens, torch.tensor([[0.5, 1.0, 3.0], [1.0, 2.0, -100.0]]))


@pytest.mark.parametrize("second", [[1, 2, 3, 4], [0.5], "high", [[1.0], [2.0]]])
def test_labels_that_fit_neither_tokens_nor_rows_are_refused(second: Any) -> None:
    rows = [{"input_ids": [1, 2, 3], "labels": 0.5}, {"input_ids": [4, 5, 6], "labels": second}]
    with pytest.raises(DataError, match="row 1: 'labels'"):
        InputProcessor()(rows)
