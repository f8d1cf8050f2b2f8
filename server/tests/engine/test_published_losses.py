"""What the published options of Tinker requests mean, before anything is computed."""

import pytest

from twinkle_server.engine.errors import UserError
from twinkle_server.engine.losses.published import LossCall, read_call
from twinkle_server.wire import tinker_pb2 as pb


def request(loss: str, *inputs: str, forward_only: bool = False) -> pb.ForwardBackwardRequest:
    made = pb.ForwardBackwardRequest(loss_fn=loss, forward_only=forward_only)
    datum = made.data.add()
    for name in inputs:
        datum.loss_fn_inputs[name].dtype = pb.DTYPE_FLOAT32
    return made


def test_a_policy_loss_on_references_is_a_preference_loss() -> None:
    asked = request("importance_sampling", "target_tokens", "ref_logps", "advantages")
    call = read_call(asked, {"dpo_beta": 0.1, "dpo_loss_type": "ipo", "label_smoothing": 0.1}, strict=False)
    options = {"beta": 0.1, "loss_type": "ipo", "label_smoothing": 0.1}
    assert call == LossCall("DPOLoss", options, ignored=("logprobs", "advantages"))
    assert read_call(request("importance_sampling", "advantages"), {}, strict=False) == LossCall(
        "importance_sampling", {}
    )
    assert read_call(asked, {}, strict=True) == LossCall("importance_sampling", {})


@pytest.mark.parametrize(("value", "adapted"), [(1.0, False), (0.0, True)])
def test_a_forward_may_leave_the_adapter_out(value: float, adapted: bool) -> None:
    asked = request("cross_entropy", forward_only=True)
    assert read_call(asked, {"disable_lora": value, "x": 1.0}, strict=True) == LossCall(
        "cross_entropy", {"x": 1.0}, adapted
    )


@pytest.mark.parametrize("value", ["yes", 0.5])
def test_an_adapter_is_left_out_or_not(value: float | str) -> None:
    with pytest.raises(UserError, match="disable_lora must be True or False"):
        read_call(request("cross_entropy", forward_only=True), {"disable_lora": value}, strict=False)
