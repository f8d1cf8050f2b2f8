"""`TransformersModel` as a loop sees it: outputs, numbers, order of calls, and every wrong call with its message."""

import logging
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from twinkle.data_format import LossOutput
from twinkle.errors import (
    ArgumentError,
    ComponentNotFound,
    ComponentTypeError,
    DataError,
    EncodeError,
    NonFiniteError,
    TrainingStateError,
    Unsupported,
)
from twinkle.loss import Loss
from twinkle.testing import tiny_model
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.pool.multi import MultiLoraTransformersModel

ROWS: list[Any] = [
    {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, 7, 8, 9, -100]},
    {"input_ids": [9, 8, 7], "labels": [8, 7, -100]},
    {"input_ids": [3, 4, 5, 6, 7, 8, 9], "labels": [-100, -100, -100, 6, 7, 8, -100]},
]
TRAJECTORY: Any = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(folder: Path) -> TransformersModel:
    made = TransformersModel(model_id=str(folder), mixed_precision="no")
    made.add_adapter_to_model("default", peft.LoraConfig(r=4, target_modules="all-linear"))
    made.set_optimizer("AdamW", lr=1e-2)
    return made


class Callback(Loss):
    """A loss made of a function, for tests."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, inputs: Any, outputs: Any, **kwargs: Any) -> Any:
        return self.function(inputs, outputs, **kwargs)


def nll(inputs: Any, outputs: Any) -> torch.Tensor:
    return -outputs["logps"].sum()


# outputs


@pytest.mark.sample(2)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen2", "mistral", "gemma2", "gemma3"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logps_are_the_log_softmax_of_the_models_own_logits(
    tmp_path: Path, architecture: str, temperature: float
) -> None:
    folder = tiny_model(tmp_path, architecture)
    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    assert model.backbone.splits  # whole logits are not needed for any of these
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logps = model.forward_only(inputs=ROWS, temperature=temperature)["logps"]
    for row, ours in zip(ROWS, logps, strict=True):
        with torch.no_grad():
            log_p = (plain(input_ids=torch.tensor([row["input_ids"]])).logits[0] / temperature).log_softmax(-1)
        for position, label in enumerate(row["labels"]):
            wanted = float(log_p[position, label]) if label != -100 else 0.0
            assert float(ours[position]) == pytest.approx(wanted, abs=1e-5)


def test_a_head_that_twinkle_does_not_know_is_computed_whole(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    from twinkle_transformers.backbone import Backbone, Needs

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inner = plain.forward

    def strange(*args: Any, **kwargs: Any) -> Any:
        output = inner(*args, **kwargs)
        output.logits = output.logits * 3
        return output

    plain.forward = strange
    backbone = Backbone.of(plain)
    assert not backbone.splits
    batch = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[6, 7, -100]])}
    with torch.no_grad():
        output = backbone(batch, torch.device("cpu"), Needs(predictions=True, entropies=True), 1.0)
        log_p = plain(input_ids=batch["input_ids"]).logits[0].log_softmax(-1)
    assert output["logps"][0, :2].tolist() == pytest.approx([float(log_p[0, 6]), float(log_p[1, 7])], abs=1e-5)
    assert output["predictions"][0].tolist() == [*log_p.argmax(-1)[:2].tolist(), -100]


def test_logits_come_only_when_asked_for(model: TransformersModel) -> None:
    assert "logits" not in model.forward_only(inputs=ROWS)
    logits = model.forward_only(inputs=ROWS, return_logits=True, micro_batch_size=2)["logits"]
    assert logits.shape == (3, 7, 264)


def test_micro_batches_of_a_forward_only_join_in_the_callers_order(model: TransformersModel) -> None:
    whole = model.forward_only(inputs=ROWS)["logps"]
    cut = model.forward_only(inputs=ROWS, micro_batch_size=1)["logps"]
    torch.testing.assert_close(cut, whole, atol=1e-6, rtol=0)


def test_a_trajectory_is_encoded_by_the_template(model: TransformersModel) -> None:
    output = model.forward_backward(inputs=TRAJECTORY)
    assert output["num_tokens"] == len("hello") + 1  # the answer's bytes and its end token


def test_a_template_may_be_named_or_given(model: TransformersModel, folder: Path) -> None:
    from twinkle.template import Template

    for template in ("Template", Template, Template(str(folder), max_length=64)):
        model.set_template(template)
        assert model.forward_only(inputs=TRAJECTORY)["logps"].shape[0] == 1
    model.set_template("Template", max_length=4)
    with pytest.raises(EncodeError, match="max_length"):
        model.forward_only(inputs=TRAJECTORY)


def test_disabled_adapters_give_the_base_model_and_come_back(model: TransformersModel, folder: Path) -> None:
    base = TransformersModel(model_id=str(folder), mixed_precision="no").forward_only(inputs=ROWS)["logps"]
    model.forward_backward(inputs=ROWS)
    model.clip_grad_and_step()
    adapted = model.forward_only(inputs=ROWS)["logps"]
    assert torch.equal(model.forward_only(inputs=ROWS, disable_lora=True)["logps"], base)
    assert torch.equal(model.forward_only(inputs=ROWS, adapter_name="")["logps"], base)
    assert torch.equal(model.forward_only(inputs=ROWS)["logps"], adapted)
    assert not torch.equal(adapted, base)
    model.forward_backward(inputs=ROWS)  # and it trains on


def test_two_adapters_learn_apart(folder: Path) -> None:
    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    for name in ("a", "b"):
        model.add_adapter_to_model(name, {"r": 2, "target_modules": "all-linear"})
        model.set_optimizer("SGD", lr=1.0, adapter_name=name)
    before = {name: tensor.clone() for name, tensor in model.get_state_dict(adapter_name="b").items()}
    model.forward_backward(inputs=ROWS, adapter_name="a")
    model.clip_grad_and_step(adapter_name="a")
    assert all(torch.equal(t, before[name]) for name, t in model.get_state_dict(adapter_name="b").items())
    model.forward_backward(inputs=ROWS, adapter_name="b")
    model.clip_grad_and_step(adapter_name="b")
    assert any(not torch.equal(t, before[name]) for name, t in model.get_state_dict(adapter_name="b").items())


def test_under_bfloat16_the_trained_weights_are_float32(folder: Path) -> None:
    full = TransformersModel(model_id=str(folder), dtype="bfloat16")
    full.set_optimizer("AdamW", lr=1e-3)
    assert {p.dtype for p in full.model.parameters()} == {torch.float32}
    lora = TransformersModel(model_id=str(folder), dtype="bfloat16")
    lora.add_adapter_to_model("default", {"r": 2, "target_modules": "all-linear"})
    dtypes = {p.requires_grad: p.dtype for p in lora.model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    lora.forward_backward(inputs=ROWS)
    lora.clip_grad_and_step()


def test_gradient_checkpointing_gives_the_same_gradients(folder: Path) -> None:
    grads = []
    for recompute in (False, True):
        made = TransformersModel(model_id=str(folder), mixed_precision="no", gradient_checkpointing=recompute)
        made.forward_backward(inputs=ROWS)
        grads.append([p.grad for p in made.model.parameters()])
    torch.testing.assert_close(grads[1], grads[0])


# numbers


def test_metrics_are_plain_numbers_of_the_step_they_name(model: TransformersModel) -> None:
    model.set_lr_scheduler("LinearWarmupScheduler", num_warmup_steps=0, num_training_steps=10)
    rates = []
    for _ in range(3):
        output = model.forward_backward(inputs=ROWS, micro_batch_size=2)
        norm = model.clip_grad_norm()
        model.step()
        model.zero_grad()
        model.lr_step()
        metrics = model.calculate_metric(is_training=True)
        assert metrics["loss"] == pytest.approx(output["loss"], rel=1e-6)
        assert metrics["grad_norm"] == pytest.approx(norm)
        assert {type(value) for value in metrics.values()} <= {int, float}
        rates.append(metrics["learning rate"])
    assert rates == pytest.approx([1e-2, 0.9e-2, 0.8e-2])  # the rate that the step used, not the next one's


def test_the_loss_metric_is_exact_over_uneven_micro_batches_and_steps(model: TransformersModel) -> None:
    wanted = model.forward_only(inputs=ROWS)["logps"]
    model.set_optimizer("SGD", lr=0.0)
    for rows in (ROWS[:1], ROWS[1:]):
        model.forward_backward(inputs=rows, micro_batch_size=1)
        model.clip_grad_and_step()
    loss = model.calculate_metric(is_training=True)["loss"]
    assert loss == pytest.approx(-float(wanted.sum()) / 8, rel=1e-6)


def test_evaluation_sums_over_batches_and_leaves_training_numbers_alone(model: TransformersModel) -> None:
    model.forward_backward(inputs=ROWS[:1])
    for rows in (ROWS[:2], ROWS[2:]):
        model.forward_only(inputs=rows)
        model.calculate_loss()
    evaluated = model.calculate_metric(is_training=False)
    logps = model.forward_only(inputs=ROWS)["logps"]
    assert evaluated["loss"] == pytest.approx(-float(logps.sum()) / 8, rel=1e-6)
    assert evaluated["total_tokens"] == 8
    assert model.calculate_metric(is_training=True)["total_tokens"] == 3


def test_accuracy_counts_where_the_best_token_is_the_target(model: TransformersModel) -> None:
    best = model.forward_only(inputs=ROWS[:1], return_logits=True)["logits"][0].argmax(-1).tolist()
    row = {"input_ids": ROWS[0]["input_ids"], "labels": [best[0], best[1], (best[2] + 1) % 264, -100, -100]}
    model.forward_only(inputs=[row])
    model.calculate_loss()
    metrics = model.calculate_metric(is_training=False)
    assert (metrics["correct_tokens"], metrics["total_tokens"]) == (2, 3)


def test_a_step_that_trains_no_token_is_a_zero_gradient_and_says_so(
    model: TransformersModel, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("twinkle").propagate = True
    model.set_optimizer("SGD", lr=1.0, weight_decay=0.0)
    before = {name: tensor.clone() for name, tensor in model.get_state_dict().items()}
    model.forward_backward(inputs=[{"input_ids": [5, 6, 7], "labels": [-100, -100, -100]}])
    model.clip_grad_and_step()
    assert all(torch.equal(t, before[name]) for name, t in model.get_state_dict().items())
    assert "the denominator of its losses is 0" in caplog.text


# losses


def test_per_row_arguments_are_cut_with_the_rows_and_others_passed_whole(model: TransformersModel) -> None:
    seen = []

    def loss(inputs: Any, outputs: Any, advantages: Any, beta: list[float]) -> LossOutput:
        seen.append((list(advantages), beta))
        return LossOutput(nll(inputs, outputs), 1)

    model.set_loss(loss)
    model.forward_backward(inputs=ROWS, advantages=[1.0, 2.0, 3.0], beta=[0.1, 0.2], micro_batch_size=2)
    assert seen == [([1.0, 2.0], [0.1, 0.2]), ([3.0], [0.1, 0.2])]


def test_a_per_row_argument_of_another_length_is_refused(model: TransformersModel) -> None:
    model.set_loss(Callback(lambda inputs, outputs, **kwargs: LossOutput(nll(inputs, outputs), 1)))
    with pytest.raises(ArgumentError, match="advantages has 2 entries, the batch has 3 rows"):
        model.forward_backward(inputs=ROWS, advantages=[1.0, 2.0], micro_batch_size=2)


def test_an_older_sum_loss_is_read_and_an_older_mean_is_refused_when_split(model: TransformersModel) -> None:
    wanted = model.forward_backward(inputs=ROWS)["loss"]
    model.zero_grad()
    model.set_loss(
        lambda inputs, outputs: {"loss": nll(inputs, outputs), "num_tokens": (inputs["labels"] != -100).sum()}
    )
    assert model.forward_backward(inputs=ROWS, micro_batch_size=2)["loss"] == pytest.approx(wanted, rel=1e-6)
    model.zero_grad()
    mean = Callback(lambda inputs, outputs: {"loss": nll(inputs, outputs) / 8, "num_tokens": 0})
    model.set_loss(mean)
    assert model.forward_backward(inputs=ROWS)["loss"] == pytest.approx(wanted, rel=1e-6)
    model.zero_grad()
    with pytest.raises(ComponentTypeError, match="Callback returned a mean"):
        model.forward_backward(inputs=ROWS, micro_batch_size=2)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda i, o: nll(i, o), "returned a Tensor; return LossOutput"),
        (lambda i, o: LossOutput(o["logps"], 1), r"loss_sum of shape \[3, 7\]; it must be a scalar"),
        (lambda i, o: LossOutput(nll(i, o), -1), "denominator -1"),
        (lambda i, o: LossOutput(nll(i, o), float("nan")), "denominator nan"),
        (lambda i, o: None, "returned a NoneType"),
    ],
)
def test_a_loss_of_a_wrong_form_is_named(model: TransformersModel, result: Any, message: str) -> None:
    model.set_loss(Callback(result))
    with pytest.raises(ComponentTypeError, match=message):
        model.forward_backward(inputs=ROWS)


def test_a_detached_loss_is_refused(model: TransformersModel) -> None:
    model.set_loss(Callback(lambda inputs, outputs: LossOutput(nll(inputs, outputs).detach(), 1)))
    with pytest.raises(TrainingStateError, match="has no gradient"):
        model.forward_backward(inputs=ROWS)


def poison(rows_of_the_bad_batch: int) -> Any:
    """Return a cross entropy that is NaN on micro-batches with that many rows."""

    def loss(inputs: Any, outputs: Any) -> LossOutput:
        factor = float("nan") if len(inputs["labels"]) == rows_of_the_bad_batch else 1.0
        return LossOutput(nll(inputs, outputs) * factor, int((inputs["labels"] != -100).sum()))

    return loss


def test_a_nan_loss_stops_with_the_batch_kept_and_the_weights_untouched(model: TransformersModel) -> None:
    before = {name: tensor.clone() for name, tensor in model.get_state_dict().items()}
    model.set_loss(poison(1))
    with pytest.raises(NonFiniteError, match=r"adapter 'default' is nan at step 1; .*on_nonfinite='skip'") as caught:
        model.forward_backward(inputs=ROWS, micro_batch_size=2)
    assert caught.value.inputs == ROWS[2:]
    assert all(torch.equal(t, before[name]) for name, t in model.get_state_dict().items())
    with pytest.raises(TrainingStateError, match="no accumulated gradients"):
        model.step()


@pytest.mark.full
def test_a_nan_micro_batch_is_skipped_by_option_and_counted(folder: Path) -> None:
    def trained(rows: list[Any], loss: Any, size: int | None) -> tuple[dict[str, Any], dict[str, float]]:
        torch.manual_seed(0)
        made = TransformersModel(model_id=str(folder), mixed_precision="no", on_nonfinite="skip")
        made.add_adapter_to_model("default", {"r": 2, "target_modules": "all-linear"})
        made.set_optimizer("SGD", lr=1.0)
        made.set_loss(loss)
        made.forward_backward(inputs=rows, micro_batch_size=size)
        made.clip_grad_and_step()
        return made.get_state_dict(), made.calculate_metric(is_training=True)

    ours, metrics = trained(ROWS, poison(1), 2)
    wanted, _ = trained(ROWS[:2], "CrossEntropyLoss", None)
    torch.testing.assert_close(ours, wanted)
    assert metrics["nonfinite_skipped"] == 1
    assert metrics["total_tokens"] == 5


def test_a_nan_loss_between_separate_calls_is_skipped_by_option(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = TransformersModel(model_id=str(folder), mixed_precision="no", on_nonfinite="skip")
    model.set_optimizer("SGD", lr=1.0, weight_decay=0.0)
    model.set_loss(poison(3))
    before = {name: tensor.clone() for name, tensor in model.get_state_dict().items()}
    model.forward(inputs=ROWS)
    model.calculate_loss()
    model.backward()
    model.clip_grad_and_step()
    assert all(torch.equal(t, before[name]) for name, t in model.get_state_dict().items())
    assert model.calculate_metric(is_training=True)["nonfinite_skipped"] == 1
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "is left out" in told


def test_an_infinite_gradient_stops_before_the_update(model: TransformersModel) -> None:
    before = {name: tensor.clone() for name, tensor in model.get_state_dict().items()}
    model.forward_backward(inputs=ROWS)
    next(p for p in model.model.parameters() if p.grad is not None).grad.fill_(float("inf"))  # type: ignore[union-attr]
    with pytest.raises(NonFiniteError, match="gradient norm"):
        model.clip_grad_and_step()
    assert all(torch.equal(t, before[name]) for name, t in model.get_state_dict().items())


# order of calls and wrong arguments


def test_calls_in_an_impossible_order_are_named(model: TransformersModel) -> None:
    with pytest.raises(TrainingStateError, match="no forward to score"):
        model.calculate_loss()
    with pytest.raises(TrainingStateError, match="there is no forward"):
        model.backward()
    with pytest.raises(TrainingStateError, match="no accumulated gradients"):
        model.step()
    model.forward(inputs=ROWS)
    with pytest.raises(TrainingStateError, match="no loss was calculated"):
        model.backward()
    model.calculate_loss()
    model.backward()
    model.clip_grad_norm()
    with pytest.raises(TrainingStateError, match=r"call step\(\) first, or zero_grad\(\) to drop them"):
        model.forward_backward(inputs=ROWS)
    model.step()
    with pytest.raises(TrainingStateError, match="already made"):
        model.step()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", [TransformersModel, MultiLoraTransformersModel])
def test_a_step_uses_each_gradient_once_also_without_zero_grad(folder: Path, kind: Any, accumulation: int) -> None:
    """The published loop calls `step()` alone; it trains as one with `zero_grad()`."""
    states, own = [], {"adapter_name": "a"}
    for clears in (True, False):
        model = kind(model_id=str(folder), mixed_precision="no")
        model.add_adapter_to_model("a", {"r": 4, "target_modules": "all-linear"}, seed=1)
        model.set_optimizer("AdamW", lr=1e-2, **own)
        for number in range(4):
            model.forward_backward(inputs=ROWS[number % 2 :], **own)
            model.step(gradient_accumulation_steps=accumulation, **own)
            if clears:
                model.zero_grad(**own)
        assert model.calculate_metric(is_training=True, **own)["iters"] == 4 // accumulation
        states.append(model.get_state_dict(**own))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_scheduler_needs_an_optimizer_first(folder: Path) -> None:
    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    with pytest.raises(TrainingStateError, match="set the optimizer first"):
        model.set_lr_scheduler("CosineAnnealingLR", T_max=3)


def test_without_set_optimizer_adamw_at_1e_5_trains(folder: Path) -> None:
    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    model.forward_backward(inputs=ROWS)
    model.clip_grad_and_step()
    assert type(model.optimizer_group[""].optimizer).__name__ == "AdamW"
    assert model.calculate_metric(is_training=True)["learning rate"] == 1e-5


def test_biases_and_norms_are_not_decayed(model: TransformersModel, folder: Path) -> None:
    full = TransformersModel(model_id=str(folder), mixed_precision="no")
    full.set_optimizer("AdamW", lr=1e-3, weight_decay=0.1)
    decayed, plain = full.optimizer_group[""].optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert {p.ndim for p in plain["params"]} == {1}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adafactor", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax"])
def test_the_optimizers_of_torch_have_their_names(model: TransformersModel, name: str) -> None:
    model.set_optimizer(name, lr=1e-3)
    model.forward_backward(inputs=ROWS)
    model.clip_grad_and_step()
    assert type(model.optimizer_group["default"].optimizer).__module__.startswith("torch.optim")


def test_an_optimizer_that_calls_the_loss_itself_is_refused(model: TransformersModel) -> None:
    with pytest.raises(Unsupported, match="LBFGS evaluates the loss inside its step"):
        model.set_optimizer("LBFGS", lr=1.0)


def test_a_scheduler_that_watches_a_number_gets_the_loss_or_the_callers(model: TransformersModel) -> None:
    model.set_optimizer("SGD", lr=1.0, weight_decay=0.0)
    model.set_lr_scheduler("ReduceLROnPlateau", patience=0, factor=0.5)
    group = model.optimizer_group["default"]
    model.forward_backward(inputs=ROWS)
    model.clip_grad_and_step(max_grad_norm=1e-9)  # nothing is learned, so the next loss is no better
    model.forward_backward(inputs=ROWS)
    model.clip_grad_and_step(max_grad_norm=1e-9)
    assert group.learning_rates() == [0.5]
    model.forward_backward(inputs=ROWS)
    model.clip_grad_norm(1e-9)
    model.step()
    model.zero_grad()
    model.lr_step(metrics=0.0)
    assert group.learning_rates() == [0.5]
    model.set_lr_scheduler("ConstantLR")
    model.forward_backward(inputs=ROWS)
    model.step()
    with pytest.raises(ArgumentError, match="ConstantLR watches no number"):
        model.lr_step(metrics=0.0)
    model.lr_step()
    with pytest.raises(ArgumentError, match="ConstantLR watches no number"):
        model.lr_step(metrics=0.0)  # there is no update to follow, and it is as wrong as before


def test_optim_params_overwrite_the_groups(model: TransformersModel) -> None:
    model.forward_backward(inputs=ROWS)
    model.step(optim_params={"lr": 0.5, "betas": (0.5, 0.6)})
    assert {(g["lr"], g["betas"]) for g in model.optimizer_group["default"].optimizer.param_groups} == {
        (0.5, (0.5, 0.6))
    }
    model.zero_grad()
    model.forward_backward(inputs=ROWS)
    with pytest.raises(ArgumentError, match="has no 'momentum'"):
        model.step(optim_params={"momentum": 1})


def test_wrong_names_and_keywords_name_the_nearest(model: TransformersModel) -> None:
    with pytest.raises(ComponentNotFound, match="CrossEntropyLoss"):
        model.set_loss("CrossEntropyLos")
    with pytest.raises(ArgumentError, match="reduction"):
        model.set_loss("CrossEntropyLoss", redction="mean")
    with pytest.raises(ArgumentError, match="betas"):
        model.set_optimizer("AdamW", lr=1e-3, beta=(0.9, 0.95))
    with pytest.raises(ArgumentError, match="num_warmup_steps"):
        model.set_lr_scheduler("CosineWarmupScheduler", warmup_steps=1, num_training_steps=2)
    with pytest.raises(ArgumentError, match=r"there is no adapter 'defualt'; did you mean 'default'\?"):
        model.forward_backward(inputs=ROWS, adapter_name="defualt")
    with pytest.raises(ArgumentError, match="old_logps"):
        model.forward_backward(inputs=ROWS, old_logps=[[0.0]] * 3)
    with pytest.raises(TypeError, match="micro_batch"):
        model.forward_only(inputs=ROWS, micro_batch=2)  # type: ignore[call-arg]
    with pytest.raises(ComponentTypeError, match="Loss"):
        model.set_loss(3)


def test_rows_that_cannot_be_used_are_named(model: TransformersModel) -> None:
    with pytest.raises(DataError, match="at least one row, got none"):
        model.forward_backward(inputs=[])
    with pytest.raises(DataError, match=r"row 1 has the keys \['text'\]"):
        model.forward_backward(inputs=[ROWS[0], {"text": "hello"}])
    with pytest.raises(DataError, match="row 0 is a str"):
        model.forward_backward(inputs=["hello"])
    with pytest.raises(TrainingStateError, match="no `labels`"):
        model.forward_backward(inputs=[{"input_ids": [1, 2]}])
    with pytest.raises(ArgumentError, match=r"micro_batch_size must be .* got 0"):
        model.forward_backward(inputs=ROWS, micro_batch_size=0)


def test_tokens_outside_the_vocabulary_are_named(model: TransformersModel) -> None:
    with pytest.raises(DataError, match=r"row 1 of the batch: input_ids\[1\] is 264, .* has 264 tokens"):
        model.forward_backward(inputs=[ROWS[0], {"input_ids": [5, 264], "labels": [5, -100]}])
    with pytest.raises(DataError, match=r"labels\[0\] is 900"):
        model.forward_backward(inputs=[{"input_ids": [5, 6], "labels": [900, -100]}])


def test_adapters_that_make_no_sense_are_refused(model: TransformersModel) -> None:
    with pytest.raises(ArgumentError, match="already exists"):
        model.add_adapter_to_model("default", {"r": 2})
    with pytest.raises(ArgumentError, match="must consist of letters"):
        model.add_adapter_to_model("a.b", {"r": 2})
    with pytest.raises(ArgumentError, match="rank r must be at least 1, got 0"):
        model.add_adapter_to_model("zero", peft.LoraConfig(r=0, target_modules="all-linear"))
    with pytest.raises(ArgumentError, match="does not fit the model"):
        model.add_adapter_to_model("none", {"r": 2, "target_modules": ["no_such_layer"]})
    with pytest.raises(Unsupported, match="IA3Config is not supported"):
        model.add_adapter_to_model("ia3", peft.IA3Config())
    with pytest.raises(ArgumentError, match=r"gradient_accumulation_steps must be .* got 0"):
        model.add_adapter_to_model("x", {"r": 2}, gradient_accumulation_steps=0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mixed_precision": "fp8"}, Unsupported, "mixed_precision='fp8'"),
        ({"strategy": "deepspeed"}, ArgumentError, "choose 'accelerate' or 'native_fsdp'"),
        ({"memory_efficient_init": True}, ArgumentError, "memory_efficient_init=True needs a mesh with fsdp"),
        ({"fsdp_config": {"cpu_offload": True}}, ArgumentError, "there is no mesh; give DeviceMesh.from_sizes"),
        ({"ddp_config": {"bucket_cap": 1}}, ArgumentError, "unknown option 'bucket_cap', nearest: 'bucket_cap_mb'"),
        ({"grad_scaler_config": {"init_scale": 1.0}}, ArgumentError, "is for mixed_precision='fp16'"),
        ({"on_nonfinite": "ignore"}, ArgumentError, "choose 'raise' or 'skip'"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    folder: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        TransformersModel(model_id=str(folder), **options)


def test_a_model_without_an_id_is_refused() -> None:
    with pytest.raises(ArgumentError, match="model_id is missing"):
        TransformersModel()


def test_the_summary_names_what_is_trained(model: TransformersModel) -> None:
    text = model.get_train_configs()
    assert "LoRA r=4" in text
    assert "AdamW, lr 0.01" in text
    assert "float32, on cpu" in text


def test_the_summary_of_a_warm_up_keeps_the_rate_that_was_given(folder: Path) -> None:
    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    model.set_optimizer("AdamW", lr=0.01)
    model.set_lr_scheduler("ConstantWarmupScheduler", num_warmup_steps=4)
    text = model.get_train_configs()
    assert "AdamW, lr 0.01\n" in text
    assert "ConstantWarmupScheduler, lr 0 at the next step" in text


@pytest.mark.parametrize(
    ("args", "options"), [(("./m",), {}), ((), {"model": "./m"}), ((), {"model_name_or_path": "./m"})]
)
def test_a_model_id_at_the_wrong_place_is_named(args: tuple[Any, ...], options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"model_id is missing; .*: model_id='./m'"):
        TransformersModel(*args, **options)


def test_a_misspelt_argument_of_the_call_is_not_blamed_on_the_loss(model: TransformersModel) -> None:
    with pytest.raises(ArgumentError, match="there is no argument 'micro_batch'; did you mean 'micro_batch_size'"):
        model.forward_backward(inputs=[{"input_ids": [1, 2], "labels": [2, -100]}], micro_batch=1)


def test_rows_longer_than_the_context_of_the_model_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = TransformersModel(model_id=str(tiny_model(tmp_path / "m", max_position_embeddings=4)), mixed_precision="no")
    for length in (4, 6, 6, 5):
        model.forward_only(inputs=[{"input_ids": [5] * length, "labels": [*[5] * (length - 1), -100]}])
    assert [r.getMessage()[:64] for r in caplog.records if "the context of" in r.getMessage()] == [
        "a row has 6 tokens, and the context of the model is 4; to cut ro"
    ]


def test_a_configuration_that_peft_refuses_is_a_wrong_argument(folder: Path) -> None:
    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    config = {"r": 2, "target_modules": "all-linear", "layers_to_transform": [0], "layers_pattern": 3}
    with pytest.raises(ArgumentError, match=r"adapter 'default': (PEFT refuses the configuration|does not fit)"):
        model.add_adapter_to_model("default", {**config, "target_modules": ".*q_proj"})
