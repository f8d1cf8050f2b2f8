"""What can be given as rows of a call."""

from typing import Any

import pytest

from twinkle.data_format import SampledSequence, SampleResponse
from twinkle.errors import ArgumentError
from twinkle_client.rows import sendable_rows
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
