"""The update of a step is the gradient of the global mean, however its rows are cut: checked against float64."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from threads import one_thread  # noqa: F401 - a fixture
from transformers import AutoModelForCausalLM
from uneven import uneven_rows

from twinkle.data_format import LossOutput
from twinkle.loss import Loss
from twinkle.testing import tiny_model
from twinkle_transformers.model import TransformersModel

LENGTHS = (5, 31, 12, 7, 23, 3, 17, 9)
LR = 64.0  # large enough that rounding of the parameters does not hide the update


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return uneven_rows(LENGTHS)


class SequenceMean(Loss):
    """A loss that is a mean over rows of means over tokens: its denominator counts rows."""

    def __call__(self, inputs: Any, outputs: Any) -> LossOutput:
        mask = (inputs["labels"] != -100).float()
        means = -(outputs["logps"] * mask).sum(-1) / mask.sum(-1)
        return LossOutput(means.sum(), means.shape[0])


def reference_update(folder: Path, rows: list[Any], lora: bool, by_row: bool) -> dict[str, torch.Tensor]:
    """One SGD step in plain torch, float64, one row at a time."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if lora:
        torch.manual_seed(7)
        model = peft.get_peft_model(model, lora_config())
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data = torch.randn(parameter.shape, generator=seeded(name)) * 0.02
    model = model.double()
    parts, tokens = [], 0
    for row in rows:
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0]
        labels = torch.tensor(row["labels"])
        mask = labels != -100
        nll = -logits.log_softmax(-1)[mask].gather(-1, labels[mask][:, None])
        parts.append(nll.mean() if by_row else nll.sum())
        tokens += int(mask.sum())
    loss = torch.stack(parts).sum() / (len(rows) if by_row else tokens)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(trained.values()))
    return {name: -LR * grad for name, grad in zip(trained, grads, strict=True)}


