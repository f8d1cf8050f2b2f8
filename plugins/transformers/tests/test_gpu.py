"""What one GPU must show: the same numbers as the CPU, and mixed precision that trains."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from twinkle.data_format import SamplingParams
from twinkle.platform import Platform
from twinkle.testing import tiny_model
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.sampler import TorchSampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here; `make gpu` runs these on one"),
]

ROWS: list[Any] = [
    {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, 7, 8, 9, -100]},
    {"input_ids": [9, 8, 7], "labels": [8, 7, -100]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def trained(folder: Path, precision: str) -> tuple[TransformersModel, dict[str, Any]]:
    torch.manual_seed(0)
    model = TransformersModel(model_id=str(folder), mixed_precision=precision)  # type: ignore[arg-type]
    model.add_adapter_to_model("default", {"r": 4, "target_modules": "all-linear"})
    model.set_optimizer("SGD", lr=1.0, weight_decay=0.0)
    for _ in range(3):
        output = model.forward_backward(inputs=ROWS, micro_batch_size=1)
        model.clip_grad_and_step()
    return model, dict(output)


def test_a_gpu_trains_to_the_cpus_numbers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu, gpu_output = trained(folder, "no")
    assert on_gpu.device.type == "cuda"
    monkeypatch.setattr(Platform, "get_local_device", staticmethod(lambda: "cpu"))
    _, cpu_output = trained(folder, "no")
    assert gpu_output["loss"] == pytest.approx(cpu_output["loss"], rel=1e-4)


def test_mixed_precision_trains_and_saves(folder: Path, tmp_path: Path) -> None:
    model, output = trained(folder, "bf16")
    assert output["loss"] == output["loss"]
    saved = model.save("here", str(tmp_path), save_optimizer=True)
    model.resume_from_checkpoint(str(saved))


def test_sampled_logprobs_are_the_trainers(folder: Path) -> None:
    model, _ = trained(folder, "no")
    sampler = TorchSampler(model=model)
    sampler.set_template("Template", model_id=str(folder))
    prompt: Any = {"messages": [{"role": "user", "content": "hi"}]}
    response = sampler.sample([prompt], SamplingParams(max_tokens=8, seed=1, logprobs=1))[0]
    sequence = response.sequences[0]
    assert sequence.new_input_feature is not None
    assert sequence.logprobs is not None
    logps = model.forward_only(inputs=[sequence.new_input_feature])["logps"][0]
    start = len(response.prompt_token_ids or []) - 1
    ours = logps[start : start + len(sequence.tokens)].tolist()
    assert ours == pytest.approx([entry[0][1] for entry in sequence.logprobs], abs=1e-4)


def test_several_targets_and_a_prompts_scores_are_the_cpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Any] = [
        {"input_ids": [5, 6, 7], "labels": [[6, 9], [7, -100], [8, 3]], "loss_scale": [[0.5, 0.5], [1, 0], [-1, 2]]},
        {"input_ids": [9, 8], "labels": [8, 7], "loss_scale": [1.0, 0.5]},
    ]  # fmt: skip
    params = {
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 1,
        "prompt_targets": [[6, -1], [7, 3]],
        "prompt_draws": 2,
    }
    found = []
    for device in ("cuda", "cpu"):
        monkeypatch.setattr(Platform, "get_local_device", staticmethod(lambda device=device: device))
        torch.manual_seed(0)
        model = TransformersModel(model_id=str(folder), mixed_precision="no")
        model.add_adapter_to_model("default", {"r": 4, "target_modules": "all-linear"})
        model.set_loss("cross_entropy")
        model.set_optimizer("SGD", lr=1.0, weight_decay=0.0)
        output = model.forward_backward(inputs=rows)
        model.clip_grad_and_step()
        scores = TorchSampler(model=model).sample([{"input_ids": [5, 6, 7, 8]}], params)[0]
        norm = model.calculate_metric(is_training=True)["grad_norm"]
        found.append([output["loss"], norm, *output["logps"].cpu().flatten().tolist()])
        found[-1] += [*(scores.prompt_logprobs or [])[1:], *(scores.prompt_target_logprobs or [])[1]]
        found[-1] += [score for drawn in scores.prompt_draws or [] for _, score in drawn]
    assert found[0] == pytest.approx(found[1], rel=1e-3, abs=1e-4)
