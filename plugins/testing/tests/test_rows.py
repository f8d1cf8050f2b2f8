"""Rewards, advantages, metrics, rows, weights and tool calls: each check catches what is broken in that way."""

import itertools
import json
import random
import re
from typing import Any

import pytest
import torch
from broken import Broken, after, broken, changed

from twinkle.advantage import Advantage
from twinkle.filter import Filter
from twinkle.loss_scale import LossScale
from twinkle.metric import Metric
from twinkle.preprocessor import Preprocessor
from twinkle.reward import Reward
from twinkle.tool_parser import HermesQwenParser


class Length(Reward):
    """How many letters the answer has."""

    def __call__(self, trajectories: Any, **kwargs: Any) -> list[float]:
        return [float(len(row["messages"][-1]["content"])) for row in trajectories]


class Centred(Advantage):
    """Rewards without their group's mean, by its standard deviation."""

    def __call__(self, rewards: Any, num_generations: int = 1, scale: str = "group", **kwargs: Any) -> torch.Tensor:
        values = torch.as_tensor(rewards, dtype=torch.float32)
        if len(values) % num_generations or scale not in ("group", "batch", "none"):
            raise ValueError("does not divide, or no such scale")
        groups = values.reshape(-1, num_generations)
        centred = groups - groups.mean(-1, keepdim=True)
        if scale == "group":
            centred = centred / (groups.std(-1, keepdim=True, correction=0) + 1e-4)
        if scale == "batch":
            centred = centred / (groups.std(correction=0) + 1e-4)
        return centred.reshape(-1)


class MeanLogp(Metric):
    """Mean log-probability of the trained tokens."""

    def __init__(self, device_mesh: Any = None, process_group: Any = None) -> None:
        super().__init__(device_mesh, process_group)
        self.reset()

    def accumulate(self, inputs: Any, outputs: Any, **kwargs: Any) -> None:
        mask = inputs["labels"] != -100
        self.total += float(outputs["logps"].detach()[mask].sum())
        self.count += int(mask.sum())

    def calculate(self) -> dict[str, float]:
        parts = self.gather_results([{"total": self.total, "count": self.count}])
        self.reset()
        count = sum(part["count"] for part in parts)
        return {"logp": sum(part["total"] for part in parts) / count} if count else {}

    def reset(self) -> None:
        self.total, self.count = 0.0, 0


class Questions(Preprocessor):
    """Questions and answers to conversations."""

    def __call__(self, rows: Any) -> dict[str, list[Any]]:
        made = [self.row(row) for row in self.map_col_to_row(rows)]
        return {"messages": [m for m, _ in made], "user_data": [d for _, d in made]}

    def row(self, row: Any) -> Any:
        messages = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        return messages, [("truth", json.dumps(row["answer"]))]


