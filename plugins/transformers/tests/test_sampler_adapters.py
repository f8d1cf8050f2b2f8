"""TorchSampler with adapters, and with a module that somebody else is training."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from twinkle.errors import ArgumentError, CheckpointError, Unsupported
from twinkle.sampler import TorchSampler
from twinkle.testing import tiny_model
from twinkle_transformers.loading import load_model
from twinkle_transformers.sampling.runner import Runner

ROWS = [{"input_ids": [1, 2, 3]}, {"input_ids": [7, 8, 9, 10, 11]}]
PARAMS = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("base"), initializer_range=0.3)


def with_adapters(folder, *names):
    """Wrap the model with random adapters that change what it says."""
    model, _ = load_model(folder)
    config = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.5, task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for number, name in enumerate(names):
            model = get_peft_model(model, config, adapter_name=name) if number == 0 else model
            if number:
                model.add_adapter(name, config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    model.set_adapter(names[0])
    return model


@pytest.fixture
def live(folder):
    return with_adapters(folder, "first", "second").train()


@pytest.fixture(scope="module")
def saved(folder, tmp_path_factory):
    """Folders of two adapters, and what each makes the model say."""
    target = tmp_path_factory.mktemp("adapters")
    model = with_adapters(folder, "first", "second")
    model.save_pretrained(target)
    sampler = TorchSampler(model=model)
    says = {name: tokens_of(sampler, adapter_name=name) for name in ("first", "second")}
    return target, says | {"": tokens_of(sampler, use_base_model=True)}


def tokens_of(sampler, **kwargs):
    return [response.sequences[0].tokens for response in sampler.sample(ROWS, PARAMS, **kwargs)]


def state_of(model):
    return (
        [(name, part.training) for name, part in model.named_modules()],
        [(name, parameter.requires_grad) for name, parameter in model.named_parameters()],
        model.active_adapter,
        model.active_adapters,
        [part.disable_adapters for part in model.modules() if hasattr(part, "disable_adapters")],
    )


@pytest.mark.full
def test_adapters_of_a_live_model_answer_by_name(live, folder):
    sampler = TorchSampler(model=live)
    base = tokens_of(TorchSampler(folder))
    first, second = tokens_of(sampler, adapter_name="first"), tokens_of(sampler, adapter_name="second")
    assert first != second != base
    assert tokens_of(sampler) == first
    live.set_adapter("second")
    assert tokens_of(sampler) == second
    assert tokens_of(sampler, use_base_model=True) == base


@pytest.mark.sample(2)
@pytest.mark.parametrize("call", [{}, {"adapter_name": "second"}, {"use_base_model": True}])
def test_a_live_model_is_left_exactly_as_it_was(live, call):
    live.base_model.model.model.layers[1].eval()
    next(live.parameters()).requires_grad_(True)
    before = state_of(live)
    TorchSampler(model=live).sample(ROWS, PARAMS, **call)
    assert state_of(live) == before
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("call", [{"adapter_name": "second"}, {"use_base_model": True}])
def test_a_live_model_is_left_as_it_was_also_after_an_error(live, call):
    before = state_of(live)
    with pytest.raises(Exception, match="vocabulary"):
        TorchSampler(model=live).sample([{"input_ids": [9999]}], PARAMS, **call)
    assert state_of(live) == before


def test_gradients_of_a_live_model_survive_sampling(live):
    live(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    before = {name: p.grad.clone() for name, p in live.named_parameters() if p.grad is not None}
    assert before
    TorchSampler(model=live).sample(ROWS, PARAMS, adapter_name="second")
    after = {name: p.grad for name, p in live.named_parameters() if p.grad is not None}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.full
def test_training_is_seen_at_once(live):
    sampler = TorchSampler(model=live)
    before = tokens_of(sampler)
    with torch.no_grad():
        for name, parameter in live.named_parameters():
            if "lora_B.first" in name:
                parameter.mul_(-1)
    sampler.reset_prefix_cache()
    assert tokens_of(sampler) != before


@pytest.mark.full
def test_a_transformers_model_is_shared_also_after_it_got_an_adapter(folder):
    from twinkle.model import TransformersModel

    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    sampler = TorchSampler(model=model)
    base = tokens_of(sampler)
    assert base == tokens_of(TorchSampler(folder))
    model.add_adapter_to_model("mine", LoraConfig(r=2, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    assert sampler.model is model.model
    assert tokens_of(sampler) != base
    assert tokens_of(sampler, use_base_model=True) == base
    response = sampler.sample({"messages": [{"role": "user", "content": "hi"}]}, PARAMS)[0]
    assert response.sequences[0].decoded is not None


def test_what_it_samples_is_what_the_trainer_scores(folder):
    from twinkle.model import TransformersModel

    model = TransformersModel(model_id=str(folder), mixed_precision="bf16")
    sampler = TorchSampler(model=model)
    params = {"max_tokens": 12, "seed": 5, "logprobs": 1, "temperature": 0.7}
    responses = sampler.sample(ROWS, params)
    features = [response.sequences[0].new_input_feature for response in responses]
    scored = model.forward_only(inputs=features, temperature=0.7)["logps"]
    for row, (feature, response) in enumerate(zip(features, responses, strict=True)):
        trained = [at for at, label in enumerate(feature["labels"]) if label != -100]
        sampled = [pairs[0][1] for pairs in response.sequences[0].logprobs]
        # The cache and the padding change the order of bfloat16 sums, nothing else.
        assert scored[row, trained].tolist() == pytest.approx(sampled, abs=0.15)


@pytest.mark.full
@pytest.mark.parametrize("way", ["in steps", "whole"])
def test_a_live_model_samples_with_a_folder_and_keeps_no_adapter_of_it(live, saved, way, monkeypatch):
    if way == "whole":
        monkeypatch.setattr(Runner, "_refusal", lambda self: "the test says so")
    target, says = saved
    sampler = TorchSampler(model=live)
    before = state_of(live)
    assert tokens_of(sampler, adapter_path=target / "second") == says["second"]
    assert tokens_of(sampler, use_base_model=True) == says[""]
    with pytest.raises(CheckpointError, match="no adapter at"):
        tokens_of(sampler, adapter_path=target / "none")
    with pytest.raises(Unsupported, match="shares the module"):
        sampler.add_adapter_to_sampler("a", target / "first")
    assert str(state_of(live)) == str(before)


@pytest.mark.full
def test_weights_that_were_read_once_are_sampled_with_as_long_as_somebody_holds_them(live, folder, saved):
    target, says = saved
    for sampler in (TorchSampler(model=live), TorchSampler(folder)):
        held = {name: sampler.read_adapter(target / name) for name in ("first", "second")}
        for name in ("second", "first", "second"):
            assert tokens_of(sampler, adapter_version=held[name]) == says[name]
        with pytest.raises(ArgumentError, match="give one of"):
            tokens_of(sampler, adapter_version=held["first"], adapter_path=target / "first")
        with pytest.raises(ArgumentError, match="excludes"):
            tokens_of(sampler, adapter_version=held["first"], use_base_model=True)


def test_weights_of_another_model_are_refused(folder, saved, tmp_path):
    target, _ = saved
    other = tiny_model(tmp_path / "other", num_hidden_layers=1)
    held = TorchSampler(folder).read_adapter(target / "first")
    with pytest.raises(ArgumentError, match=r"layers\.1.*does not have"):
        tokens_of(TorchSampler(other), adapter_version=held)


def test_an_unknown_adapter_names_the_nearest(live, folder):
    with pytest.raises(ArgumentError, match=r"'secnd' is unknown; nearest: second"):
        TorchSampler(model=live).sample(ROWS, PARAMS, adapter_name="secnd")
    with pytest.raises(ArgumentError, match=r"'a' is unknown; there are none"):
        TorchSampler(folder).sample(ROWS, PARAMS, adapter_name="a")


def test_use_base_model_excludes_an_adapter(live):
    with pytest.raises(ArgumentError, match="excludes"):
        TorchSampler(model=live).sample(ROWS, PARAMS, adapter_name="first", use_base_model=True)


def test_adapters_from_folders_answer_by_path_and_by_name(folder, saved):
    target, says = saved
    sampler = TorchSampler(folder)
    assert tokens_of(sampler) == says[""]
    assert tokens_of(sampler, adapter_path=target / "first") == says["first"]
    assert tokens_of(sampler, adapter_path=str(target / "second")) == says["second"]
    assert tokens_of(sampler) == says[""]
    sampler.add_adapter_to_sampler("mine", target / "first")
    assert tokens_of(sampler, adapter_name="mine") == says["first"]
    sampler.add_adapter_to_sampler("mine", target / "second")
    assert tokens_of(sampler, adapter_name="mine") == says["second"]
    with pytest.raises(ArgumentError, match="not several"):
        tokens_of(sampler, adapter_name="mine", adapter_path=target / "first")


def test_the_constructors_adapter_is_the_default(folder, saved):
    target, says = saved
    sampler = TorchSampler(folder, adapter_path=target / "second")
    assert tokens_of(sampler) == says["second"]
    assert tokens_of(sampler, adapter_path=target / "first") == says["first"]
    assert tokens_of(sampler, use_base_model=True) == says[""]


@pytest.mark.full
def test_a_folder_that_was_written_again_is_read_again_and_old_ones_go(folder, saved, tmp_path):
    import os
    import shutil

    target, says = saved
    sampler = TorchSampler(folder)
    mine = tmp_path / "mine"
    shutil.copytree(target / "first", mine)
    assert tokens_of(sampler, adapter_path=mine) == says["first"]
    shutil.copytree(target / "second", mine, dirs_exist_ok=True)
    for stamp in range(1, 8):
        os.utime(mine / "adapter_model.safetensors", ns=(stamp, stamp))
        assert tokens_of(sampler, adapter_path=mine) == says["second"]
    assert len(sampler._source._by_path) == 4


def test_an_adapter_of_another_model_is_refused_by_its_first_mismatch(saved, tmp_path):
    target, _ = saved
    other = TorchSampler(tiny_model(tmp_path / "wide", intermediate_size=160))
    before = tokens_of(other)
    with pytest.raises(CheckpointError, match=r"belongs to another model: .*mlp\.\w+\.lora_\w\.weight is of shape"):
        tokens_of(other, adapter_path=target / "first")
    assert tokens_of(other) == before
    with pytest.raises(CheckpointError):
        other.add_adapter_to_sampler("mine", target / "first")
    assert tokens_of(other) == before


def test_a_folder_without_an_adapter_is_refused(folder, tmp_path):
    sampler = TorchSampler(folder)
    with pytest.raises(CheckpointError, match="no such folder"):
        tokens_of(sampler, adapter_path=tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is missing"):
        tokens_of(sampler, adapter_path=tmp_path)
