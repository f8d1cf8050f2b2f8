"""What must not leak from one step, optimizer or scale into the next, and what the step refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch

from twinkle.errors import ArgumentError, CheckpointError, NonFiniteError, TrainingStateError
from twinkle.testing import tiny_model
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.stepping import clip

ROWS = [{"input_ids": [5, 6, 7, 8][:n], "labels": [*[6, 7, 8, 9][: n - 1], -100]} for n in (4, 2, 3)]
LORA = {"r": 2, "target_modules": "all-linear", "init_lora_weights": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def build(folder: Path, *, lora: bool = False, **options: Any) -> TransformersModel:
    torch.manual_seed(0)
    model = TransformersModel(model_id=str(folder), **{"mixed_precision": "no", **options})
    if lora:
        model.add_adapter_to_model("default", LORA)
    return model


def norm_of_a_step(model: TransformersModel) -> float:
    model.forward_backward(inputs=ROWS)
    return model.clip_grad_norm(max_grad_norm=0.0)


def test_a_new_optimizer_sees_no_gradient_of_parameters_that_the_old_one_left_out(folder: Path) -> None:
    model, fresh = build(folder), build(folder)
    model.set_optimizer("SGD", lr=0.0, params=[p for n, p in model.model.named_parameters() if "lm_head" in n])
    for _ in range(2):
        model.forward_backward(inputs=ROWS)
        model.clip_grad_and_step()
    model.set_optimizer("SGD", lr=0.1)
    fresh.set_optimizer("SGD", lr=0.1)
    assert norm_of_a_step(model) == pytest.approx(norm_of_a_step(fresh), rel=1e-6)


def test_a_loss_scale_does_not_change_under_pending_gradients(folder: Path) -> None:
    model = build(folder, lora=True, mixed_precision="fp16", grad_scaler_config={"init_scale": 64.0})
    model.forward_backward(inputs=ROWS)
    with pytest.raises(TrainingStateError, match="has gradients of the old scale"):
        model.set_grad_scaler(init_scale=1.0)
    model.zero_grad(flush=True)
    model.set_grad_scaler(init_scale=1.0)


def test_without_a_loss_scale_a_gradient_that_is_not_finite_is_no_ordinary_overflow(folder: Path) -> None:
    model = build(folder, lora=True, mixed_precision="fp16", grad_scaler_config={"enabled": False})

    def steep(inputs: Any, outputs: Any) -> Any:
        return {"loss": (outputs["logps"] - outputs["logps"].detach()).abs().sqrt().sum(), "num_tokens": 1}

    model.set_loss(steep)  # 0, with a gradient that is not a number
    model.forward_backward(inputs=ROWS)
    with pytest.raises(NonFiniteError, match="gradient norm"):
        model.clip_grad_norm()


def test_numbers_before_a_step_do_not_show_the_norm_of_the_step_before(folder: Path) -> None:
    model = build(folder, lora=True)
    model.forward_backward(inputs=ROWS)
    model.clip_grad_and_step()
    assert "grad_norm" in model.calculate_metric(is_training=True)
    model.forward_backward(inputs=ROWS)
    assert "grad_norm" not in model.calculate_metric(is_training=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("bound", [None, "1", float("nan"), True])
def test_a_bound_that_is_no_number_is_refused(folder: Path, bound: Any) -> None:
    model = build(folder, lora=True)
    model.forward_backward(inputs=ROWS)
    with pytest.raises(ArgumentError, match="max_grad_norm must be a number"):
        model.clip_grad_norm(max_grad_norm=bound)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [None, "inf", 0, -1.0, float("nan")])
def test_a_norm_that_is_none_is_refused(folder: Path, kind: Any) -> None:
    model = build(folder, lora=True)
    model.forward_backward(inputs=ROWS)
    with pytest.raises(ArgumentError, match="norm_type must be a number above 0"):
        model.clip_grad_norm(1.0, kind)


@pytest.mark.parametrize("kind", [1.0, 2.0, float("inf")])
def test_the_norm_of_short_gradients_is_measured_in_float32(kind: float) -> None:
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(n, 37, generator=generator).bfloat16() for n in (1, 30, 200)]
    grads += [torch.randn(7, generator=generator), torch.zeros(0, 4)]
    wanted = torch.linalg.vector_norm(torch.cat([grad.double().flatten() for grad in grads]), kind)
    assert clip(grads, 0.0, kind) == pytest.approx(float(wanted), rel=1e-6)


def test_a_model_that_is_only_looked_at_keeps_its_dtype(folder: Path) -> None:
    model = build(folder, mixed_precision="bf16", dtype="bfloat16")
    model.forward_only(inputs=ROWS)
    assert {p.dtype for p in model.model.parameters()} == {torch.bfloat16}
    model.set_optimizer("SGD", lr=0.1)
    assert {p.dtype for p in model.model.parameters()} == {torch.float32}


def test_weights_that_were_trained_do_not_vanish_below_an_adapter(folder: Path) -> None:
    model = build(folder)
    model.forward_backward(inputs=ROWS)
    model.clip_grad_and_step()
    with pytest.raises(TrainingStateError, match="the full model was trained for 1 steps"):
        model.add_adapter_to_model("default", LORA)


def test_rows_that_train_nothing_count_nothing_in_an_older_loss(folder: Path) -> None:
    def total(inputs: Any, outputs: Any) -> Any:
        mask = inputs["labels"] != -100
        return {"loss": -(outputs["logps"] * mask).sum(), "num_tokens": mask.sum()}

    idle = {"input_ids": [5, 6, 7], "labels": [-100] * 3}
    norms = []
    for rows, micro in ((ROWS, None), ([*ROWS, idle], 1)):
        model = build(folder, lora=True)
        model.set_loss(total)
        model.forward_backward(inputs=rows, micro_batch_size=micro)
        norms.append(model.clip_grad_norm(max_grad_norm=0.0))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_an_evaluation_between_forward_and_backward_changes_no_gradient(folder: Path, recompute: bool) -> None:
    norms = []
    for evaluates in (False, True):
        model = build(folder, gradient_checkpointing=recompute)
        model.add_adapter_to_model("default", {**LORA, "lora_dropout": 0.5})
        torch.manual_seed(1)
        model.forward(inputs=ROWS)
        model.calculate_loss()
        if evaluates:
            model.forward_only(inputs=ROWS)
        model.backward()
        norms.append(model.clip_grad_norm(max_grad_norm=0.0))
    assert norms[0] == norms[1]


def loss_that_a_scheduler_sees(model: TransformersModel) -> float:
    return model.optimizer_group["default"].last_loss


def test_a_scheduler_sees_the_loss_of_the_whole_step_whenever_metrics_are_read(folder: Path) -> None:
    seen = []
    for reads in (False, True):
        model = build(folder, lora=True)
        for row in ROWS:
            model.forward_backward(inputs=[row])
            if reads:
                model.calculate_metric(is_training=True)
        model.clip_grad_and_step(gradient_accumulation_steps=3)
        seen.append(loss_that_a_scheduler_sees(model))
    assert seen[0] == seen[1] > 1.0


def test_a_scheduler_does_not_see_gradients_that_were_dropped(folder: Path) -> None:
    model, fresh = build(folder, lora=True), build(folder, lora=True)
    model.forward_backward(inputs=ROWS)
    model.zero_grad(flush=True)
    for one in (model, fresh):
        one.forward_backward(inputs=ROWS[:1])
        one.clip_grad_and_step()
    assert loss_that_a_scheduler_sees(model) == loss_that_a_scheduler_sees(fresh)


@pytest.mark.full
def test_a_step_that_goes_on_from_a_checkpoint_has_the_loss_of_its_first_part_too(folder: Path, tmp_path: Path) -> None:
    losses = []
    for interrupted in (False, True):
        model = build(folder, lora=True)
        model.forward_backward(inputs=ROWS[:2])
        if interrupted:
            path = model.save("part", output_dir=str(tmp_path), save_optimizer=True)
            model = build(folder, lora=True)
            model.set_optimizer("AdamW", lr=1e-5)
            model.resume_from_checkpoint(path)
        model.forward_backward(inputs=ROWS[2:])
        model.clip_grad_and_step(gradient_accumulation_steps=2)
        losses.append(loss_that_a_scheduler_sees(model))
    assert losses[0] == losses[1]


def test_a_loss_scale_that_does_not_fit_leaves_the_model_as_it_was(folder: Path, tmp_path: Path) -> None:
    model = build(folder, lora=True, mixed_precision="fp16", grad_scaler_config={"enabled": False})
    other = build(folder, lora=True, mixed_precision="fp16")
    for one in (model, other):
        one.set_optimizer("AdamW", lr=1e-2)
    model.forward_backward(inputs=ROWS)
    model.clip_grad_and_step()
    path = model.save("unscaled", output_dir=str(tmp_path), save_optimizer=True)
    before = {name: tensor.clone() for name, tensor in other.get_state_dict().items()}
    with pytest.raises(CheckpointError, match="lacks 'scale'"):
        other.resume_from_checkpoint(path)
    assert all(torch.equal(before[name], tensor) for name, tensor in other.get_state_dict().items())
    assert other.optimizer_group["default"].cur_step == 0
