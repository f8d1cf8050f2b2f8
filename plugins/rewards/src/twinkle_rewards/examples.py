"""What the contract kit calls rewards and advantages with."""

import json
from typing import Any


def _rows(*pairs: tuple[str, Any], key: str = "ground_truth") -> list[dict[str, Any]]:
    """Return trajectories of an answer each, with its truth under `key`."""
    return [
        {
            "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}],
            "user_data": [(key, json.dumps(truth))],
        }
        for said, truth in pairs
    ]


def _game(said: str, nums: list[int], target: int) -> dict[str, Any]:
    data = [("nums", json.dumps(nums)), ("target", json.dumps(target))]
    return {"messages": [{"role": "assistant", "content": said}], "user_data": data}


def _calling(arguments: list[str], said: str) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "search", "arguments": given}} for given in arguments]
    turns = [{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "assistant", "content": said}]
    return {"messages": turns, "user_data": [("ground_truth", '"red"')]}


EXACT = {
    "kwargs": {"take": "last_number"},
    "trajectories": _rows(("2 + 3 = 5", "5"), ("5, or 6", 5), ("1,234.0", "1234"), ("none", "7")),
    "scores": [1, 0, 1, 0],
}
GSM8K = {
    "trajectories": _rows(("So 7.\n#### 42 apples", "42"), ("\\boxed{$1,200}", "1200"), ("#### 4 or 5", "4"), ("7", 7)),
    "scores": [1, 1, 0, 0],
}
GSM8K_FORMAT = {"trajectories": _rows(("#### 1", ""), ("\\boxed{2", ""), ("\\boxed{2}", "")), "scores": [1, 0, 1]}
FORMAT = {
    "trajectories": _rows(("<think>a</think>\n<answer>b</answer>", ""), ("<answer>b</answer>", "")),
    "scores": [1, 0],
}
COT = {"trajectories": _rows(("<think>why</think> so", ""), ("<think></think>so", ""), ("so", "")), "scores": [1, 0, 0]}
TAGGED = {
    "trajectories": _rows(
        ("<answer>Red</answer>", "red"), ("<answer>3.0</answer>", "<answer> 3 </answer>"), ("red", "red")
    ),
    "scores": [1, 1, 0],
}
MATH = {
    "kwargs": {"time_limit": 60.0},
    "trajectories": _rows(
        ("\\boxed{0.5}", "It is \\boxed{\\frac{1}{2}}."), ("\\boxed{7}", "\\boxed{8}"), ("9", "9"), key="solution"
    ),
    "scores": [1, 0, 0],
}
OLYMPIAD = {
    "kwargs": {"time_limit": 60.0},
    "trajectories": _rows(("\\boxed{2, \\frac{6}{2}}", "3, 2"), ("\\boxed{2}", "3, 2"), ("2, 3", "3, 2")),
    "scores": [1, 0.5, 0],
}
OLYMPIAD_FORMAT = {"trajectories": _rows(("\\boxed{2}", ""), ("$x \\boxed{2}", ""), ("2", "")), "scores": [1, 0.5, 0]}
COUNTDOWN = {
    "trajectories": [
        _game("<answer>3 * 4 + 5 = 17</answer>", [5, 4, 3], 17),
        _game("<answer>17</answer>", [3, 4, 5], 17),
        _game("<answer>(1 + 2) / 3</answer>", [1, 2, 3], 1),
    ],
    "scores": [1, 0, 1],
}
F1 = {"trajectories": _rows(("A red ball.", "the red box"), ("红色", "红色的"), ("", "x")), "scores": [0.5, 0.8, 0]}
TOOLS = {
    "trajectories": [
        _calling(["a", "b"], "red"),
        _calling(["a", "a"], "Red!"),
        _calling([], "red"),
        _calling(["a"], "no"),
    ],
    "scores": [1, 0.5, 0, 0],
}
GROUP = {
    "kwargs": {"rewards": {"right": "GSM8KAccuracyReward", "form": {"type": "GSM8KFormatReward", "weight": 0.5}}},
    "trajectories": _rows(("#### 1", "1"), ("#### 2", "1"), ("1", "1")),
    "scores": [1.5, 0.5, 0],
}

REINFORCE = {"scales": ["batch", "none"]}
_TOKENS = (3, 1, 2, 4, 2, 5, 1, 3)
GAE: dict[str, Any] = {
    "scales": ["batch", "none"],
    "tokens": _TOKENS,
    "row_arguments": {"values": [[0.25 * place - 0.5 for place in range(count)] for count in _TOKENS]},
    "skip": {"better_is_higher": "a row is compared with its own values, not with its group"},
}
