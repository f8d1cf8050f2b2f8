"""Trackers, notifiers, tools, worlds, rollouts and recipes: each check catches what is broken in that way."""

import copy
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from broken import Broken, after, broken, changed
from pydantic import BaseModel, ConfigDict, Field

from twinkle.env import Env, StepResult
from twinkle.notifier import Notifier
from twinkle.rollout import Rollout
from twinkle.tool import Tool
from twinkle.tracker import Tracker
from twinkle_registry import hookimpl

ARRIVED: list[str] = []
SHARED: dict[str, Any] = {"at": 0}
OPEN: list[Any] = []
counter = itertools.count()


class Lines(Tracker):
    """A line of JSON a step; a run that goes on drops the lines from there on."""

    file: Any = None

    @hookimpl
    def twinkle_step_end(self, run: Any, step: int, metrics: Any) -> None:
        path = run.folder / "lines"
        if self.file is None:
            old = [line for line in lines_of(path) if json.loads(line)["step"] < step]
            path.write_text("".join(f"{line}\n" for line in old))
            self.file = path.open("a")
        self.file.write(json.dumps({"step": step, **metrics}) + "\n")
        self.file.flush()

    @hookimpl
    def twinkle_run_end(self, run: Any) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def read(folder: Path) -> dict[int, dict[str, Any]]:
    rows = [json.loads(line) for line in lines_of(folder / "lines")]
    return {row.pop("step"): row for row in rows}


class Box(Notifier):
    """Puts messages into a list."""

    def __init__(self, url: str = "http://127.0.0.1:9/hidden") -> None:
        self.url = url

    def __repr__(self) -> str:
        return "Box(...)"

    def __call__(self, message: str) -> None:
        ARRIVED.append(message)

    def to_dict(self) -> dict[str, Any]:
        return {"url": self.url}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Box":
        return cls(**values)


