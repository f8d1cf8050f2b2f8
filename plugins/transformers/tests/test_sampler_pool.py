"""TorchSampler on a model whose many adapters train in one pass."""

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from twinkle.errors import ArgumentError, CheckpointError
from twinkle.sampler import TorchSampler
from twinkle.testing import tiny_model
from twinkle_transformers.pool.multi import MultiLoraTransformersModel
from twinkle_transformers.sampling.runner import Runner

ROWS = [{"input_ids": list(range(n, 2 * n + 3))} for n in range(1, 7)]
NAMES = ["a", "b", None, "c", "a", None]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model(tmp_path):
    folder = tiny_model(tmp_path / "base", "qwen3", initializer_range=0.3)
    model = MultiLoraTransformersModel(model_id=str(folder), mixed_precision="no")
    everything = {"r": 4, "target_modules": "all-linear"}
    for name, config in {"a": everything, "b": {"r": 2, "train_mlp": False}, "c": everything}.items():
        model.add_adapter_to_model(name, config, seed=1)
        flat = model.pool.tenants[name].flat
        with torch.no_grad():
            flat.add_(0.05 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(ord(name))))
    return model


def tokens_of(responses):
    return [response.sequences[0].tokens for response in responses]


@pytest.fixture(params=["in steps", "whole"])
def way(request, monkeypatch):
    """Sample in steps of the engine, or call by call, as where the engine refuses the model."""
    if request.param == "whole":
        monkeypatch.setattr(Runner, "_refusal", lambda self: "the test says so")
    return request.param


