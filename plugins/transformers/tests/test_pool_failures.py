"""What is wrong with one adapter's rows, loss or weights harms that adapter's operation and nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pools import Row, flat_of, lora, make_rows, moments_of, open_pool
from torch import Tensor

from twinkle.data_format import LossOutput
from twinkle.engine import AdapterRef, Operation, OperationResult
from twinkle.errors import (
    ArgumentError,
    CapacityError,
    DataError,
    NonFiniteError,
    OperationsFailed,
    TrainingStateError,
    Unsupported,
)
from twinkle.loss import Loss
from twinkle.testing import tiny_model

GOOD = make_rows(2, 9, seed=0)
OTHER = make_rows(2, 9, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(folder: Path) -> Any:
    return three_adapters(folder)


def three_adapters(folder: Path, **options: Any) -> Any:
    model = open_pool(folder, **options)
    for at, name in enumerate(("a", "b", "c")):
        model.add_adapter_to_model(name, lora(4 if name != "c" else 2), seed=at)
        model.set_optimizer("AdamW", lr=1e-2, adapter_name=name)
    model.forward_backward(inputs=GOOD + OTHER + GOOD, adapter_name=["a", "a", "b", "b", "c", "c"])
    model.clip_grad_and_step(adapter_name=["a", "b", "c"])
    model.forward_backward(inputs=OTHER, adapter_name="b")  # a gradient that a failure must leave alone
    return model


def state_of(model: Any, name: str) -> dict[str, Any]:
    group, flat = model.optimizer_group[name], flat_of(model, name)
    found: dict[str, Any] = {"weights": flat.detach().clone()}
    found |= {key: value.clone() for key, value in moments_of(model, name).items()}
    found["grad"] = None if flat.grad is None else flat.grad.clone()
    found["counters"] = (
        group.cur_step,
        group.pending,
        group.denominator,
        group.loss_sum,
        len(group.train_status.unseen),
    )
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) if isinstance(value, Tensor) else value == other[key]
        for key, value in one.items()
    )


def broken(change: dict[str, Any]) -> list[Row]:
    return [OTHER[0], {**OTHER[1], **change}]


def raises(inputs: Any, outputs: Any) -> LossOutput:
    raise OSError("the loss has no disk")


def returns_nan(inputs: Any, outputs: Any) -> LossOutput:
    return LossOutput(outputs["logps"].sum() * float("nan"), 1.0)


def is_detached(inputs: Any, outputs: Any) -> LossOutput:
    return LossOutput(-outputs["logps"].detach().sum(), 1.0)


def has_a_steep_gradient(inputs: Any, outputs: Any) -> LossOutput:
    zero = outputs["logps"] - outputs["logps"].detach()
    return LossOutput(zero.abs().sqrt().sum(), 1.0)


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise RuntimeError("the backward of the loss fails")


def fails_in_backward(inputs: Any, outputs: Any) -> LossOutput:
    return LossOutput(FailsBackward.apply(outputs["logps"]).sum(), 1.0)


def returns_two(inputs: Any, outputs: Any) -> LossOutput:
    return LossOutput(outputs["logps"][:2, 0], 1.0)


def counts_below_zero(inputs: Any, outputs: Any) -> LossOutput:
    return LossOutput(outputs["logps"].sum(), -1.0)


ROWS: dict[str, tuple[Any, type[Exception], str]] = {
    "a token outside the vocabulary": ({"input_ids": [1, 264, *range(7)]}, DataError, "264"),
    "a token below zero": ({"input_ids": [1, -2, *range(7)]}, DataError, "-2"),
    "a label outside the vocabulary": ({"labels": [300] * 9}, DataError, "300"),
    "too few labels": ({"labels": [1, 2]}, DataError, "labels"),
    "too many labels": ({"labels": [1] * 10}, DataError, "labels"),
    "no tokens": ({"input_ids": [], "labels": []}, DataError, "token"),
    "a row beyond the context": ({"input_ids": [1] * 513, "labels": [1] * 513}, DataError, "513.*512"),
    "no labels": ({"labels": None}, Exception, "labels"),
}
LOSSES: dict[str, tuple[Any, type[Exception], str]] = {
    "raises": (raises, OSError, "no disk"),
    "NaN": (returns_nan, NonFiniteError, "returns_nan of adapter 'b' is nan"),
    "detached": (is_detached, TrainingStateError, "is_detached has no gradient"),
    "steep": (has_a_steep_gradient, NonFiniteError, "gradient of adapter 'b' is nan"),
    "fails in the backward": (fails_in_backward, RuntimeError, "backward of the loss fails"),
    "two numbers": (returns_two, Exception, "scalar"),
    "negative count": (counts_below_zero, Exception, "denominator -1"),
    "unknown arguments": ("DPOLoss", ArgumentError, "ref"),
}


def fails_alone(model: Any, rows: list[Row], error: type[Exception], match: str) -> None:
    """Check that the operation of "b" fails with this error, and that "a" and "c" get what they get without it."""
    before = state_of(model, "b")
    with pytest.raises(OperationsFailed) as caught:
        model.forward_backward(inputs=GOOD + rows + OTHER, adapter_name=["a", "a", "b", "b", "c", "c"])
    [reason] = caught.value.exceptions
    assert isinstance(reason, error)
    with pytest.raises(error, match=match):
        raise reason
    assert "in adapter 'b': its rows 0, 1, ... are the rows [2, 3] of the call" in reason.__notes__
    assert f"adapter 'b' (rows [2, 3] of the call): {reason}" in str(caught.value)
    assert [output is None for output in caught.value.outputs] == [False, False, True, True, False, False]
    assert same(state_of(model, "b"), before)
    fused = {name: flat_of(model, name).grad.clone() for name in ("a", "c")}
    for name, mine in (("a", GOOD), ("c", OTHER)):
        model.zero_grad(adapter_name=name, flush=True)
        model.forward_backward(inputs=mine, adapter_name=name)
        assert torch.equal(flat_of(model, name).grad, fused[name])
    model.clip_grad_and_step(adapter_name=["a", "b", "c"])


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ROWS)
def test_a_bad_row_harms_its_own_operation(model: Any, name: str) -> None:
    change, error, match = ROWS[name]
    fails_alone(model, broken(change), error, match)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", LOSSES)
def test_a_bad_loss_harms_its_own_operation(model: Any, name: str) -> None:
    loss, error, match = LOSSES[name]
    model.set_loss(loss, adapter_name="b")
    fails_alone(model, OTHER, error, match)


@pytest.mark.full
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_harm_their_own_adapter(model: Any, value: float) -> None:
    flat_of(model, "b").data[5] = value
    before = {name: state_of(model, name) for name in ("a", "b", "c")}
    rows = make_rows(6, (4, 11, 7), seed=4)
    names = ["a", "b", "c", None, "b", "a"]
    with pytest.raises(OperationsFailed) as caught:
        model.forward_backward(inputs=rows, adapter_name=names)
    [reason] = caught.value.exceptions
    assert isinstance(reason, NonFiniteError)
    assert reason.inputs == [rows[1], rows[4]]
    assert before["b"]["counters"] == state_of(model, "b")["counters"]
    for row, output in enumerate(caught.value.outputs):
        assert (output is None) == (names[row] == "b")
        assert output is None or bool(output["logps"].isfinite().all())
    for name in ("a", "c"):
        assert bool(flat_of(model, name).grad.isfinite().all())


def test_left_out_rows_cost_their_operation_alone(folder: Path) -> None:
    model = three_adapters(folder, on_nonfinite="skip")
    model.set_loss(returns_nan, adapter_name="b")
    before = state_of(model, "b")
    outputs = model.forward_backward(inputs=GOOD + OTHER, adapter_name=["a", "a", "b", "b"])
    assert outputs[0]["loss"] > 0
    after = state_of(model, "b")
    assert torch.equal(after["grad"], before["grad"])
    assert after["counters"][2] == before["counters"][2]


def test_an_operation_whose_second_half_fails_adds_nothing_of_its_first(folder: Path) -> None:
    model = three_adapters(folder, tokens_per_pass=10)
    calls: list[int] = []

    def fails_later(inputs: Any, outputs: Any) -> LossOutput:
        calls.append(len(inputs["labels"]))
        if len(calls) > 1:
            raise ValueError("not this time")
        return LossOutput(-outputs["logps"].sum(), 8.0)

    model.set_loss(fails_later, adapter_name="b")
    before = state_of(model, "b")
    with pytest.raises(OperationsFailed):
        model.forward_backward(inputs=GOOD + OTHER, adapter_name=["a", "a", "b", "b"])
    assert calls == [1, 1]
    assert same(state_of(model, "b"), before)


class Interruption:
    """Raises in a layer of the base model at a certain call, or when some token goes through the embedding."""

    def __init__(self, model: Any, error: BaseException, token: int | None = None) -> None:
        self.error, self.token, self.calls = error, token, 0
        self.handle = model.model.get_input_embeddings().register_forward_pre_hook(self)

    def __call__(self, module: Any, args: Any) -> None:
        self.calls += 1
        if self.token is None or bool((args[0] == self.token).any()):
            raise self.error


def test_a_forward_that_fails_inside_the_model_harms_its_operation_alone(model: Any) -> None:
    rows = broken({"input_ids": [1, 255, *range(7)]})
    before, expected = state_of(model, "b"), {}
    for name, mine in (("a", GOOD), ("c", OTHER)):
        model.forward_backward(inputs=mine, adapter_name=name)
        expected[name] = flat_of(model, name).grad.clone()
        model.zero_grad(adapter_name=name, flush=True)
    broken_forward = Interruption(model, RuntimeError("the layer broke"), token=255)
    with pytest.raises(OperationsFailed) as caught:
        model.forward_backward(inputs=[*GOOD, *rows, *OTHER], adapter_name=["a", "a", "b", "b", "c", "c"])
    broken_forward.handle.remove()
    assert [str(error) for error in caught.value.exceptions] == ["the layer broke"]
    assert same(state_of(model, "b"), before)
    for name, grad in expected.items():
        assert torch.equal(flat_of(model, name).grad, grad)
        assert model.optimizer_group[name].pending == 1


@pytest.mark.full
def test_an_interrupted_call_leaves_everything_as_it_was(model: Any) -> None:
    before = {name: state_of(model, name) for name in ("a", "b", "c")}
    broken_forward = Interruption(model, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        model.forward_backward(inputs=GOOD + OTHER, adapter_name=["a", "b", "c", None])
    broken_forward.handle.remove()
    assert all(same(state_of(model, name), before[name]) for name in before)
    model.forward_backward(inputs=GOOD, adapter_name=["a", "b"])


@pytest.mark.full
def test_an_interrupted_call_of_several_passes_does_each_operation_whole_or_not_at_all(folder: Path) -> None:
    model, whole = three_adapters(folder, tokens_per_pass=10), three_adapters(folder, tokens_per_pass=10)
    rows, names = [*GOOD, *make_rows(2, 9, seed=2)], ["a", "b", "c", "c"]
    whole.forward_backward(inputs=rows, adapter_name=names)
    before = state_of(model, "c")
    broken_forward = Interruption(model, KeyboardInterrupt(), token=rows[3]["input_ids"][0])
    with pytest.raises(KeyboardInterrupt):
        model.forward_backward(inputs=rows, adapter_name=names)
    broken_forward.handle.remove()
    assert same(state_of(model, "c"), before)
    for name in ("a", "b"):
        assert torch.equal(flat_of(model, name).grad, flat_of(whole, name).grad)


# calls that make no sense


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"adapter_name": None}, "adapter_name is required"),
        ({"adapter_name": ["a", "bb"]}, "no adapter 'bb'; did you mean 'b'"),
        ({"adapter_name": ["a"]}, "1 names and 2 rows"),
        ({"adapter_name": ["a", "b", "c"]}, "3 names and 2 rows"),
        ({"adapter_name": ["a", 3]}, "got a int"),
        ({"adapter_name": "bb"}, "no adapter 'bb'"),
        ({"adapter_name": 3}, "adapter_name"),
        ({"adapter_name": ["a", "b"], "micro_batch_size": 0}, "micro_batch_size must be .* got 0"),
        ({"adapter_name": ["a", "b"], "temperature": 0.0}, "temperature must be above 0 in a forward, got 0"),
        ({"adapter_name": ["a", "b"], "temprature": 2.0}, "did you mean 'temperature'"),
        ({"adapter_name": [None, None], "advantages": [1.0, 1.0]}, "none of the losses"),
        ({"adapter_name": ["a", "b"], "advantages": [1.0]}, "advantages"),
        ({"adapter_name": ["a", "b"], "advantage": [1.0, 1.0]}, "advantage"),
        ({"adapter_name": ["a", "b"], "task": "classification"}, "classification"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused_before_anything_is_done(
    model: Any, arguments: dict[str, Any], match: str
) -> None:
    before = {name: state_of(model, name) for name in ("a", "b", "c")}
    with pytest.raises((ArgumentError, Unsupported, OperationsFailed)) as caught:
        model.forward_backward(inputs=GOOD, **arguments)
    reasons = caught.value.exceptions if isinstance(caught.value, OperationsFailed) else [caught.value]
    for reason in reasons:
        with pytest.raises((ArgumentError, Unsupported), match=match):
            raise reason
    assert all(same(state_of(model, name), before[name]) for name in before)


def test_each_operation_of_a_pool_fails_by_itself(model: Any) -> None:
    stale = AdapterRef("a", 77)
    operations = [
        Operation("a", "forward_backward", GOOD),
        Operation("nobody", "forward", GOOD),
        Operation(stale, "forward", GOOD),
        Operation(None, "forward_backward", GOOD),
        Operation("c", "backward", GOOD),  # type: ignore[arg-type]
        Operation("c", "forward", GOOD, options={"temprature": 1.0}),
        Operation("c", "forward", GOOD, loss_inputs={"advantages": [1.0, 1.0]}),
        Operation("c", "forward", []),
        Operation("c", "forward", GOOD, loss="NoSuchLoss"),
        Operation(None, "forward", GOOD),
    ]
    results = model.pool.run(operations)
    assert [isinstance(result, OperationResult) for result in results] == [True, *[False] * 8, True]
    for index, result in enumerate(results):
        assert isinstance(result, OperationResult) or (result.index == index and str(result.error))
    assert [type(result.error) for result in results[1:4]] == [ArgumentError, TrainingStateError, ArgumentError]


def test_a_base_row_is_never_trained(model: Any) -> None:
    with pytest.raises(ArgumentError, match="adapter_name is required"):
        model.forward_backward(inputs=GOOD)
    weights = {name: parameter.clone() for name, parameter in model.model.named_parameters()}
    outputs = model.forward_backward(inputs=GOOD, adapter_name=[None, "a"])
    assert "loss" not in outputs[0]
    model.clip_grad_and_step(adapter_name="a")
    for name, parameter in model.model.named_parameters():
        assert torch.equal(parameter, weights[name])
        assert parameter.grad is None
        assert not parameter.requires_grad


@pytest.mark.full
def test_arguments_of_a_loss_are_there_for_all_rows_of_an_adapter_or_for_none(model: Any) -> None:
    model.set_loss("GRPOLoss", adapter_name="a")
    with pytest.raises(ArgumentError, match=r"of adapter .* is None for the rows \[\d\] and not for the others"):
        model.forward_backward(
            inputs=GOOD + OTHER, adapter_name=["a", "a", "b", "b"], advantages=[1.0, None, None, None]
        )


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"position_ids": [0, 2, 4, 6]}, "row 1 must have one run of ones"),
        ({"position_ids": [5, 6, 7, 8]}, "row 1 must have one run of ones"),
        ({"attention_mask": [1, 0, 1, 1], "labels": [2, -100, 4, -100]}, "row 1 must have one run of ones"),
        ({"attention_mask": [1, 1, 0, 0]}, "row 1 has a label at 2, where its attention_mask has no token"),
        ({"attention_mask": [0, 0, 0, 0]}, "no tokens"),
    ],
)
def test_rows_that_are_no_whole_sequences_are_refused(model: Any, row: dict[str, Any], match: str) -> None:
    """A pass sees the tokens of each sequence one after the other, from position 0."""
    first = {key: [0, 1, 2, 3] if key == "position_ids" else [1] * 4 for key in row if key != "labels"}
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [2, 3, 4, -100], **change} for change in (first, row)]
    with pytest.raises(DataError, match=match):
        model.forward_backward(inputs=rows, adapter_name="a")


@pytest.mark.full
def test_arguments_of_steps_are_checked(model: Any) -> None:
    for name in ("b", ["b"]):
        with pytest.raises(TypeError, match="max_grad_nrm"):
            model.clip_grad_and_step(max_grad_nrm=1.0, adapter_name=name)
    for names in (3, [3]):
        with pytest.raises(ArgumentError, match="int"):
            model.clip_grad_and_step(adapter_name=names)
    model.add_adapter_to_model("d", lora())
    model.pool.run([Operation("d", "forward_backward", GOOD)])
    with pytest.raises(TrainingStateError, match="adapter 'd' has no optimizer"):
        model.clip_grad_and_step(adapter_name=["b", "d"])
    assert model.optimizer_group["b"].pending == 1


# losses that compare rows


class Compares(Loss):
    """A loss that looks at all rows at once."""

    splittable = False

    def __call__(self, inputs: Any, outputs: Any) -> LossOutput:
        scores = outputs["logps"].sum(1)
        return LossOutput((scores[:, None] - scores[None]).square().sum(), 1.0)


class Pairs(Compares):
    """A loss that looks at two rows at a time."""

    splittable = True
    rows_together = 2

    def __call__(self, inputs: Any, outputs: Any) -> LossOutput:
        scores = outputs["logps"].sum(1).view(-1, 2)
        return LossOutput((scores[:, 0] - scores[:, 1]).square().sum(), len(scores))


@pytest.mark.full
def test_rows_that_a_loss_compares_are_never_parted(folder: Path) -> None:
    rows = make_rows(4, (9, 12, 5), seed=3)
    losses: dict[int, list[Any]] = {}
    for budget in (10, 10_000):
        model = three_adapters(folder, tokens_per_pass=budget)
        for loss in (Compares(), Pairs()):
            model.set_loss(loss, adapter_name="a")
            losses.setdefault(budget, []).append(model.forward_backward(inputs=rows, adapter_name="a")["loss"])
    assert losses[10] == pytest.approx(losses[10_000], rel=1e-5)


def test_a_micro_batch_size_that_parts_what_a_loss_compares_is_refused(model: Any) -> None:
    model.set_loss(Compares(), adapter_name="a")
    with pytest.raises(ArgumentError, match="compares all rows"):
        model.forward_backward(inputs=GOOD, adapter_name="a", micro_batch_size=1)
    model.set_loss(Pairs(), adapter_name="a")
    with pytest.raises(
        ArgumentError, match="micro_batch_size must be an integer of at least 2, or None for the whole batch, got 1"
    ):
        model.forward_backward(inputs=GOOD, adapter_name="a", micro_batch_size=1)
    with pytest.raises(ArgumentError, match=r"compares groups of 2 consecutive rows, got 1"):
        model.forward_backward(inputs=GOOD[:1], adapter_name="a")
    model.forward_backward(inputs=GOOD, adapter_name="a", micro_batch_size=3)


# names, limits, steps


def test_a_name_that_is_taken_is_refused(model: Any) -> None:
    before = state_of(model, "a")
    with pytest.raises(ArgumentError, match="'a' already exists"):
        model.add_adapter_to_model("a", lora())
    assert same(state_of(model, "a"), before)


def test_limits_say_how_much_and_for_whom(folder: Path) -> None:
    model = open_pool(folder, max_loras=1, max_r=4, max_length=10, target_modules=["q_proj"])
    with pytest.raises(ArgumentError, match="adapter 'a': rank must be at most max_r=4, got 8"):
        model.add_adapter_to_model("a", lora(8, target_modules=["q_proj"]))
    with pytest.raises(ArgumentError, match="adapter 'a': rank must be at most max_r=4, got 5"):
        model.add_adapter_to_model("a", lora(2, target_modules=["q_proj"], rank_pattern={"q_proj": 5}))
    with pytest.raises(ArgumentError, match=r"adapter 'a': it adapts .*k_proj"):
        model.add_adapter_to_model("a", lora(4, target_modules=["k_proj"]))
    model.add_adapter_to_model("a", lora(4, target_modules=["q_proj"]))
    with pytest.raises(CapacityError, match="adapter 'b': there are 1 adapters and max_loras is 1"):
        model.add_adapter_to_model("b", lora(4, target_modules=["q_proj"]))
    with pytest.raises(DataError, match="row 1 has 11 tokens, and max_length is 10"):
        model.forward_backward(inputs=make_rows(2, (10, 11), seed=0), adapter_name="a")


def test_a_row_beyond_max_length_harms_its_own_operation(folder: Path) -> None:
    model = three_adapters(folder, max_length=10)
    with pytest.raises(OperationsFailed) as caught:
        model.forward_backward(inputs=[GOOD[0], *make_rows(1, 11, seed=0)], adapter_name=["a", "c"])
    assert [type(error) for error in caught.value.exceptions] == [DataError]
    assert caught.value.outputs[0] is not None


@pytest.mark.parametrize("option", [{"max_loras": 0}, {"max_r": True}, {"max_length": 2.5}, {"tokens_per_pass": 0}])
def test_limits_that_are_none_are_refused(folder: Path, option: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(option))):
        open_pool(folder, **option)


@pytest.mark.full
def test_steps_of_adapters_named_twice_or_without_gradients_are_refused(model: Any) -> None:
    before = {name: state_of(model, name) for name in ("a", "b", "c")}
    with pytest.raises(ArgumentError, match="must contain each adapter once"):
        model.clip_grad_and_step(adapter_name=["b", "b"])
    with pytest.raises(TrainingStateError, match="adapter 'a' has no accumulated gradients"):
        model.clip_grad_and_step(adapter_name=["b", "a"])
    with pytest.raises(ArgumentError, match="no adapter 'z'"):
        model.clip_grad_and_step(adapter_name=["b", "z"])
    with pytest.raises(ArgumentError, match="max_grad_norm"):
        model.clip_grad_and_step(float("nan"), adapter_name=["b"])
    assert all(same(state_of(model, name), before[name]) for name in before)


def test_a_gradient_that_is_no_number_costs_its_own_step(model: Any) -> None:
    model.forward_backward(inputs=GOOD, adapter_name=["a", "c"])
    flat_of(model, "b").grad[3] = float("nan")
    weights = {name: flat_of(model, name).detach().clone() for name in ("a", "b", "c")}
    with pytest.raises(OperationsFailed) as caught:
        model.clip_grad_and_step(adapter_name=["a", "b", "c"])
    [error] = caught.value.exceptions
    assert isinstance(error, NonFiniteError)
    assert "in the step of adapter 'b'" in error.__notes__
    assert torch.equal(flat_of(model, "b"), weights["b"])
    assert not torch.equal(flat_of(model, "a"), weights["a"])
    assert model.optimizer_group["b"].pending == 0
    assert flat_of(model, "b").grad is None
