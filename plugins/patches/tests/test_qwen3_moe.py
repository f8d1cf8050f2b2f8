"""The repository qwen3_moe_transformers4_patch: every expert runs, and the numbers stay."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import torchrun
from torch import Tensor, nn

from twinkle.errors import PatchError
from twinkle.patch import apply_context, apply_patch
from twinkle.testing import FakeHub

HERE = Path(__file__).parent
REPOSITORY = HERE.parent / "hub" / "qwen3_moe_transformers4_patch"
NAME = "acme/qwen3_moe_transformers4_patch"


def module_at(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


moe4 = module_at(HERE / "moe4.py", "patches_tests_moe4")
Moe = module_at(REPOSITORY / "__init__.py", "patches_tests_moe_patch").Qwen3MoeTransformers4Patch


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make transformers say that it is 4.57."""
    known = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.57.1" if name == "transformers" else known(name))


def calls(model: nn.Module) -> list[list[int]]:
    return [list(expert.calls) for layer in model for expert in layer.mlp.experts]


def gradients(model: nn.Module, out: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad()
    out.pow(2).sum().backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(
    ("options", "starved"),
    [({}, (1,)), ({}, (0, 3)), ({"norm_topk_prob": False}, (0, 3)), ({"top_k": 1}, (1,)), ({"top_k": 4}, ())],
)
def test_numbers_and_gradients_stay(options: dict[str, Any], starved: tuple[int, ...]) -> None:
    model, x = moe4.model(**options), moe4.tokens()
    moe4.starve(model, starved)
    expected = model(x)
    wanted = gradients(model, expected)
    with apply_context(model, Moe):
        made = model(x)
        found = gradients(model, made)
        torch.testing.assert_close(model[0].mlp(x)[1], model[0].mlp.gate(x.reshape(-1, moe4.SIZE)))
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)
    for name, gradient in wanted.items():
        zero = torch.zeros_like(dict(model.named_parameters())[name])
        torch.testing.assert_close(found[name], zero if gradient is None else gradient, rtol=1e-9, atol=1e-12)
    assert any(gradient is None for gradient in wanted.values()) == bool(starved)


@pytest.mark.usefixtures("four")
def test_every_expert_runs_whatever_the_tokens() -> None:
    model = moe4.model(layers=1)
    moe4.starve(model, (0, 3))
    model(moe4.tokens())
    assert calls(model) == [[], [12], [12], []]
    with apply_context(model, Moe):
        model(moe4.tokens())
    assert calls(model) == [[0], [12, 12], [12, 12], [0]]


@pytest.mark.full
def test_two_ranks_with_other_experts_each_go_on_under_fsdp2(tmp_path: Path) -> None:
    done = torchrun(HERE / "moe_ranks.py", REPOSITORY, tmp_path / "out.json", ranks=2, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert found["calls"][0] == found["calls"][1], "ranks ran other experts, or in another order"
    assert found["difference"] < 1e-12


def test_the_installed_transformers_5_is_refused_and_needs_none() -> None:
    assert importlib.metadata.version("transformers").startswith("5.")
    model = moe4.model()
    with pytest.raises(
        PatchError, match=r"for transformers >=4\.51,<5 \(installed: 5\..*\); transformers 5 computes all"
    ):
        apply_patch(model, Moe)
    assert "forward" not in vars(model[0].mlp)


def test_transformers_5_gives_each_expert_a_gradient_without_tokens_too(build: Any) -> None:
    from transformers import Qwen3MoeConfig

    fields = {"num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "head_dim": 16}
    fields |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = build(config=Qwen3MoeConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, **fields))
    model.config._experts_implementation = "eager"
    model(torch.tensor([[5, 6]])).logits.sum().backward()
    experts = model.model.layers[0].mlp.experts
    assert all(parameter.grad is not None for parameter in experts.parameters())
    used = (experts.down_proj.grad.abs().sum((1, 2)) > 0).sum()
    assert 0 < used <= 2


@pytest.mark.usefixtures("four")
def test_models_without_such_blocks_are_refused() -> None:
    with pytest.raises(PatchError, match="Sequential has no Qwen3MoeSparseMoeBlock"):
        apply_patch(nn.Sequential(nn.Linear(1, 1)), Moe)
    model = moe4.model(layers=1)
    del model[0].mlp.norm_topk_prob
    with pytest.raises(PatchError, match="Qwen3MoeSparseMoeBlock has no norm_topk_prob; this patch does not know"):
        apply_patch(model, Moe)


@pytest.mark.full
def test_from_a_hub_in_the_form_of_published_scripts(tmp_path: Path) -> None:
    """Refused until it is added, then `model.apply_patch("ms://...")` as it stands in scripts."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "MODELSCOPE_"))}
    with FakeHub() as hub:
        hub.add(NAME, REPOSITORY)
        environment = {**clean, **hub.environment(tmp_path), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, str(HERE / "moe_worker.py"), f"ms://{NAME}"],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert "NotTrusted" in found["before"]
    assert f"twinkle plugins add ms://{NAME}@" in found["before"]
    assert "transformers 5 computes all experts" in found["refused"]
    assert found["calls"] == [[0], [4], [4], [0]]
    assert found["by"].startswith("twinkle_registry.code.")
    assert found["by"].endswith(":Qwen3MoeTransformers4Patch")
    assert found["after"] == []