def seeded(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(sum(map(ord, name)))


def lora_config() -> peft.LoraConfig:
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def our_update(
    folder: Path, lora: bool, loss: Any, run: Callable[[TransformersModel], None], accumulation: int = 1
) -> dict[str, torch.Tensor]:
    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    if lora:
        torch.manual_seed(7)
        model.add_adapter_to_model("default", lora_config(), gradient_accumulation_steps=accumulation)
        for name, parameter in model.model.named_parameters():
            if "lora_B" in name:
                parameter.data = torch.randn(parameter.shape, generator=seeded(name)) * 0.02
    model.set_loss(loss)
    model.set_optimizer("SGD", lr=LR, weight_decay=0.0)
    before = {n: p.detach().clone() for n, p in model.model.named_parameters() if p.requires_grad}
    run(model)
    after = dict(model.model.named_parameters())
    return {name: after[name].detach() - start for name, start in before.items()}


def relative_error(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == wanted.keys()
    difference = sum(float((ours[n].double() - wanted[n]).square().sum()) for n in wanted)
    size = sum(float(wanted[n].square().sum()) for n in wanted)
    return (difference / size) ** 0.5


def whole(rows: list[Any]) -> Callable[[TransformersModel], None]:
    def run(model: TransformersModel) -> None:
        model.forward_backward(inputs=rows)
        model.clip_grad_and_step(max_grad_norm=0)

    return run


def micro(rows: list[Any], size: int) -> Callable[[TransformersModel], None]:
    def run(model: TransformersModel) -> None:
        model.forward_backward(inputs=rows, micro_batch_size=size)
        model.clip_grad_and_step(max_grad_norm=0)

    return run


def accumulated(rows: list[Any], steps: int, size: int | None = None) -> Callable[[TransformersModel], None]:
    def run(model: TransformersModel) -> None:
        share = len(rows) // steps
        for start in range(0, len(rows), share):
            model.forward_backward(inputs=rows[start : start + share], micro_batch_size=size)
            model.clip_grad_and_step(max_grad_norm=0, gradient_accumulation_steps=steps)

    return run


def unclipped(rows: list[Any]) -> Callable[[TransformersModel], None]:
    def run(model: TransformersModel) -> None:
        model.forward(inputs=rows)
        model.calculate_loss()
        model.backward()
        model.step()
        model.zero_grad()
        model.lr_step()

    return run


WAYS = {
    "one batch of 8": whole,
    "micro-batches of 2": lambda rows: micro(rows, 2),
    "micro-batches of 3": lambda rows: micro(rows, 3),
    "2 accumulation steps": lambda rows: accumulated(rows, 2),
    "4 accumulation steps": lambda rows: accumulated(rows, 4),
    "2 steps in micro-batches of 3": lambda rows: accumulated(rows, 2, 3),
    "never clipped": unclipped,
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize(
    ("loss", "by_row"), [("CrossEntropyLoss", False), (SequenceMean(), True)], ids=["token", "row"]
)
def test_every_way_of_cutting_a_step_gives_the_update_of_float64_torch(
    folder: Path, rows: list[Any], lora: bool, loss: Any, by_row: bool
) -> None:
    wanted = reference_update(folder, rows, lora, by_row)
    errors = {name: relative_error(our_update(folder, lora, loss, way(rows)), wanted) for name, way in WAYS.items()}
    assert {name: error for name, error in errors.items() if error > 1e-6} == {}


def test_accumulation_over_k_steps_updates_at_k_2k_3k(folder: Path, rows: list[Any]) -> None:
    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    model.add_adapter_to_model("default", lora_config(), gradient_accumulation_steps=3)
    model.set_optimizer("SGD", lr=0.1)
    changed_at = []
    previous = copy.deepcopy(model.get_state_dict())
    for call in range(1, 10):
        model.forward_backward(inputs=rows[:2])
        model.clip_grad_and_step()
        now = copy.deepcopy(model.get_state_dict())
        if any(not torch.equal(now[name], previous[name]) for name in now):
            changed_at.append(call)
        previous = now
    assert changed_at == [3, 6, 9]
    assert model.optimizer_group["default"].cur_step == 9


def test_an_unfinished_tail_can_be_flushed(folder: Path, rows: list[Any]) -> None:
    def run(model: TransformersModel) -> None:
        for start in (0, 2, 4):
            model.forward_backward(inputs=rows[start : start + 2])
            model.clip_grad_and_step(max_grad_norm=0)
        assert model.optimizer_group["default"].updates == 0
        model.clip_grad_and_step(max_grad_norm=0, flush=True)
        model.clip_grad_and_step(flush=True)  # nothing is left: nothing happens
        assert model.optimizer_group["default"].updates == 1

    ours = our_update(folder, True, "CrossEntropyLoss", run, accumulation=4)
    assert relative_error(ours, reference_update(folder, rows[:6], True, False)) <= 1e-6


@pytest.mark.full
def test_clipping_uses_the_norm_of_the_divided_gradient(folder: Path, rows: list[Any]) -> None:
    wanted = reference_update(folder, rows, True, False)
    norm = sum(float(u.square().sum()) for u in wanted.values()) ** 0.5 / LR
    seen: list[float] = []

    def run(model: TransformersModel) -> None:
        model.forward_backward(inputs=rows, micro_batch_size=3)
        seen.append(model.clip_grad_norm(max_grad_norm=norm / 10))
        model.step()

    ours = our_update(folder, True, "CrossEntropyLoss", run)
    assert seen == [pytest.approx(norm, rel=1e-5)]
    clipped = sum(float(u.double().square().sum()) for u in ours.values()) ** 0.5 / LR
    assert clipped == pytest.approx(norm / 10, rel=1e-5)


def test_numbers_that_a_loss_reports_are_logged_whatever_the_split(folder: Path, rows: list[dict[str, Any]]) -> None:
    class Reporting(Loss):
        def __call__(self, inputs: Any, outputs: Any) -> LossOutput:
            mask = inputs["labels"] != -100
            total = -(outputs["logps"] * mask).sum()
            return LossOutput(total, float(mask.sum()), {"nll": float(total.detach())})

    seen = []
    for micro in (None, 3):
        model = TransformersModel(model_id=str(folder), mixed_precision="no")
        model.set_loss(Reporting)
        model.forward_backward(inputs=rows, micro_batch_size=micro)
        model.clip_grad_and_step()
        numbers = model.calculate_metric(is_training=True)
        assert numbers["nll"] == pytest.approx(numbers["loss"], rel=1e-6)
        seen.append(numbers["nll"])
    assert seen[0] == pytest.approx(seen[1], rel=1e-6)
