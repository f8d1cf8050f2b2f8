"""Adapters of a pool as files: PEFT reads them, they read PEFT's, and training goes on bit for bit in another pool."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from pools import (
    LINEAR,
    distance,
    flat_of,
    folder,  # noqa: F401 - a fixture
    lora,
    make_rows,
    moments_of,
    open_pool,
)
from safetensors.torch import load_file, save_file
from threads import one_thread  # noqa: F401 - a fixture
from transformers import AutoModelForCausalLM

from twinkle.errors import ArgumentError, CheckpointError, Unsupported
from twinkle_transformers.model import TransformersModel

ROWS = make_rows(3, (9, 5, 12), seed=4)


def trained(folder: Path, config: Any, steps: int = 2, optimizer: str = "AdamW", **options: Any) -> Any:
    """Return a pool with an adapter "a" that has trained, beside another one."""
    model = open_pool(folder, **options)
    model.add_adapter_to_model("b", lora(2), seed=8)
    model.add_adapter_to_model("a", config, seed=3)
    model.set_optimizer(optimizer, lr=1e-2, adapter_name="a")
    model.set_lr_scheduler("StepLR", step_size=2, gamma=0.5, adapter_name="a")
    train(model, steps)
    return model


def train(model: Any, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        model.forward_backward(inputs=make_rows(3, (9, 5), seed=step), adapter_name="a")
        model.clip_grad_and_step(adapter_name="a")


CONFIGS: dict[str, Any] = {
    "plain": lora(4),
    "rslora": lora(4, use_rslora=True),
    "patterns": lora(4, rank_pattern={"q_proj": 2, "down_proj": 6}, alpha_pattern={"v_proj": 32}),
    "regex": lora(4, target_modules=r"model\.layers\.1\..*(k|v|up)_proj"),
    "some layers": lora(4, layers_to_transform=[1], target_modules=["q_proj", "o_proj"]),
    "excluded": lora(4, exclude_modules=["gate_proj"]),
    "all linear": lora(4, target_modules="all-linear"),
    "head": lora(4, target_modules=["lm_head", "v_proj"]),
    "families": {"r": 4, "init_lora_weights": False, "train_mlp": False, "train_unembed": True},
    "attention": {"r": 4, "init_lora_weights": False, "train_mlp": False, "train_unembed": False},
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CONFIGS)
def test_peft_reads_a_saved_adapter_and_computes_the_same_logits(folder: Path, tmp_path: Path, name: str) -> None:
    model = trained(folder, CONFIGS[name])
    model.save("a", str(tmp_path), adapter_name="a")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, tmp_path / "a").eval()
    for row in ROWS:
        with torch.no_grad():
            expected = peft(input_ids=torch.tensor([row["input_ids"]])).logits[0]
        mine = model.forward_only(inputs=[row], adapter_name="a", return_logits=True)["logits"][0]
        torch.testing.assert_close(mine, expected, rtol=0, atol=2e-5)
    saved = load_file(tmp_path / "a" / "adapter_model.safetensors")
    own = model.get_state_dict(adapter_name="a")
    assert saved.keys() == own.keys()
    assert all(torch.equal(saved[key], own[key]) for key in saved)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Setting `save_embedding_layers` to `True`")
        peft.save_pretrained(tmp_path / "back")
    other = open_pool(folder)
    other.add_adapter_to_model("a", str(tmp_path / "back"))
    assert torch.equal(flat_of(other, "a"), flat_of(model, "a"))


@pytest.mark.full
def test_a_copy_of_the_base_beside_an_adapter_must_be_this_model_s(folder: Path, tmp_path: Path) -> None:
    """PEFT writes the output projection beside an adapter on it."""
    model = trained(folder, CONFIGS["head"])
    model.save("a", str(tmp_path), adapter_name="a")
    path, key = tmp_path / "a" / "adapter_model.safetensors", "base_model.model.lm_head.base_layer.weight"
    (path.parent / "digests.json").unlink()
    tensors, weight = load_file(path), model.model.lm_head.weight.detach()
    for copy, fits in ((weight.clone(), True), (weight.bfloat16(), True), (weight + 1e-3, False), (weight[1:], False)):
        save_file({**tensors, key: copy.contiguous()}, path)
        other = open_pool(folder)
        if fits:
            other.add_adapter_to_model("a", str(tmp_path / "a"))
            assert torch.equal(flat_of(other, "a"), flat_of(model, "a"))
        else:
            with pytest.raises(CheckpointError, match=r"lm_head\.base_layer\.weight, which differs"):
                other.add_adapter_to_model("a", str(tmp_path / "a"))


def test_an_adapter_that_peft_made_is_read_whatever_it_adapts(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = LoraConfig(r=3, lora_alpha=5, target_modules=LINEAR[:3], init_lora_weights=False, task_type="CAUSAL_LM")
    peft = get_peft_model(base, config).eval()
    peft.save_pretrained(tmp_path)
    model = open_pool(folder)
    model.add_adapter_to_model("a", str(tmp_path))
    for row in ROWS:
        with torch.no_grad():
            expected = peft(input_ids=torch.tensor([row["input_ids"]])).logits[0]
        mine = model.forward_only(inputs=[row], adapter_name=["a"], return_logits=True)[0]["logits"]
        torch.testing.assert_close(mine, expected, rtol=0, atol=2e-5)


@pytest.mark.full
def test_files_are_those_of_a_model_with_one_adapter(folder: Path, tmp_path: Path) -> None:
    model = trained(folder, lora(4))
    model.save("a", str(tmp_path), adapter_name="a", save_optimizer=True)
    plain = TransformersModel(model_id=str(folder), mixed_precision="no")
    plain.add_adapter_to_model("a", str(tmp_path / "a"))
    for key, value in plain.get_state_dict(adapter_name="a").items():
        assert torch.equal(value, model.get_state_dict(adapter_name="a")[key])
    plain.save("back", str(tmp_path), adapter_name="a")
    other = open_pool(folder)
    other.add_adapter_to_model("c", str(tmp_path / "back"))
    assert torch.equal(flat_of(other, "c"), flat_of(model, "a"))


@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Muon"])
def test_training_goes_on_bit_for_bit_in_another_pool(folder: Path, tmp_path: Path, optimizer: str) -> None:
    config = lora(4, lora_dropout=0.1)
    whole = trained(folder, config, steps=5, optimizer=optimizer)
    first = trained(folder, config, steps=3, optimizer=optimizer)
    first.save("a", str(tmp_path), adapter_name="a", save_optimizer=True, consumed_train_samples=9)
    second = open_pool(folder)
    for number in range(3):  # the other pool has other adapters, and another number of them
        second.add_adapter_to_model(f"n{number}", lora(1 + number), seed=number)
    second.add_adapter_to_model("a", str(tmp_path / "a"))
    second.set_optimizer(optimizer, lr=0.7, adapter_name="a")
    second.set_lr_scheduler("StepLR", step_size=2, gamma=0.5, adapter_name="a")
    progress = second.resume_from_checkpoint(str(tmp_path / "a"), adapter_name="a")
    assert progress["cur_step"] == 3
    assert progress["consumed_train_samples"] == 9
    train(second, 2, start=3)
    assert torch.equal(flat_of(second, "a"), flat_of(whole, "a"))
    moments = moments_of(whole, "a")
    assert all(torch.equal(value, moments[key]) for key, value in moments_of(second, "a").items())
    assert second.optimizer_group["a"].learning_rates() == whole.optimizer_group["a"].learning_rates()


@pytest.mark.full
def test_a_file_of_another_adapter_changes_nothing(folder: Path, tmp_path: Path) -> None:
    model = trained(folder, lora(4))
    model.save("a", str(tmp_path), adapter_name="a", save_optimizer=True)
    other = trained(folder, lora(8))
    before, moments = flat_of(other, "a").detach().clone(), moments_of(other, "a")
    with pytest.raises(CheckpointError):
        other.resume_from_checkpoint(str(tmp_path / "a"), adapter_name="a")
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    (tmp_path / "a" / "digests.json").unlink()
    name = next(iter(tensors))
    for damage in ({**tensors, name: tensors[name][:1]}, {k: v for k, v in tensors.items() if k != name}):
        save_file({k: v.contiguous() for k, v in damage.items()}, tmp_path / "a" / "adapter_model.safetensors")
        with pytest.raises(CheckpointError, match="belongs to another model"):
            model.resume_from_checkpoint(str(tmp_path / "a"), adapter_name="a")
        with pytest.raises(CheckpointError):
            other.add_adapter_to_model("c", str(tmp_path / "a"))
        assert "c" not in other.pool.tenants
        assert "c" not in other.optimizer_group
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="cannot be read"):
        other.add_adapter_to_model("c", str(tmp_path / "a"))
    assert torch.equal(flat_of(other, "a"), before)
    assert all(torch.equal(value, moments[key]) for key, value in moments_of(other, "a").items())


@pytest.mark.full
def test_a_saved_adapter_that_a_pool_cannot_honour_is_refused(folder: Path, tmp_path: Path) -> None:
    model = trained(folder, lora(4))
    model.save("a", str(tmp_path), adapter_name="a")
    path = tmp_path / "a" / "adapter_config.json"
    config = json.loads(path.read_text())
    for change, error in (({"use_dora": True}, Unsupported), ({"bias": "all"}, Unsupported), ({"r": 0}, ArgumentError)):
        path.write_text(json.dumps(config | change))
        with pytest.raises((error, CheckpointError)):
            open_pool(folder).add_adapter_to_model("x", str(tmp_path / "a"))
    with pytest.raises((CheckpointError, ArgumentError, OSError)):
        open_pool(folder).add_adapter_to_model("x", str(tmp_path / "nowhere"))


@pytest.mark.full
def test_a_snapshot_moves_between_pools_and_goes_on_bit_for_bit(folder: Path) -> None:
    config = lora(4, lora_dropout=0.1)
    whole = trained(folder, config, steps=4)
    first = trained(folder, config, steps=2)
    first.forward_backward(inputs=make_rows(3, (9, 5), seed=2), adapter_name="a")  # with a gradient under way
    snapshot = first.pool.snapshot("a")
    train(first, 3, start=7)  # which changes nothing in the snapshot
    second = trained(folder, config, steps=1)
    second.pool.restore("a", snapshot)
    second.clip_grad_and_step(adapter_name="a")
    train(second, 1, start=3)
    assert torch.equal(flat_of(second, "a"), flat_of(whole, "a"))
    assert second.optimizer_group["a"].updates == 4


def test_resuming_forgets_pending_gradients_and_staged_forwards(folder: Path, tmp_path: Path) -> None:
    model = trained(folder, lora(4))
    model.save("a", str(tmp_path), adapter_name="a", save_optimizer=True)
    model.forward_backward(inputs=ROWS, adapter_name="a")
    model.resume_from_checkpoint(str(tmp_path / "a"), adapter_name="a")
    assert flat_of(model, "a").grad is None
    assert model.optimizer_group["a"].pending == 0
    train(model, 1, start=2)
    whole = trained(folder, lora(4), steps=3)
    assert torch.equal(flat_of(model, "a"), flat_of(whole, "a"))


def test_a_version_is_what_an_adapter_was(folder: Path, tmp_path: Path) -> None:
    model = trained(folder, lora(4))
    one = model.pool.version("a")
    assert model.pool.version("a") is one
    kept = one.flat.clone()
    model.forward_backward(inputs=ROWS, adapter_name="a")
    assert model.pool.version("a") is one  # a gradient changes no weight
    model.clip_grad_and_step(adapter_name="a")
    two = model.pool.version("a")
    assert two.key != one.key
    assert torch.equal(one.flat, kept)
    assert torch.equal(two.flat, flat_of(model, "a"))
    model.save("a", str(tmp_path), adapter_name="a", save_optimizer=True)
    train(model, 1)
    model.resume_from_checkpoint(str(tmp_path / "a"), adapter_name="a")
    three = model.pool.version("a")
    assert torch.equal(three.flat, two.flat)
    assert distance(three.flat, one.flat) > 0
    model.remove_adapter("a")
    assert torch.equal(one.flat, kept)
