"""Distillation in plain loops: a student comes nearer to its teacher, on prompts that neither loop has seen."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from twinkle.data_format import SamplingParams
from twinkle.model import TransformersModel
from twinkle.sampler import TorchSampler
from twinkle.testing import tiny_model

SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}
HELD_OUT = 50
Rows = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def counting(first: int, length: int) -> Rows:
    """Return sixteen rows of tokens that count upwards, modulo 100."""
    return [{"input_ids": [(first + 7 * row + step) % 100 + 1 for step in range(length)]} for row in range(16)]


def taught(folder: Path, seed: int, steps: int) -> Any:
    """Return a tiny model that has seen a few batches of counting."""
    tiny_model(folder, seed=seed, **SMALL)
    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    model.set_optimizer("AdamW", lr=0.01)
    for step in range(steps):
        rows = [{**row, "labels": [*row["input_ids"][1:], -100]} for row in counting(step, 12)]
        model.forward_backward(inputs=rows)
        model.clip_grad_and_step()
    model.calculate_metric(is_training=True)
    return model


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return taught(tmp_path_factory.mktemp("teacher"), seed=0, steps=25)


def answers(sampler: TorchSampler, prompts: Rows, seed: int) -> Rows:
    """Return the prompts with eight drawn tokens each, which are trained."""
    sampler.reset_prefix_cache()
    responses = sampler.sample(prompts, SamplingParams(max_tokens=8, seed=seed))
    return [dict(response.sequences[0].new_input_feature or {}) for response in responses]


def distance(student: Any, teacher: Any, rows: Rows) -> float:
    """Return the divergence of whole distributions that the student's loss measures on these rows."""
    logits = teacher.forward_only(inputs=rows, return_logits=True, micro_batch_size=8)["logits"]
    student.forward_only(inputs=rows, micro_batch_size=4)
    student.calculate_loss(teacher_logits=logits)
    return float(student.calculate_metric(is_training=False)["loss"])


def test_on_policy_the_divergence_on_held_out_prompts_falls_by_half(teacher: Any, tmp_path: Path) -> None:
    """The student has seen half as much; it learns from whole distributions on what it says itself."""
    student = taught(tmp_path / "student", seed=1, steps=12)
    student.set_loss("GKDLoss", beta=1.0)
    sampler = TorchSampler(model=student)
    before = distance(student, teacher, answers(sampler, counting(HELD_OUT, 6), seed=0))
    for step in range(12):
        rows = answers(sampler, counting(3 * step, 6), seed=step)
        logits = teacher.forward_only(inputs=rows, return_logits=True)["logits"]
        student.forward_backward(inputs=rows, teacher_logits=logits, micro_batch_size=8)
        student.clip_grad_and_step()
    numbers = student.calculate_metric(is_training=True)
    assert numbers["reverse_kl"] == pytest.approx(numbers["loss"], rel=1e-6)
    after = distance(student, teacher, answers(sampler, counting(HELD_OUT, 6), seed=0))
    assert after < before / 2


def test_off_policy_the_divergence_on_held_out_prompts_falls_by_half(teacher: Any, tmp_path: Path) -> None:
    """The student knows nothing; it learns from the teacher's 32 most probable tokens on what the teacher says."""
    student = taught(tmp_path / "student", seed=1, steps=0)
    student.set_optimizer("AdamW", lr=0.01)
    student.set_loss("GKDLoss", beta=0.0)
    sampler = TorchSampler(model=teacher)
    held_out = answers(sampler, counting(HELD_OUT, 6), seed=0)
    before = distance(student, teacher, held_out)
    for step in range(14):
        rows = answers(sampler, counting(3 * step, 6), seed=step)
        top = teacher.forward_only(inputs=rows, topk_logprobs=32)
        given = {"teacher_topk_logprobs": top["topk_logprobs"], "teacher_topk_indices": top["topk_indices"]}
        student.forward_backward(inputs=rows, micro_batch_size=8, **given)
        student.clip_grad_and_step()
    assert distance(student, teacher, held_out) < before / 2
