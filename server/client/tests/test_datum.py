"""Rows become datums of the real SDK and come back; without the SDK they are its JSON form."""

from typing import Any

import numpy as np
import pytest

import twinkle_client.datum
from twinkle.errors import DataError
from twinkle.server.common import datum_to_input_feature, extract_rl_features_for_loss, input_feature_to_datum

ROW = {
    "input_ids": [5, 0, 7, 3], "labels": [-100, 7, 0, -100], "attention_mask": [1, 1, 1, 1],
    "messages": [{"role": "user", "content": "a"}],
}  # fmt: skip


def values(tensor: Any) -> list[Any]:
    return list(np.asarray(tensor.tolist() if hasattr(tensor, "tolist") else tensor["data"]).tolist())


@pytest.fixture(params=["sdk", "json"])
def sdk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "sdk":
        pytest.importorskip("tinker", reason="the SDK is a test requirement")
    else:
        monkeypatch.setattr(twinkle_client.datum, "find_spec", lambda name: None)
    return str(request.param)


def test_a_row_becomes_a_datum_and_comes_back(sdk: str) -> None:
    datum = input_feature_to_datum(ROW)
    inputs = datum.loss_fn_inputs if sdk == "sdk" else datum["loss_fn_inputs"]
    assert values(inputs["target_tokens"]) == [0, 7, 0, 0]
    assert values(inputs["weights"]) == [0, 1, 1, 0]
    if sdk == "sdk":
        assert datum.model_input.to_ints() == [5, 0, 7, 3]
        assert (inputs["weights"].dtype, inputs["target_tokens"].dtype) == ("float32", "int64")
    row = datum_to_input_feature(datum)
    assert row["input_ids"] == ROW["input_ids"]
    assert row["labels"] == ROW["labels"]  # token 0 is a token, not padding
    assert (row["length"], row["position_ids"], "loss_scale" in row) == (4, [0, 1, 2, 3], False)


def test_weights_are_weights_and_inputs_of_losses_are_kept(sdk: str) -> None:
    scored = {
        **ROW, "input_ids": np.array(ROW["input_ids"]), "loss_scale": [9.0, 0.5, 2.0, 9.0],
        "old_logps": [0.0, -1.0, -2.0, 0.0], "advantages": np.array([0, 1, -1, 0], np.float32), "ref_logps": [0.0] * 4,
    }  # fmt: skip
    datums = [input_feature_to_datum(scored), input_feature_to_datum({**scored, "old_logps": [0.0, -3.0, 0.5, 0.0]})]
    rows = datum_to_input_feature(datums, template=None)
    assert rows[1]["loss_scale"] == [0.0, 0.5, 2.0, 0.0]
    features = extract_rl_features_for_loss(datums)
    assert features == {
        "old_logps": [[0.0, -1.0, -2.0, 0.0], [0.0, -3.0, 0.5, 0.0]],
        "advantages": [[0.0, 1.0, -1.0, 0.0]] * 2,
        "ref_outputs": {"logps": [[0.0] * 4] * 2},
    }
    assert extract_rl_features_for_loss(input_feature_to_datum(ROW)) == {}
    several = {"input_ids": [1, 2], "labels": [[3, 4], [-100, -100]], "loss_scale": [[0.25, 0.75], [0.0, 0.0]]}
    row = datum_to_input_feature(input_feature_to_datum(several))
    assert (row["labels"], row["loss_scale"]) == (several["labels"], several["loss_scale"])


def test_what_does_not_fit_is_refused(sdk: str) -> None:
    for wrong, text in (
        ({}, "no 'input_ids'"),
        ({**ROW, "labels": [1]}, "1 values for 4"),
        ({**ROW, "advantages": [1.0]}, "'advantages'"),
    ):
        with pytest.raises(DataError, match=text):
            input_feature_to_datum(wrong)
    with pytest.raises(DataError, match="all or none"):
        extract_rl_features_for_loss(
            [input_feature_to_datum({**ROW, "advantages": [0.0] * 4}), input_feature_to_datum(ROW)]
        )
    with pytest.raises(DataError, match="only text"):
        datum_to_input_feature({"model_input": {"chunks": [{"type": "image"}]}, "loss_fn_inputs": {}})
