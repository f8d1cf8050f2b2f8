"""Results are values, and have the attributes of the published models."""

import json

import numpy as np
import pytest

from twinkle.errors import ArgumentError
from twinkle_client.results import result_of


@pytest.mark.parametrize("value", [1.5, "a text", {"loss": 0.5}, None])
def test_results_can_be_dumped(value: object) -> None:
    result = result_of(value)
    assert result.result == value
    assert result.model_dump() == {"result": value}
    assert json.loads(result.model_dump_json(indent=2)) == {"result": value}


def test_arrays_are_kept_or_become_lists() -> None:
    result = result_of({"logps": np.ones((1, 2)), "parts": [np.zeros(1)]})
    assert isinstance(result.model_dump()["result"]["logps"], np.ndarray)
    assert result.model_dump(mode="json") == {"result": {"logps": [[1.0, 1.0]], "parts": [[0.0]]}}
    assert result.model_dump_json() == '{"result":{"logps":[[1.0,1.0]],"parts":[[0.0]]}}'
    with pytest.raises(ArgumentError, match="mode must be 'python' or 'json', got 'xml'"):
        result.model_dump(mode="xml")