class Unseen(Filter):
    """Keeps the first of equal rows."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, row: Any) -> bool:
        text = json.dumps(row, sort_keys=True, default=str)
        new = text not in self.seen
        self.seen.add(text)
        return new

    def reset(self) -> None:
        self.seen = set()


class Assistant(LossScale):
    """Half the weight for the assistant."""

    def __call__(self, messages: Any) -> list[Any]:
        return [0.5 if message["role"] == "assistant" else 0.0 for message in messages]


ROWS = {"rows": {"question": ["1+1?", "2+2?"], "answer": ["2", "4"]}}
CALLS = {"calls": {'<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>': [("look", {"at": 1})]}}
GOOD: dict[str, Broken] = {
    "reward": broken(Length, scores=[19, 17, 38, 0]),
    "advantage": broken(Centred),
    "metric": broken(MeanLogp),
    "preprocessor": broken(Questions, **ROWS),
    "filter": broken(Unseen, kept=[True] * 5 + [False]),
    "loss_scale": broken(Assistant),
    "tool_parser": broken(HermesQwenParser, **CALLS),
}
counter = itertools.count()
seen_everywhere: list[Any] = []


def first_group_only(rewards: Any) -> Any:
    """Centre by the mean of everything."""
    return rewards - rewards.mean()


def emptied(rows: Any) -> Any:
    """Take the messages out of each row."""
    for row in rows:
        row["messages"].clear()


def judged(self: Any, row: Any) -> bool:
    """Judge by what every filter has seen."""
    new = row not in seen_everywhere
    seen_everywhere.append(row)
    return new


def pop(self: Any, row: Any) -> bool:
    """Take a key out of the row."""
    return bool(row.pop("messages"))


def emptying_reward(self: Any, trajectories: Any, **kwargs: Any) -> list[float]:
    """Empty what it was given."""
    scores = [1.0 for _ in trajectories]
    emptied(trajectories)
    return scores


def clears(self: Any, rows: Any) -> Any:
    """Clear the columns it was given."""
    found = Questions.__call__(self, rows)
    rows["question"].clear()
    return found


def mutating_messages(self: Any, messages: Any) -> Any:
    """Write into the messages."""
    messages[0]["role"] = "nobody"
    return [0.0 for _ in messages]


def adv(change: Any) -> Broken:
    return broken(after(Centred, change))


def keeps_graph(self: Any, inputs: Any, outputs: Any, **kwargs: Any) -> None:
    """Keep a tensor of the forward."""
    MeanLogp.accumulate(self, inputs, outputs)
    self.kept = outputs["logps"]


def writes(self: Any, inputs: Any, outputs: Any, **kwargs: Any) -> None:
    """Write into the outputs."""
    outputs["logps"] += 1


def means_of_means(self: Any, inputs: Any, outputs: Any, **kwargs: Any) -> None:
    """Average calls, whatever their size."""
    mask = inputs["labels"] != -100
    self.total += float(outputs["logps"][mask].mean())
    self.count += 1


def divides(self: Any) -> dict[str, float]:
    """Divide by a count that may be 0."""
    return {"logp": float(torch.tensor(self.total) / self.count)}


def local(self: Any) -> dict[str, float]:
    """Leave the other ranks out."""
    found = {"logp": self.total / max(self.count, 1)}
    self.reset()
    return found


def without_reset(self: Any) -> dict[str, float]:
    """Keep what was accumulated."""
    parts = self.gather_results([{"total": self.total, "count": self.count}])
    return {"logp": sum(p["total"] for p in parts) / max(1, sum(p["count"] for p in parts))}


def shifted_rewards(self: Any, rewards: Any, *args: Any, **kwargs: Any) -> Any:
    """Change the rewards in place."""
    found = Centred.__call__(self, rewards.clone() if hasattr(rewards, "clone") else rewards, *args, **kwargs)
    if hasattr(rewards, "zero_"):
        rewards.zero_()
    return found


def takes_lists_only(self: Any, rewards: Any, *args: Any, **kwargs: Any) -> Any:
    """Scale tensors otherwise than lists."""
    found = Centred.__call__(self, rewards, *args, **kwargs)
    return found * 2 if isinstance(rewards, torch.Tensor) else found


def lenient(self: Any, rewards: Any, num_generations: int = 1, scale: str = "group", **kwargs: Any) -> Any:
    """Accept what does not divide."""
    size = num_generations if len(rewards) % num_generations == 0 else 1
    return Centred.__call__(self, rewards, size, scale if scale in ("group", "batch", "none") else "none")


def by_row(self: Any, rewards: Any, *args: Any, **kwargs: Any) -> Any:
    """Depend on the number of the row."""
    found = Centred.__call__(self, rewards, *args, **kwargs)
    return found + torch.arange(len(found))


def bare_division(self: Any, rewards: Any, num_generations: int = 1, scale: str = "group", **kwargs: Any) -> Any:
    """Divide by a deviation that may be 0."""
    groups = torch.as_tensor(rewards, dtype=torch.float32).reshape(-1, num_generations)
    return ((groups - groups.mean(-1, keepdim=True)) / groups.std(-1, keepdim=True, correction=0)).reshape(-1)


MESSAGES = Questions.row
parser = HermesQwenParser
unpicklable = {"__init__": lambda self, *args: setattr(self, "held", lambda: 1)}
BROKEN: dict[tuple[str, str], Broken] = {
    ("reward", "scores"): broken(after(Length, lambda found: found[:-1])),
    ("reward", "order"): broken(after(Length, lambda found: [float(at) for at in range(len(found))])),
    ("reward", "one_by_one"): broken(after(Length, lambda found: [score - sum(found) / len(found) for score in found])),
    ("reward", "no_trajectories"): broken(after(Length, lambda found: found or [0.0])),
    ("reward", "any_text"): broken(after(Length, lambda found: [1 / score for score in found])),
    ("reward", "other_arguments"): broken(
        changed(Length, __call__=lambda self, trajectories: [0.0] * len(trajectories))
    ),
    ("reward", "deterministic"): broken(after(Length, lambda found: [random.random() for _ in found])),
    ("reward", "trajectories_left_alone"): broken(changed(Length, __call__=emptying_reward)),
    ("reward", "pickle"): broken(changed(Length, **unpicklable)),
    ("advantage", "shape"): adv(lambda found: found.double()),
    ("advantage", "any_sequence"): broken(changed(Centred, __call__=takes_lists_only)),
    ("advantage", "groups_apart"): adv(lambda found: found / found.abs().max().clamp(min=1e-3)),
    ("advantage", "order"): broken(changed(Centred, __call__=by_row)),
    ("advantage", "better_is_higher"): adv(lambda found: -found),
    ("advantage", "equal_rewards"): broken(changed(Centred, __call__=bare_division)),
    ("advantage", "odd_sizes_refused"): broken(changed(Centred, __call__=lenient)),
    ("advantage", "deterministic"): adv(lambda found: found + torch.rand(len(found))),
    ("advantage", "rewards_left_alone"): broken(changed(Centred, __call__=shifted_rewards)),
    ("advantage", "pickle"): broken(changed(Centred, **unpicklable)),
    ("metric", "plain_numbers"): broken(
        after(MeanLogp, lambda found: {k: f"{v}" for k, v in found.items()}, "calculate")
    ),
    ("metric", "pieces"): broken(changed(MeanLogp, accumulate=means_of_means)),
    ("metric", "ranks"): broken(changed(MeanLogp, calculate=local)),
    ("metric", "starts_afresh"): broken(changed(MeanLogp, calculate=without_reset)),
    ("metric", "nothing_seen"): broken(changed(MeanLogp, calculate=divides)),
    ("metric", "no_labels"): broken(changed(MeanLogp, calculate=divides)),
    ("metric", "batch_left_alone"): broken(changed(MeanLogp, accumulate=writes)),
    ("metric", "keeps_no_tensors"): broken(changed(MeanLogp, accumulate=keeps_graph)),
    ("preprocessor", "columns"): broken(after(Questions, lambda found: {**found, "more": [1]}), **ROWS),
    ("preprocessor", "messages"): broken(
        changed(Questions, row=lambda self, row: ([{"role": "human", "content": "a"}], [])), **ROWS
    ),
    ("preprocessor", "user_data"): broken(
        changed(Questions, row=lambda self, row: (MESSAGES(self, row)[0], [("truth", 3)])), **ROWS
    ),
    ("preprocessor", "batches"): broken(
        after(Questions, lambda found: {**found, "count": [len(found["messages"])] * len(found["messages"])}), **ROWS
    ),
    ("preprocessor", "rows_left_alone"): broken(changed(Questions, __call__=clears), **ROWS),
    ("preprocessor", "deterministic"): broken(
        after(Questions, lambda found: {**found, "id": [next(counter) for _ in found["messages"]]}), **ROWS
    ),
    ("preprocessor", "tables"): broken(after(Questions, lambda found: {**found, "mixed": [1, "a"]}), **ROWS),
    ("preprocessor", "pickle"): broken(changed(Questions, **unpicklable), **ROWS),
    ("filter", "decision"): broken(after(Unseen, int)),
    ("filter", "second_pass"): broken(changed(Unseen, reset=lambda self: None)),
    ("filter", "apart"): broken(changed(Unseen, __call__=judged)),
    ("filter", "rows_left_alone"): broken(changed(Unseen, __call__=pop)),
    ("filter", "pickle"): broken(changed(Unseen, **unpicklable)),
    ("loss_scale", "weights"): broken(after(Assistant, lambda found: [weight - 1 for weight in found])),
    ("loss_scale", "pieces"): broken(after(Assistant, lambda found: [[("not there", 1.0)] for _ in found])),
    ("loss_scale", "every_conversation"): broken(after(Assistant, lambda found: [0.5, *found][:5])),
    ("loss_scale", "messages_left_alone"): broken(changed(Assistant, __call__=mutating_messages)),
    ("loss_scale", "deterministic"): broken(after(Assistant, lambda found: [next(counter)] * len(found))),
    ("loss_scale", "pickle"): broken(changed(Assistant, **unpicklable)),
    ("tool_parser", "markers"): broken(changed(parser, open_marker=""), **CALLS),
    ("tool_parser", "calls_found"): broken(after(parser, lambda found: found[1:], "parse"), **CALLS),
    ("tool_parser", "form"): broken(
        after(parser, lambda found: [{**call, "id": "same"} for call in found], "parse"), **CALLS
    ),
    ("tool_parser", "cleaned"): broken(changed(parser, clean=lambda self, text: text), **CALLS),
    ("tool_parser", "no_call"): broken(changed(parser, detect=lambda self, text: "{" in text), **CALLS),
    ("tool_parser", "broken"): broken(
        changed(parser, parse=lambda self, text: [json.loads(re.sub("<.*?>", "", text))]), **CALLS
    ),
    ("tool_parser", "same_again"): broken(
        after(parser, lambda found: [{**call, "id": str(next(counter))} for call in found], "parse"), **CALLS
    ),
    ("tool_parser", "pickle"): broken(changed(parser, **unpicklable), **CALLS),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", GOOD)
def test_a_good_one_passes(kind: str, passes: Any) -> None:
    passes(kind, GOOD[kind].component, **GOOD[kind].example)


@pytest.mark.parametrize(("kind", "check"), BROKEN)
def test_a_broken_one_is_caught(kind: str, check: str, catches: Any) -> None:
    component, example = BROKEN[kind, check]
    catches(kind, check, component, **example)


@pytest.mark.parametrize("kind", GOOD)
def test_every_check_has_a_component_that_breaks_it(kind: str, own_checks: Any) -> None:
    assert {check for of, check in BROKEN if of == kind} == own_checks(kind)
