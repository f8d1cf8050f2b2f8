"""Conversations for checks: short, of several turns, and with typical texts of models."""

import json
from typing import Any

ODD_TEXTS = (
    "",
    " \n\t",
    "\\boxed{",
    "<think>",
    "</answer><answer>",
    "{'a': [1, 2",
    "#### ",
    "nan",
    "1e999",
    "-0",
    "٣٤ 漢字 🙂\u200d\ufeff\x00",
    "x" * 5000,
    "(" * 2000,
)
"""Typical answers of models."""


def trajectories() -> list[dict[str, Any]]:
    """Return four conversations to score; the reference answer is in `user_data`."""
    return [
        answered("What is 2 + 3?", "2 + 3 is \\boxed{5}.", "5"),
        answered("What is 4 * 5?", "It is 21.\n#### 21", "20"),
        answered("Name a colour.", "<think>any</think><answer>red</answer>", "red"),
        answered("What is 1 + 1?", "", "2"),
    ]


def answered(question: str, answer: str, truth: Any) -> dict[str, Any]:
    """Return one question with its answer, as a trajectory."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "user_data": [("ground_truth", json.dumps(truth))]}


def conversation() -> list[dict[str, Any]]:
    """Return a conversation of two rounds with a system message and reasoning."""
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "It is 5.", "reasoning_content": "Two and three are five."},
        {"role": "user", "content": "And twice that?"},
        {"role": "assistant", "content": "<think>twice five</think>That is 10."},
    ]
