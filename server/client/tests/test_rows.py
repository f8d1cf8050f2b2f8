"""What can be given as rows of a call."""

from typing import Any

import numpy as np
import pytest

from twinkle.data_format import SampledSequence, SampleResponse
from twinkle.errors import ArgumentError
from twinkle_client.rows import continued_row, sendable_prompt, sendable_rows
from twinkle_client.types import SampledSequenceModel, SampleResponseModel


def test_responses_are_the_rows_of_their_sequences_in_order() -> None:
    rows: list[Any] = [{"input_ids": [1, number], "labels": [number, -100]} for number in range(3)]
    remote = SampleResponseModel(
        sequences=[SampledSequenceModel(stop_reason="stop", tokens=[7], new_input_feature=row) for row in rows[:2]]
    )
    local = SampleResponse([SampledSequence(stop_reason="stop", tokens=[7], new_input_feature=rows[2])])
    assert sendable_rows([remote, local]) == rows
    bare = SampleResponse([SampledSequence(stop_reason="stop", tokens=[7])])
    with pytest.raises(ArgumentError, match="sequence 0 has no new_input_feature"):
        sendable_rows([bare])


def test_a_collated_batch_is_its_rows() -> None:
    batch = {"input_ids": np.array([[1, 2, 3], [4, 5, 0]]), "labels": [[2, 3, -100], [5, -100, -100]], "length": None}
    first, second = sendable_rows(batch)
    assert first["input_ids"].tolist() == [1, 2, 3]
    assert second["labels"] == [5, -100, -100]
    assert sendable_rows({"input_ids": [1, 2], "labels": [2, -100]}) == [{"input_ids": [1, 2], "labels": [2, -100]}]
    for wrong in (np.array([[1, 1, 1]]), 3, "text"):
        with pytest.raises(ArgumentError, match=r"inputs\['attention_mask'\] of a collated batch must have 2 entries"):
            sendable_rows({**batch, "attention_mask": wrong})


def test_columns_that_describe_a_row_are_not_sent() -> None:
    row = {
        "input_ids": [1, 2],
        "target": 24,
        "nums": [4, 6],
        "user_data": [("ground_truth", "1")],
        "pixel_values": [1.0],
    }
    assert sendable_rows([row]) == [{"input_ids": [1, 2], "pixel_values": [1.0]}]


def test_a_sampled_row_has_everything_that_its_prompt_has() -> None:
    prompt = {
        "question": "1+1?", "user_data": [("ground_truth", "2")], "messages": [{"role": "user", "content": "1+1?"}],
        "input_ids": [1, 2], "labels": [-100, -100], "length": 2,
    }  # fmt: skip
    sent = sendable_prompt(prompt)
    assert set(sent) == {"input_ids", "labels", "messages"}
    turn = {"role": "assistant", "content": "2"}
    sampled = {**sent, "input_ids": [1, 2, 3], "labels": [-100, 3, -100], "messages": [*sent["messages"], turn]}
    assert continued_row(prompt, {**sampled, "length": 3}) == {
        **prompt, "input_ids": [1, 2, 3], "labels": [-100, 3, -100], "length": 3,
        "messages": [*prompt["messages"], turn],
    }  # fmt: skip
