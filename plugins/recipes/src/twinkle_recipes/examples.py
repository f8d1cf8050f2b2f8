"""Runs of two steps for the contract kit: a tiny random model on a few builtin rows."""

import json
from pathlib import Path
from typing import Any


def sft() -> dict[str, Any]:
    """Return the values of a configuration, with its files in the kit's folder."""
    return {"values": _values}


def _values(folder: Path) -> dict[str, Any]:
    return {
        "model": {"id": str(_model(folder)), "mixed_precision": "no"},
        "data": {"id": "builtin://arithmetic", "slice": 8, "max_length": 128},
        "batch_size": 4,
        "max_steps": 2,
    }


def grpo() -> dict[str, Any]:
    """Return the values of a configuration of `grpo`, with its files in the kit's folder."""
    return {"values": _policy_values}


def rloo() -> dict[str, Any]:
    """Return the values of a configuration of `rloo`, with its files in the kit's folder."""
    return {"values": _policy_values}


def _policy_values(folder: Path) -> dict[str, Any]:
    rows = folder / "prompts.jsonl"
    prompts = [{"messages": [{"role": "user", "content": f"{n} + 1 ="}], "user_data": [["ground_truth", str(n + 1)]]}
               for n in range(4)]  # fmt: skip
    rows.write_text("".join(json.dumps(row) + "\n" for row in prompts), encoding="utf-8")
    return {
        "model": {"id": str(_model(folder)), "mixed_precision": "no"},
        "data": {"id": str(rows), "max_length": 64, "eval_fraction": 0},
        "sampling": {"num_generations": 2, "max_tokens": 4},
        "batch_size": 2,
        "max_steps": 2,
    }


def dpo() -> dict[str, Any]:
    """Return the values of a configuration of `dpo`, with its files in the kit's folder."""
    return {"values": _few_values}


def gkd() -> dict[str, Any]:
    """Return the values of a configuration of `gkd`, with its files in the kit's folder."""
    return {"values": _distillation_values}


def embedding() -> dict[str, Any]:
    """Return the values of a configuration of `embedding`, with its files in the kit's folder."""
    return {"values": _few_values}


def _few_values(folder: Path) -> dict[str, Any]:
    return {
        "model": {"id": str(_model(folder)), "mixed_precision": "no"},
        "data": {"args": {"size": 8, "difficulty": 1, "language": "en"}, "max_length": 128},
        "batch_size": 2,
        "max_steps": 2,
    }


def _distillation_values(folder: Path) -> dict[str, Any]:
    values = _few_values(folder)
    return values | {
        "teacher": {"id": values["model"]["id"], "mixed_precision": "no"},
        "lora": {"rank": 2},
        "on_policy": 1.0,
        "sampling": {"max_tokens": 4},
    }


def _model(folder: Path) -> Path:
    from twinkle.hub.quiet import quiet_transformers
    from twinkle.testing import tiny_model

    with quiet_transformers():
        return tiny_model(folder / "model")
