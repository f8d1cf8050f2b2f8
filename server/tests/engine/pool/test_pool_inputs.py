"""Which inputs a request's rows may have: weights on some, inputs of other losses, losses that fit the wire."""

import inspect

import numpy as np
import pytest
from server_pool import Bench, datum, drawn

from twinkle import registry
from twinkle.loss import Loss
from twinkle_server.engine.errors import UserError
from twinkle_server.engine.losses.catalog import Losses


def test_rows_without_weights_among_rows_with_them_have_weights_of_one(shared: Bench) -> None:
    with_weights, without = datum(6, 1), datum(9, 2)
    ones = datum(9, 2, weights=np.ones(9, np.float32))
    del without[1]["weights"]
    for order in (1, -1):
        mixed = shared.run("a", [with_weights, without][::order], forward=True)[1]
        full = shared.run("a", [with_weights, ones][::order], forward=True)[1]
        assert mixed["loss:sum"] == full["loss:sum"]


def test_rows_of_several_targets_without_weights_have_weights_of_one_each(shared: Bench) -> None:
    targets = np.arange(12).reshape(6, 2)
    rows = [datum(6, 1, target_tokens=targets, weights=np.full((6, 2), 0.5, np.float32))]
    plain = datum(6, 2, target_tokens=targets)
    ones = datum(6, 2, target_tokens=targets, weights=np.ones((6, 2), np.float32))
    del plain[1]["weights"]
    assert (
        shared.run("a", [*rows, plain], forward=True)[1]["loss:sum"]
        == shared.run("a", [*rows, ones], forward=True)[1]["loss:sum"]
    )


@pytest.mark.parametrize("name", ["logprobs", "advantages", "clip_low_threshold", "sequence_ratio_mask"])
def test_cross_entropy_leaves_inputs_of_other_published_losses_unread(shared: Bench, name: str) -> None:
    plain, other = datum(6, 1), datum(7, 2)
    extra = datum(6, 1, **{name: np.full(6, np.nan, np.float32)})  # not even checked: it has no meaning here
    expected = shared.run("a", [plain, other], forward=True)[1]["loss:sum"]
    assert shared.run("a", [extra, other], forward=True)[1]["loss:sum"] == expected


def test_an_input_that_no_published_loss_has_is_still_refused(shared: Bench) -> None:
    with pytest.raises(UserError, match="does not take the loss_fn_input 'reward'"):
        shared.run("a", [datum(6, 1, reward=np.ones(6, np.float32))])


@pytest.mark.parametrize("name", Losses().names())
def test_every_loss_on_offer_can_be_asked_for_over_the_wire(name: str) -> None:
    """A loss on the wire scores tokens (its answer is their logprobs), and needs no input that requests do not have."""
    (spec,) = [spec for spec in registry().specs("loss")[name] if "served" in spec.runtimes]
    loss = registry().resolve(spec, "loss")
    assert issubclass(loss, Loss)
    scores = loss.require_logps or loss.require_logits  # which the service asks for with the logits
    assert scores, f"{name} does not return token logprobs"
    needed = [
        parameter.name
        for parameter in list(inspect.signature(loss.__call__).parameters.values())[3:]
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    assert set(needed) <= set(spec.inputs), f"{name} needs {needed}"


def test_regression_is_not_on_offer() -> None:
    assert "MSELoss" not in Losses().names()
    assert "MSELoss" in registry().specs("loss")


def test_drawn_rows_go_through_cross_entropy_as_they_are(shared: Bench) -> None:
    tokens, inputs = drawn(6, 4)
    bare = (tokens, {"target_tokens": inputs["target_tokens"]})
    assert shared.run("a", [(tokens, inputs)], forward=True)[1] == shared.run("a", [bare], forward=True)[1]
