"""Contract checks of environments: independent episodes, valid step results, valid tools."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle_testing.contracts.case import Case, NotApplicable, Violation, require
from twinkle_testing.contracts.conversations import trajectories
from twinkle_testing.contracts.tool import check_schema, made
from twinkle_testing.contracts.values import left_alone, same, shown

Action = tuple[str, Mapping[str, Any]]


@dataclass(kw_only=True)
class EnvCase(Case):
    """An environment and actions in it.

    Attributes:
        actions: actions of an episode, as (tool name, arguments); by default each tool once.
        trajectory: start of an episode.
        seeded: whether equal actions give equal results; False if the environment is random.
    """

    kind = "env"

    actions: Sequence[Action] | None = None
    trajectory: Mapping[str, Any] | None = None
    seeded: bool = True

    def episode(self, env: Any) -> list[Any]:
        """Run an episode to its end or to the last action, and return the checked results."""
        steps = [env.reset(self.trajectory)]
        for name, arguments in self.actions if self.actions is not None else _actions(env):
            if steps[-1].done:
                break
            steps.append(env.step(name, dict(arguments)))
        for step in steps:
            _check(step)
        return steps


def answers(case: EnvCase) -> None:
    """`reset` and `step` return a `StepResult` with text, a finite reward, a bool and a dict."""
    case.episode(case.build())


def tools(case: EnvCase) -> None:
    """`tools` returns tools with valid schemas and distinct names."""
    found = case.build().tools()
    require(isinstance(found, list), f"tools() gave {shown(found)}; return a list")
    names = []
    for tool in found:
        info = _info(tool)
        check_schema(info)
        names.append(info["function"]["name"])
    require(len(set(names)) == len(names), f"the names {names} are not distinct")


def begins_afresh(case: EnvCase) -> None:
    """After `reset` the same actions give the same results."""
    if not case.seeded:
        raise NotApplicable("its example has seeded=False: the environment is random")
    env = case.build()
    first, second = (_plain(case.episode(env)) for _ in range(2))
    require(same(first, second), f"the first episode gave {shown(first, 300)}, the second {shown(second, 300)}")


def worlds_apart(case: EnvCase) -> None:
    """Two environments are independent, also if their steps are interleaved."""
    if not case.seeded:
        raise NotApplicable("its example has seeded=False: the environment is random")
    single, one, two = case.build(), case.build(), case.build()
    single.reset(case.trajectory)
    alone = _plain(case.episode(single))
    one.reset(case.trajectory)
    case.episode(two)
    found = _plain(case.episode(one))
    require(same(found, alone), f"beside another environment it gave {shown(found, 300)}, alone {shown(alone, 300)}")


def scores(case: EnvCase) -> None:
    """`evaluate` returns a finite number for each trajectory, or raises NotImplementedError."""
    rows = trajectories()
    try:
        found = case.build().evaluate(rows)
    except NotImplementedError as error:
        raise NotApplicable(str(error)) from error
    require(isinstance(found, list) and len(found) == len(rows), f"evaluate() gave {shown(found)} for {len(rows)} rows")
    for score in found:
        require(
            isinstance(score, int | float) and math.isfinite(score), f"a score is {shown(score)}; it must be finite"
        )


def arguments_left_alone(case: EnvCase) -> None:
    """It does not change the arguments of a step."""
    env = case.build()
    env.reset(case.trajectory)
    name, arguments = (case.actions if case.actions is not None else _actions(env))[0]
    left_alone(lambda given: env.step(name, given), dict(arguments), "the arguments")


def closed(case: EnvCase) -> None:
    """`close` can be called at any time, also twice."""
    untouched, used = case.build(), case.build()
    case.episode(used)
    for env in (untouched, used):
        env.close()
        env.close()


CASE = EnvCase
CHECKS = (answers, tools, begins_afresh, worlds_apart, scores, arguments_left_alone, closed)


def _actions(env: Any) -> list[Action]:
    functions = [_info(tool)["function"] for tool in env.tools()]
    if not functions:
        raise NotApplicable("it has no tools; give actions=[(tool name, arguments), ...] in its example")
    return [(function["name"], made(function)) for function in functions]


def _info(tool: Any) -> Any:
    return tool.tool_info() if hasattr(tool, "tool_info") else tool


def _check(step: Any) -> None:
    from twinkle.env import StepResult

    if not isinstance(step, StepResult):
        raise Violation(f"it answered {shown(step)}; answer with twinkle.env.StepResult")
    require(isinstance(step.observation, str), f"the observation is {shown(step.observation)}; it must be text")
    fine = isinstance(step.reward, int | float) and math.isfinite(step.reward)
    require(fine, f"the reward is {shown(step.reward)}; it must be a finite number")
    require(isinstance(step.done, bool), f"done is {shown(step.done)}; it must be True or False")
    require(isinstance(step.info, dict), f"info is {shown(step.info)}; it must be a dict")


def _plain(steps: Sequence[Any]) -> list[tuple[str, float, bool]]:
    return [(step.observation, float(step.reward), step.done) for step in steps]
