"""The script of arguments, examples/from_args.py, trains what the same choices written by hand train."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import twinkle
from twinkle.cli import CLI
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.testing import tiny_model

SCRIPT = Path(__file__).parents[2] / "examples" / "from_args.py"
CONFIG = """
dataset: {dataset_id: "builtin://self-cognition", data_slice: 12}
template: {max_length: 256, truncation_strategy: right}
training: {batch_size: 4, micro_batch_size: 2, max_steps: 2, gradient_accumulation_steps: 2, seed: 5}
lora: {use_lora: true, lora_r: 4, lora_alpha: 16, lora_dropout: 0, lora_target_modules: [q_proj, v_proj]}
optimizer: {lr: 1e-2, weight_decay: 0.1, adam_beta2: 0.95, max_grad_norm: 0.5}
mixed_precision: "no"
extra:
  preprocessor: SelfCognitionProcessor
  preprocessor_args: {model_name: Glow, model_author: me}
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return str(tiny_model(tmp_path / "tiny"))


def by_hand(model_id: str) -> Any:
    twinkle.initialize(seed=5)
    dataset = Dataset(DatasetMeta("builtin://self-cognition", data_slice=range(12)))
    dataset.map("SelfCognitionProcessor", model_name="Glow", model_author="me")
    dataset.set_template("Template", model_id=model_id, max_length=256, truncation_strategy="right")
    dataset.encode()
    loader = DataLoader(dataset, batch_size=4, shuffle=True, seed=5)
    model = TransformersModel(model_id=model_id, mixed_precision="no")
    lora = {"r": 4, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}
    model.add_adapter_to_model("default", lora, gradient_accumulation_steps=2)
    model.set_loss("CrossEntropyLoss")
    model.set_optimizer("AdamW", lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))
    model.set_lr_scheduler("CosineAnnealingLR", T_max=2)
    for batch in [*loader, *loader][:4]:
        model.forward_backward(inputs=batch, micro_batch_size=2)
        model.clip_grad_and_step(max_grad_norm=0.5)
    return model.save("by_hand", output_dir=".")


def test_the_script_trains_what_the_same_choices_by_hand_train(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf.yaml").write_text(CONFIG, "utf-8")
    (tmp_path / ".env").write_text("TWINKLE_OUTPUT_DIR=out\n", "utf-8")
    saved = runpy.run_path(str(SCRIPT))["train"](CLI.from_args(["--config", "conf.yaml", "--model_id", tiny]))
    assert Path(saved) == Path("out/last")
    assert "step 2: {'loss':" in capsys.readouterr().out
    ours = load_file(Path(saved) / "adapter_model.safetensors")
    expected = load_file(Path(by_hand(tiny)) / "adapter_model.safetensors")
    assert set(ours) == set(expected)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    assert any(tensor.abs().max() > 0 for name, tensor in ours.items() if "lora_B" in name)
