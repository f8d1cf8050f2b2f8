"""Kernels in our models and samplers: with adapters, packing and recomputation, and what is saved."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from twinkle.kernel import builtin_mapping, kernelize, unkernelize
from twinkle.patch import applied_patches
from twinkle.testing import tiny_model
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.sampler import TorchSampler

LENGTHS = (9, 14, 5, 11)
LORA = {"r": 4, "target_modules": "all-linear", "lora_alpha": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("kernels"), "qwen3"))


def rows() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(1, 250, (length,), generator=draw).tolist() for length in LENGTHS]
    return [{"input_ids": row, "labels": [*row[1:], -100]} for row in ids]


def trained(
    folder: str, when: str, *, packed: bool = False, precision: Any = "no", **options: Any
) -> tuple[Any, list[float]]:
    """Return a model after three steps of LoRA, kernelized before the adapter, after it, or never; and its losses."""
    model = TransformersModel(model_id=folder, mixed_precision=precision, **options)
    if when == "before":
        assert kernelize(model) is model
    torch.manual_seed(0)
    model.add_adapter_to_model("default", LORA)
    if when == "after":
        kernelize(model)
    model.set_optimizer("AdamW", lr=1e-2)
    if packed:
        model.set_processor("InputProcessor", padding_free=True)
    losses = []
    for _ in range(3):
        losses.append(float(model.forward_backward(inputs=rows(), micro_batch_size=2)["loss"]))
        model.clip_grad_and_step(max_grad_norm=1.0)
    return model, losses


@pytest.mark.sample(4)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "options",
    [{}, {"packed": True}, {"gradient_checkpointing": True}, {"packed": True, "gradient_checkpointing": True}],
    ids=["padded", "packed", "recomputed", "packed and recomputed"],
)
def test_training_with_kernels_makes_the_steps_of_training_without(folder: str, when: str, options: Any) -> None:
    model, losses = trained(folder, when, **options)
    plain, expected = trained(folder, "never", **options)
    assert losses == pytest.approx(expected, rel=1e-4)
    for (name, one), (_, other) in zip(model.get_state_dict().items(), plain.get_state_dict().items(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=name)
    assert len(applied_patches()) == 1
    unkernelize(model)
    assert not any("forward" in vars(part) for part in model.model.modules())


@pytest.mark.full
def test_with_mixed_precision_the_losses_are_those_of_the_plain_layers_within_bfloat16(folder: str) -> None:
    model, losses = trained(folder, "after", precision="bf16")
    assert losses == pytest.approx(trained(folder, "never", precision="bf16")[1], rel=2e-2)
    unkernelize(model)


@pytest.mark.full
def test_what_is_saved_is_what_a_model_without_kernels_saves(folder: str, tmp_path: Path) -> None:
    def keys(path: Path) -> list[str]:
        with safe_open(path, "pt") as file:
            return sorted(file.keys())

    model, _ = trained(folder, "before")
    model.save("adapter", output_dir=str(tmp_path))
    unkernelize(model)
    plain, _ = trained(folder, "never")
    plain.save("plain", output_dir=str(tmp_path))
    names = "adapter_model.safetensors", "adapter_config.json"
    assert keys(tmp_path / "adapter" / names[0]) == keys(tmp_path / "plain" / names[0])
    assert json.loads((tmp_path / "adapter" / names[1]).read_text()) == json.loads(
        (tmp_path / "plain" / names[1]).read_text()
    )
    whole = kernelize(TransformersModel(model_id=folder, mixed_precision="no"))
    whole.save("whole", output_dir=str(tmp_path))
    assert keys(tmp_path / "whole" / "model.safetensors") == keys(Path(folder) / "model.safetensors")
    unkernelize(whole)


def test_a_layer_inside_lora_is_replaced_and_the_lora_layer_is_not(folder: str) -> None:
    model, _ = trained(folder, "never")
    calls = []

    def linear(layer: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(layer)
        return torch.nn.functional.linear(x, layer.weight, layer.bias)

    before = model.forward_only(inputs=rows()[:1])["logps"]
    kernelize(model, {torch.nn.Linear: linear})
    assert torch.allclose(model.forward_only(inputs=rows()[:1])["logps"], before, atol=1e-6)
    assert calls
    unkernelize(model)


def test_a_kernel_for_the_whole_model_is_called(folder: str) -> None:
    """The loop calls body and head itself; with a forward of the whole model replaced it calls that."""
    from transformers import Qwen3ForCausalLM

    calls = []

    class Counted(Qwen3ForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return super().forward(*args, **kwargs)

    model = TransformersModel(model_id=folder, mixed_precision="no")
    before = model.forward_only(inputs=rows()[:1])["logps"]
    kernelize(model, {Qwen3ForCausalLM: Counted})
    assert torch.allclose(model.forward_only(inputs=rows()[:1])["logps"], before, atol=1e-5)
    assert calls == [1]
    unkernelize(model)
    model.forward_only(inputs=rows()[:1])
    assert calls == [1]


def test_a_sampler_samples_the_same_tokens(folder: str) -> None:
    sampler = TorchSampler(model_id=folder)
    wanted = {"max_tokens": 6, "temperature": 0.0}

    def tokens() -> list[int]:
        return list(sampler.sample([{"input_ids": [5, 6, 7]}], wanted)[0].sequences[0].tokens)

    before = tokens()
    assert kernelize(sampler, builtin_mapping(sampler)) is sampler
    assert "forward" in vars(sampler.model.model.norm)
    assert tokens() == before
    unkernelize(sampler)
