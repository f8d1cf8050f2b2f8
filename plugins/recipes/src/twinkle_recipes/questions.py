"""Questions asked before and after training: the answers, and the file they are kept in."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinkle._registry import registry
from twinkle.data_format import SamplingParams
from twinkle.paths import write_text
from twinkle_recipes.config import SFTConfig


def ask(model: Any, config: SFTConfig) -> list[str]:
    """Return the model's answers to `config.questions`, in order; nothing is asked where there are none."""
    if not config.questions:
        return []
    sampler = registry().build(config.sampler.name, "sampler", model=model)
    params = SamplingParams(
        max_tokens=config.sampler.max_tokens, temperature=config.sampler.temperature, seed=config.seed
    )
    conversations = [{"messages": [{"role": "user", "content": question}]} for question in config.questions]
    responses = sampler.sample(conversations, params)
    return [(response.sequences[0].decoded or "").strip() for response in responses]


def write_answers(path: Path, questions: Sequence[str], before: Sequence[str], after: Sequence[str] = ()) -> None:
    """Write `[{"question", "before", "after"}, ...]`; `after` is null until the run is over."""
    later: list[str | None] = [*after] if after else [None] * len(questions)
    rows = [
        {"question": question, "before": old, "after": new}
        for question, old, new in zip(questions, before, later, strict=True)
    ]
    write_text(path, json.dumps(rows, indent=2, ensure_ascii=False) + "\n")


def answers_before(path: Path, questions: Sequence[str]) -> list[str] | None:
    """Return the answers that an earlier part of this run kept for the same questions, or None."""
    if not path.is_file():
        return None
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        kept = {row["question"]: row["before"] for row in rows}
    except (ValueError, KeyError, TypeError):
        return None
    return [kept[question] for question in questions] if all(question in kept for question in questions) else None