@pytest.mark.full
def test_what_it_samples_with_adapters_and_base_is_what_the_pool_scores(model, way):
    sampler = TorchSampler(model=model)
    assert (sampler._service.engine is None) == (way == "whole")
    assert sampler.model is model.model
    assert "lm_head" in model.pool.tenants["b"].plan.layout.entries
    params = {"max_tokens": 8, "seed": 1, "logprobs": 1, "temperature": 0.9, "stop": []}
    responses = sampler.sample(ROWS, params, adapter_name=NAMES)
    features = [response.sequences[0].new_input_feature for response in responses]
    outputs = model.forward_only(inputs=features, adapter_name=NAMES, temperature=0.9)
    for feature, output, response in zip(features, outputs, responses, strict=True):
        trained = [at for at, label in enumerate(feature["labels"]) if label != -100]
        sampled = [pairs[0][1] for pairs in response.sequences[0].logprobs]
        assert output["logps"].flatten()[trained].tolist() == pytest.approx(sampled, abs=1e-4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("splits", [True, False], ids=["head apart", "whole logits"])
def test_an_adapter_on_the_output_projection_scores_prompts_either_way(model, way, splits, monkeypatch):
    if not splits:
        monkeypatch.setattr(Runner, "_refusal", lambda self: "the test says so")
        model._loaded.backbone = dataclasses.replace(model.backbone, splits=False)
        model.pool.rebind(model.backbone)
    sampler = TorchSampler(model=model)
    names = ["b", None, "c", "b"]
    rows = [{"input_ids": list(range(n, 3 * n + 2)), "labels": [*range(n + 1, 3 * n + 2), -100]} for n in (2, 3, 4, 5)]
    scored = model.forward_only(inputs=rows, adapter_name=names)
    found = sampler.sample(rows, {"max_tokens": 0, "prompt_logprobs": 1}, adapter_name=names)
    for row, output, response in zip(rows, scored, found, strict=True):
        wanted = output["logps"].flatten()[: len(row["input_ids"]) - 1].tolist()
        assert response.prompt_logprobs[1:] == pytest.approx(wanted, abs=1e-4)  # float32 sums in another order
    sampler.sample(rows, {"max_tokens": 3, "stop": []}, adapter_name=names)
    again = model.forward_only(inputs=rows, adapter_name=names)
    assert all(torch.equal(one["logps"], other["logps"]) for one, other in zip(scored, again, strict=True))


def test_a_head_given_its_own_forward_back_is_adapted_at_the_next_call(model, monkeypatch):
    monkeypatch.setattr(Runner, "_refusal", lambda self: "the test says so")
    sampler = TorchSampler(model=model)
    params = {"max_tokens": 4, "temperature": 0, "stop": [], "logprobs": 1}
    before = sampler.sample(ROWS[:1], params, adapter_name="b")[0].sequences[0].logprobs
    model.pool.rebind(model.backbone)
    assert sampler.sample(ROWS[:1], params, adapter_name="b")[0].sequences[0].logprobs == before


def test_what_is_being_sampled_keeps_its_weights_while_the_pool_trains(model):
    sampler = TorchSampler(model=model)
    params = {"temperature": 0, "max_tokens": 20, "stop": []}
    before = tokens_of(sampler.sample(ROWS[:1], params, adapter_name="a"))[0]
    handle = sampler.submit(ROWS[0], params, adapter_name="a")
    drawn = handle.tokens()
    first = next(drawn)
    model.set_loss("CrossEntropyLoss", adapter_name="a")
    model.set_optimizer("AdamW", lr=0.1, adapter_name="a")
    row = {"input_ids": [5, 6, 7, 8], "labels": [6, 7, 8, -100]}
    model.forward_backward(inputs=[row], adapter_name="a")
    model.clip_grad_and_step(adapter_name="a")
    assert [first, *drawn] == before
    assert tokens_of(sampler.sample(ROWS[:1], params, adapter_name="a"))[0] != before


def test_an_adapter_that_the_pool_has_not_is_refused(model):
    with pytest.raises(ArgumentError, match="'d'"):
        TorchSampler(model=model).sample(ROWS[:1], {"max_tokens": 1}, adapter_name="d")


def test_a_saved_adapter_is_read_for_sampling_without_being_added(model, tmp_path):
    sampler = TorchSampler(model=model)
    params = {"temperature": 0, "max_tokens": 6, "stop": [], "logprobs": 1}
    for name in "ab":
        version = model.pool.read_version(Path(model.save(name, str(tmp_path), adapter_name=name)))
        [live] = sampler.sample(ROWS[:1], params, adapter_name=name)
        [read] = sampler.sample(ROWS[:1], params, adapter_version=version)
        assert read.sequences[0].logprobs == live.sequences[0].logprobs
    assert model.pool.tenants.names() == ["a", "b", "c"]
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(CheckpointError):
        model.pool.read_version(tmp_path / "a")
    with pytest.raises(CheckpointError):
        model.pool.read_version(tmp_path / "nowhere")


@pytest.mark.full
def test_weights_on_experts_are_sampled_by_any_sampler_of_the_base(tmp_path, way):
    folder = tiny_model(tmp_path / "moe", "qwen3")  # whose tokenizer it is
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=264, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, intermediate_size=24, initializer_range=0.3,
        eos_token_id=258, pad_token_id=256, bos_token_id=257,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    model = MultiLoraTransformersModel(model_id=str(folder), mixed_precision="no")
    model.add_adapter_to_model(
        "e",
        {"r": 2, "target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
        seed=1,
    )
    flat = model.pool.tenants["e"].flat
    with torch.no_grad():
        flat.add_(0.2 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(5)))
    rows = [{"input_ids": [*range(n, 3 * n + 2)]} for n in (2, 5)]
    labelled = [{**row, "labels": [*row["input_ids"][1:], -100]} for row in rows]
    wanted = model.forward_only(inputs=labelled, adapter_name=["e", "e"])
    version = model.pool.version("e")
    for sampler in (TorchSampler(model=model), TorchSampler(folder)):
        found = sampler.sample(rows, {"max_tokens": 0, "prompt_logprobs": 1}, adapter_version=version)
        for row, output, response in zip(rows, wanted, found, strict=True):
            scores = output["logps"].flatten()[: len(row["input_ids"]) - 1].tolist()
            assert response.prompt_logprobs[1:] == pytest.approx(scores, abs=1e-4)  # float32 sums in another order
