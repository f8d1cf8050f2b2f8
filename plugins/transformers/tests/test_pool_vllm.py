"""Adapters that a pool saved give in vLLM the numbers they have here, beside each other and beside the base model.

vLLM needs an environment of its own: `benchmarks/sampler.py` says how to make it. `TWINKLE_VLLM_PYTHON` names its
python.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pools import LINEAR, lora, make_rows, open_pool

from twinkle.testing import tiny_model

WORKER = Path(__file__).parents[3] / "benchmarks" / "_vllm_worker.py"
CONFIGS = {
    "small": lora(2),
    "middle": lora(8, use_rslora=True),
    "attention": lora(16, target_modules=LINEAR[:4]),
    "patterns": lora(4, rank_pattern={"q_proj": 2, "down_proj": 6}, alpha_pattern={"v_proj": 32}),
    "head": lora(3, target_modules=["lm_head", "v_proj"]),
    "late": lora(5, layers_to_transform=[1]),
}
LENGTHS = (40, 9, 25, 3, 64, 17, 31, 12)
NEW = 6
OWNERS = ["middle", None, "small", "attention", "patterns", None, "late", "head"]


def interpreter() -> str:
    """Return the python that has vLLM, or skip."""
    named = os.environ.get("TWINKLE_VLLM_PYTHON")
    if named:
        return named
    if importlib.util.find_spec("vllm"):
        return sys.executable
    pytest.skip("vLLM is not installed here: TWINKLE_VLLM_PYTHON may name the python of an environment that has it")


def ask_vllm(python: str, job: dict[str, Any], *questions: dict[str, Any]) -> list[dict[str, Any]]:
    """Return vLLM's answers to questions about one model."""
    lines = "".join(json.dumps(line) + "\n" for line in (job, *questions))
    done = subprocess.run([python, str(WORKER)], input=lines, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()][1:]


def trained(folder: Path, target: Path) -> tuple[Any, dict[str, str]]:
    """Return a pool whose adapters, of different ranks and targets, made two steps, and where they are saved."""
    model = open_pool(folder)
    for seed, (name, config) in enumerate(CONFIGS.items()):
        model.add_adapter_to_model(name, config, seed=seed)
        model.set_optimizer("AdamW", lr=2e-2, adapter_name=name)
    names = list(CONFIGS)
    for step in range(2):
        model.forward_backward(inputs=make_rows(len(names), (40, 20, 33), seed=step), adapter_name=names)
        model.clip_grad_and_step(adapter_name=names)
    return model, {name: str(model.save(name, str(target), adapter_name=name)) for name in names}


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_vllm_scores_and_draws_with_saved_adapters_as_we_do(tmp_path: Path, architecture: str) -> None:
    python = interpreter()
    shape = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "initializer_range": 0.1}
    folder = tiny_model(tmp_path / "base", architecture, **shape)
    model, adapters = trained(folder, tmp_path / "adapters")
    rows = make_rows(len(LENGTHS), LENGTHS, seed=9)
    prompts = [row["input_ids"] for row in rows]
    job = {"model": str(folder), "adapters": adapters, "rank": 16}
    job |= {"rows": 8, "length": 128, "eager": True}
    question = {"prompts": prompts, "adapters": OWNERS}
    scored, drawn = ask_vllm(python, job, {**question, "scores": True}, {**question, "new": NEW})

    expected = model.forward_only(inputs=rows, adapter_name=OWNERS)
    base = model.forward_only(inputs=rows, adapter_name=[None] * len(rows))
    for owner, mine, plain, theirs in zip(OWNERS, expected, base, scored["logps"], strict=True):
        assert theirs == pytest.approx(mine["logps"][:-1].tolist(), abs=1e-3)
        moved = float((mine["logps"] - plain["logps"]).abs().max())
        assert moved == 0 if owner is None else moved > 0.1  # else the numbers above would say nothing of the adapter

    longer = [{"input_ids": ids + new} for ids, new in zip(prompts, drawn["tokens"], strict=True)]
    for row, output in zip(
        longer, model.forward_only(inputs=longer, adapter_name=OWNERS, return_logits=True), strict=True
    ):
        logits, tokens = output["logits"][-NEW - 1 : -1], torch.tensor(row["input_ids"][-NEW:])
        behind = logits.max(-1).values - logits.gather(-1, tokens[:, None])[:, 0]
        assert float(behind.max()) < 1e-3
