"""Saving, loading and resuming: standard formats, bit for bit, and nothing changed when it cannot be."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from twinkle.errors import ArgumentError, CheckpointError, OutputError
from twinkle.testing import tiny_model
from twinkle_transformers.model import TransformersModel

ROWS: list[Any] = [
    {"input_ids": [5, 6, 7, 8, 9, index], "labels": [6, 7, 8, 9, index, -100]} for index in range(10, 26)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def build(folder: Path, lora: bool, accumulation: int = 1) -> TransformersModel:
    torch.manual_seed(3)
    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    if lora:
        config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.3, target_modules="all-linear")
        model.add_adapter_to_model("default", config, gradient_accumulation_steps=accumulation)
    model.set_optimizer("AdamW", lr=1e-2)
    model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=2, num_training_steps=10)
    return model


def train(model: TransformersModel, calls: range, accumulation: int = 1) -> list[dict[str, float]]:
    numbers = []
    for call in calls:
        model.forward_backward(inputs=ROWS[call * 2 % 16 : call * 2 % 16 + 2])
        model.clip_grad_and_step(gradient_accumulation_steps=accumulation)
        metrics = model.calculate_metric(is_training=True)
        numbers.append({key: metrics[key] for key in ("loss", "learning rate") if key in metrics})
    return numbers


@pytest.mark.sample(2)
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize(("accumulation", "stop"), [(1, 4), (3, 4)], ids=["at a step", "within an accumulation"])
def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit(
    folder: Path, tmp_path: Path, lora: bool, accumulation: int, stop: int
) -> None:
    unbroken = build(folder, lora, accumulation)
    train(unbroken, range(stop), accumulation)
    saved = unbroken.save("here", str(tmp_path), save_optimizer=True, consumed_train_samples=8)
    wanted = train(unbroken, range(stop, 10), accumulation)

    torch.manual_seed(99)
    resumed = build(folder, lora, accumulation)
    progress = resumed.resume_from_checkpoint(str(saved))
    assert progress == {"cur_step": stop, "consumed_train_samples": 8, "gradient_accumulation_steps": accumulation}
    assert train(resumed, range(stop, 10), accumulation) == wanted
    ours, theirs = resumed.get_state_dict(), unbroken.get_state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.full
def test_a_saved_adapter_loads_in_peft_with_the_same_logits(folder: Path, tmp_path: Path) -> None:
    model = build(folder, True)
    train(model, range(3))
    saved = model.save("adapter", str(tmp_path))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reloaded = peft.PeftModel.from_pretrained(plain, str(saved)).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        wanted = reloaded(input_ids=ids).logits
    ours = model.forward_only(inputs=[{"input_ids": ids[0].tolist()}], return_logits=True)["logits"]
    torch.testing.assert_close(ours, wanted)


def test_an_adapter_that_peft_saved_loads_here(folder: Path, tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    made = peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    made.save_pretrained(tmp_path / "theirs")
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        wanted = made(input_ids=ids).logits
    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    model.add_adapter_to_model("a", str(tmp_path / "theirs"))
    ours = model.forward_only(inputs=[{"input_ids": ids[0].tolist()}], return_logits=True)["logits"]
    torch.testing.assert_close(ours, wanted)


def test_a_full_model_is_saved_as_hugging_face_reads_it_with_its_tokenizer(folder: Path, tmp_path: Path) -> None:
    model = build(folder, False)
    train(model, range(2))
    saved = Path(str(model.save("full", str(tmp_path))))
    reloaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    wanted = dict(model.model.named_parameters())
    assert all(torch.equal(parameter, wanted[name]) for name, parameter in reloaded.named_parameters())
    assert (saved / "tokenizer.json").is_file()


def test_full_weights_load_into_a_full_model(folder: Path, tmp_path: Path) -> None:
    trained = build(folder, False)
    train(trained, range(2))
    trained.save("full", str(tmp_path))
    other = TransformersModel(model_id=str(folder), mixed_precision="no")
    other.load("full", str(tmp_path))
    wanted = dict(trained.model.named_parameters())
    assert all(torch.equal(parameter, wanted[name]) for name, parameter in other.model.named_parameters())


def test_adapter_weights_are_peft_named_parameters_and_in_the_state_dict(folder: Path) -> None:
    model = build(folder, True)
    parameter = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert parameter in dict(model.model.named_parameters())
    state = model.get_state_dict()
    assert state[parameter.replace(".default", "")].shape == (4, 64)
    assert all("lora_" in name for name in state)


def test_the_optimizer_state_is_safetensors_named_by_parameter(folder: Path, tmp_path: Path) -> None:
    model = build(folder, True)
    train(model, range(2))
    saved = Path(str(model.save("here", str(tmp_path), save_optimizer=True)))
    name = "exp_avg/base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert name in load_file(saved / "optimizer.safetensors")
    assert not [path.name for path in saved.iterdir() if path.suffix in (".pt", ".bin", ".pkl")]


@pytest.mark.full
def test_an_interval_saves_only_its_multiples(folder: Path, tmp_path: Path) -> None:
    model = build(folder, True)
    kept = []
    for call in range(4):
        train(model, range(call, call + 1))
        kept.append(model.save(output_dir=str(tmp_path), interval=2))
    assert kept == [None, str(tmp_path / "checkpoint-step-2"), None, str(tmp_path / "checkpoint-step-4")]


@pytest.mark.full
def test_an_adapter_of_another_model_is_refused_and_nothing_changes(folder: Path, tmp_path: Path) -> None:
    other = build(tiny_model(tmp_path / "other", hidden_size=32, head_dim=8), True)
    saved = other.save("adapter", str(tmp_path))
    model = build(folder, True)
    before = {name: tensor.clone() for name, tensor in model.get_state_dict().items()}
    with pytest.raises(
        CheckpointError,
        match=r"belongs to another model: .*lora_B.* of shape \[32, 4\] in the file and of shape \[64, 4\]",
    ):
        model.load(str(saved))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.get_state_dict().items())
    with pytest.raises(CheckpointError, match="belongs to another model"):
        model.add_adapter_to_model("second", str(saved))
    assert sorted(model.optimizer_group) == ["", "default"]
    assert model.model.active_adapters == ["default"]


@pytest.mark.full
def test_a_refused_first_adapter_leaves_a_full_model_that_trains(folder: Path, tmp_path: Path) -> None:
    other = build(tiny_model(tmp_path / "other", hidden_size=32, head_dim=8), True)
    saved = other.save("adapter", str(tmp_path))
    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    before = {name: (p.shape, p.requires_grad) for name, p in model.model.named_parameters()}
    with pytest.raises(CheckpointError, match="belongs to another model"):
        model.add_adapter_to_model("default", str(saved))
    assert {name: (p.shape, p.requires_grad) for name, p in model.model.named_parameters()} == before
    train(model, range(1))


def test_a_truncated_adapter_file_is_named(folder: Path, tmp_path: Path) -> None:
    model = build(folder, True)
    saved = Path(str(model.save("adapter", str(tmp_path))))
    file = saved / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors was changed since it was saved"):
        model.load(str(saved))
    (saved / "digests.json").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors cannot be read"):
        model.load(str(saved))


def test_a_full_checkpoint_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other", intermediate_size=96)
    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    with pytest.raises(CheckpointError, match=r"belongs to another model: model\.layers\.0\.mlp"):
        model.load(str(other))


def test_a_missing_checkpoint_says_what_is_there(folder: Path, tmp_path: Path) -> None:
    model = build(folder, True)
    with pytest.raises(CheckpointError, match=r"no adapter at .*no such folder"):
        model.load(str(tmp_path / "nothing"))
    with pytest.raises(CheckpointError, match=r"trainer_state\.json is missing"):
        model.resume_from_checkpoint(str(tmp_path))


def test_resuming_from_weights_alone_says_how_to(folder: Path, tmp_path: Path) -> None:
    model = build(folder, True)
    saved = model.save("weights", str(tmp_path))
    with pytest.raises(CheckpointError, match="resume_only_model=True"):
        model.resume_from_checkpoint(str(saved))
    assert model.resume_from_checkpoint(str(saved), resume_only_model=True)["cur_step"] == 0


def test_resuming_with_another_optimizer_names_the_right_one(folder: Path, tmp_path: Path) -> None:
    model = build(folder, True)
    train(model, range(1))
    saved = model.save("here", str(tmp_path), save_optimizer=True)
    model.set_optimizer("SGD", lr=0.1)
    with pytest.raises(CheckpointError, match=r"call set_optimizer\('AdamW'"):
        model.resume_from_checkpoint(str(saved))


def test_a_folder_that_cannot_be_written_is_an_output_error(folder: Path, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    model = build(folder, True)
    with pytest.raises(OutputError, match="choose another output folder"):
        model.save("x", str(blocker))


def test_an_existing_checkpoint_is_replaced_whole(folder: Path, tmp_path: Path) -> None:
    model = build(folder, True)
    saved = Path(str(model.save("same", str(tmp_path), save_optimizer=True)))
    (saved / "left-over").write_text("old")
    train(model, range(1))
    model.save("same", str(tmp_path), save_optimizer=True)
    assert not (saved / "left-over").exists()
    assert json.loads((saved / "trainer_state.json").read_text())["cur_step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["same"]


def test_a_save_that_fails_leaves_the_old_checkpoint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(folder, True)
    saved = Path(str(model.save("same", str(tmp_path))))
    before = (saved / "adapter_model.safetensors").read_bytes()
    train(model, range(1))

    def full_disk(*args: Any, **kwargs: Any) -> None:
        save_file(*args, **kwargs)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("twinkle_transformers.checkpoints.save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        model.save("same", str(tmp_path))
    assert (saved / "adapter_model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["same"]


def test_what_a_loop_wants_to_know_again_is_in_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    model = build(folder, True)
    plain = Path(str(model.save("plain", str(tmp_path), save_optimizer=True)))
    assert "loop" not in json.loads((plain / "trainer_state.json").read_text())
    kept = Path(str(model.save("kept", str(tmp_path), save_optimizer=True, loop_state={"step": 3, "left": [1, 2]})))
    assert json.loads((kept / "trainer_state.json").read_text())["loop"] == {"step": 3, "left": [1, 2]}
    model.resume_from_checkpoint(str(kept))
    with pytest.raises(ArgumentError, match="loop_state must contain only JSON values"):
        model.save("junk", str(tmp_path), loop_state={"tensor": torch.zeros(1)})
    assert not (tmp_path / "junk").exists()