class Add(Tool):
    """Adds two numbers."""

    def __call__(self, tool_name: str, arguments: Any) -> str:
        return str(arguments["a"] + arguments["b"])

    def tool_info(self) -> Any:
        numbers = {name: {"type": "integer"} for name in "ab"}
        parameters = {"type": "object", "properties": numbers, "required": ["a", "b"]}
        return {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": parameters}}


class Walk(Env):
    """Two steps to the goal."""

    def __init__(self) -> None:
        self.at = 0

    def reset(self, trajectory: Any = None) -> StepResult:
        self.at = 0
        return StepResult("start")

    def step(self, tool_name: str, arguments: Any) -> StepResult:
        self.at += 1
        return StepResult(f"at {self.at}", 1.0, self.at == 2)

    def tools(self) -> list[Any]:
        return [Add()]

    def evaluate(self, trajectories: Any, **kwargs: Any) -> list[float]:
        return [0.5 for _ in trajectories]


class Echo(Rollout):
    """Answers with the question."""

    def __call__(self, trajectories: Any, **kwargs: Any) -> list[Any]:
        return [self.played(row) for row in trajectories]

    def played(self, row: Any) -> Any:
        answer = {"role": "assistant", "content": row["messages"][-1]["content"]}
        return {**row, "messages": [*row["messages"], answer]}


class Config(BaseModel):
    """Of the recipe."""

    model_config = ConfigDict(extra="forbid")
    steps: int = Field(default=2, description="How many steps")


class Lenient(BaseModel):
    """Of a recipe that takes anything."""

    steps: int = Field(default=2, description="How many steps")


def count(config: Any, run: Any) -> dict[str, float]:
    """Log some steps."""
    for step in range(1, config.steps + 1):
        run.log({"loss": 1.0 / step}, step)
    return {"steps": config.steps}


def silent(config: Any, run: Any) -> dict[str, float]:
    """Log nothing."""
    return {}


def without_run(config: Any) -> dict[str, float]:
    """Take no run."""
    return {}


def hooked(base: type, **methods: Any) -> type:
    return changed(base, **{name: hookimpl(method) for name, method in methods.items()})


def written(self: Any, run: Any, step: int, metrics: Any) -> None:
    """Write into the numbers."""
    metrics["step"] = step


def unbuffered(self: Any, run: Any, step: int, metrics: Any) -> None:
    """Keep the steps in memory."""
    self.kept = [*getattr(self, "kept", []), {"step": step, **metrics}]


def keeps_open(self: Any, run: Any) -> None:
    """Leave the file open."""
    OPEN.append(self.file)


def strict_json(self: Any, run: Any, step: int, metrics: Any) -> None:
    """Raise at NaN."""
    json.dumps(metrics, allow_nan=False)
    Lines.twinkle_step_end(self, run, step, metrics)


def appended(self: Any, run: Any, step: int, metrics: Any) -> None:
    """Keep the first of two lines of a step."""
    rows = read(run.folder)
    rows.setdefault(step, metrics)
    (run.folder / "lines").write_text("".join(json.dumps({"step": s, **m}) + "\n" for s, m in rows.items()))


def halved(self: Any, run: Any, step: int, metrics: Any) -> None:
    """Record other numbers."""
    Lines.twinkle_step_end(self, run, step, {name: value / 2 for name, value in metrics.items()})


def impatient(self: Any, run: Any) -> None:
    """Expect a step."""
    self.file.close()


def loud(self: Any, message: str) -> None:
    """Raise where nobody listens."""
    raise ConnectionError("nobody there")


def told(self: Any, message: str) -> None:
    """Put the address into the log."""
    logging.getLogger("twinkle").warning("sending to %s", self.url)


def cleared(self: Any, tool_name: str, arguments: Any) -> str:
    """Take the arguments away."""
    return str(arguments.popitem())


def shared_step(self: Any, tool_name: str, arguments: Any) -> StepResult:
    """Walk in a world that all share."""
    SHARED["at"] += 1
    return StepResult(f"at {SHARED['at']}")


def shared_reset(self: Any, trajectory: Any = None) -> StepResult:
    """Begin in a world that all share."""
    SHARED["at"] = 0
    return StepResult("start")


def closed_once(self: Any) -> None:
    """Close what is open."""
    del self.at


def in_place(self: Any, trajectories: Any, **kwargs: Any) -> Any:
    """Append to the given conversations."""
    for row in trajectories:
        row["messages"].append({"role": "assistant", "content": "a"})
    return trajectories


def longer_each_time(self: Any, trajectories: Any, **kwargs: Any) -> Any:
    """Add a user turn that counts the calls."""
    turns = [{"role": "assistant", "content": "a"}, {"role": "user", "content": f"call {next(counter)}"}]
    return [{**row, "messages": [*row["messages"], *turns]} for row in trajectories]


def renamed(info: Any) -> Any:
    return {**info, "function": {**info["function"], "name": "not a name!"}}


KEPT = copy.deepcopy(Add().tool_info())
WRITES, BOX, RUNS = {"read": read}, {"received": lambda: ARRIVED, "secrets": ["127.0.0.1:9/hidden"]}, {"steps": 2}
unpicklable = {"__init__": lambda self, *args, **kwargs: vars(self).update(held=lambda: 1, url="http://hidden")}
GOOD: dict[str, Broken] = {
    "tracker": broken(Lines, **WRITES),
    "notifier": broken(Box, **BOX),
    "tool": broken(Add, arguments={"a": 1, "b": 2}, result="3"),
    "env": broken(Walk, actions=[("add", {"a": 1})] * 3),
    "rollout": broken(Echo),
}
BROKEN: dict[tuple[str, str], Broken] = {
    ("tracker", "hooks"): broken(changed(Tracker, twinkle_step_end=hookimpl(lambda self, run, steps: None))),
    ("tracker", "whole_run"): broken(hooked(Lines, twinkle_step_end=halved), **WRITES),
    ("tracker", "not_finite"): broken(hooked(Lines, twinkle_step_end=strict_json), **WRITES),
    ("tracker", "continued"): broken(hooked(Lines, twinkle_step_end=appended), **WRITES),
    ("tracker", "failed_run"): broken(hooked(Lines, twinkle_run_end=impatient)),
    ("tracker", "never_started"): broken(hooked(Lines, twinkle_run_end=impatient)),
    ("tracker", "steps_stand_at_once"): broken(hooked(Lines, twinkle_step_end=unbuffered), **WRITES),
    ("tracker", "metrics_left_alone"): broken(hooked(Lines, twinkle_step_end=written)),
    ("tracker", "released"): broken(hooked(Lines, twinkle_run_end=keeps_open)),
    ("notifier", "quiet"): broken(changed(Box, __call__=loud)),
    ("notifier", "delivered"): broken(
        changed(Box, __call__=lambda self, message: ARRIVED.extend([message] * 2)), **BOX
    ),
    ("notifier", "round_trip"): broken(after(Box, lambda found: {"url": b"bytes"}, "to_dict")),
    ("notifier", "no_secret_shown"): broken(changed(Box, __call__=told), **BOX),
    ("notifier", "pickle"): broken(changed(Box, **unpicklable)),
    ("tool", "schema"): broken(after(Add, renamed, "tool_info")),
    ("tool", "answer"): broken(after(Add, int)),
    ("tool", "arguments_left_alone"): broken(changed(Add, __call__=cleared)),
    ("tool", "info_stable"): broken(changed(Add, tool_info=lambda self: KEPT)),
    ("tool", "pickle"): broken(changed(Add, **unpicklable)),
    ("env", "answers"): broken(after(Walk, lambda found: found.observation, "step")),
    ("env", "tools"): broken(changed(Walk, tools=lambda self: [Add(), Add()])),
    ("env", "begins_afresh"): broken(changed(Walk, reset=lambda self, trajectory=None: StepResult("start"))),
    ("env", "worlds_apart"): broken(changed(Walk, step=shared_step), actions=[("add", {})]),
    ("env", "scores"): broken(changed(Walk, evaluate=lambda self, trajectories: [])),
    ("env", "arguments_left_alone"): broken(
        changed(Walk, step=lambda self, tool_name, arguments: StepResult(str(arguments.popitem())))
    ),
    ("env", "closed"): broken(changed(Walk, close=closed_once)),
    ("rollout", "finished"): broken(changed(Echo, played=lambda self, row: row)),
    ("rollout", "order"): broken(after(Echo, lambda found: found[::-1])),
    ("rollout", "no_trajectories"): broken(after(Echo, lambda found: found or [{}])),
    ("rollout", "trajectories_left_alone"): broken(changed(Echo, __call__=in_place)),
    ("rollout", "calls_apart"): broken(changed(Echo, __call__=longer_each_time)),
    ("recipe", "signature"): broken(without_run, config=Config),
    ("recipe", "configuration"): broken(count, config=Lenient),
    ("recipe", "runs"): broken(silent, config=Config, values=RUNS),
}


@pytest.mark.parametrize("kind", GOOD)
def test_a_good_one_passes(kind: str, passes: Any) -> None:
    passes(kind, GOOD[kind].component, **GOOD[kind].example)


def test_a_good_recipe_passes(passes: Any) -> None:
    passes("recipe", count, {"unknown_argument"}, config=Config, values=RUNS)


@pytest.mark.parametrize(("kind", "check"), BROKEN)
def test_a_broken_one_is_caught(kind: str, check: str, catches: Any) -> None:
    component, example = BROKEN[kind, check]
    catches(kind, check, component, **example)
    while OPEN:
        OPEN.pop().close()


@pytest.mark.parametrize("kind", [*GOOD, "recipe"])
def test_every_check_has_a_component_that_breaks_it(kind: str, own_checks: Any) -> None:
    assert {check for of, check in BROKEN if of == kind} == own_checks(kind)
