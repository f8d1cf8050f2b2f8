"""Pools of environments: slots are worlds apart, whatever crashes, hangs, leaks or lies on several workers."""

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from waiting_env import WaitingEnv

from twinkle.env import StepResult
from twinkle.errors import ArgumentError, ComponentNotFound
from twinkle.runtime import current
from twinkle.runtime.process import LocalRuntime
from twinkle.template import Template
from twinkle.testing import tiny_tokenizer
from twinkle_agentic.envs import EnvPool, EnvTool
from twinkle_agentic.examples import CountdownEnv, ScriptedSampler
from twinkle_agentic.rollout import MultiTurnRollout
from twinkle_agentic.tools import ToolManager


def test_the_slots_of_a_pool_are_worlds_apart_and_step_together() -> None:
    pool = EnvPool(3, env_cls=CountdownEnv, env_kwargs={"start": 5})
    assert [step.observation for step in pool.reset_batch([0, 2])] == ["There are 5."] * 2
    found = pool.step_batch([2, 0], ["take", "take"], [{"number": 3}, {"number": 1}])
    assert [step.observation for step in found] == ["There are 2.", "There are 4."]
    one, two, _ = pool.get_adapters(3)
    assert one.step("take", {"number": 1}).observation == "There are 3."
    assert two.reset().observation == "There are 5."
    assert EnvTool.from_env(two)[0]("take", {"number": 2}) == "There are 3."
    assert two.evaluate([{"messages": [{"role": "assistant", "content": "0"}]}]) == [1.0]


@pytest.mark.timeout(60)  # a reader that waits for the pipe would wait for ever
def test_a_pool_of_a_class_in_a_pipe_is_refused_and_does_not_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "env.py")
    with pytest.raises(ComponentNotFound, match="it is a pipe, not a regular file"):
        EnvPool(2, env_cls=f"{tmp_path}/env.py:Env").reset_batch([0, 1])


def test_an_environment_that_raises_ends_its_own_episode() -> None:
    pool = EnvPool(2, env_cls=CountdownEnv)
    pool.reset_batch([0, 1])
    wrong, right = pool.step_batch([0, 1], ["take", "take"], [{"number": 9}, {"number": 1}])
    assert (wrong.done, wrong.reward) == (True, 0.0)
    assert wrong.info == {"error": "ValueError: number is 9; take 1, 2 or 3"}
    assert right.observation == "There are 9."

    class Exits(CountdownEnv):
        def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
            sys.exit("the game is over")

    pool = EnvPool(2, env_cls=Exits)
    assert [step.done for step in pool.step_batch([0, 1], ["take"] * 2, [{}] * 2)] == [True, True]
    assert pool.step(0, "take", {}).info == {"error": "SystemExit: the game is over"}


def test_the_slots_of_a_pool_wait_side_by_side() -> None:
    met = threading.Barrier(3, timeout=30)

    class Meets(CountdownEnv):
        def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
            met.wait()
            return StepResult("met")

    found = EnvPool(3, env_cls=Meets).step_batch([0, 1, 2], ["take"] * 3, [{}] * 3)
    assert [step.observation for step in found] == ["met"] * 3


def test_a_pool_checks_what_it_is_asked() -> None:
    closed: list[int] = []

    class Closes(CountdownEnv):
        def close(self) -> None:
            closed.append(1)

    pool = EnvPool(2, env_cls=Closes)
    for wrong, says in (
        (lambda: pool.reset(2), "no slot 2; this pool has 0 to 1"),
        (lambda: pool.step_batch([0, 0], ["take"] * 2, [{}] * 2), "name a slot twice"),
        (lambda: pool.step_batch([0, 1], ["take"], [{}, {}]), "tool_names has 1 entries for 2 slots"),
        (lambda: pool.get_adapters(3), "raise pool_size"),
        (lambda: EnvPool(0), "pool_size is 0"),
    ):
        with pytest.raises(ArgumentError, match=says):
            wrong()
    pool.reset_batch([0, 1])
    pool.close()
    pool.close()
    assert len(closed) == 2


class World(WaitingEnv):
    """Counts the environments that were made and closed; its action `wait` hangs until it is let go."""

    made: ClassVar[list["World"]] = []
    closed: ClassVar[list["World"]] = []

    def __init__(self) -> None:
        super().__init__()
        self.made.append(self)

    def close(self) -> None:
        self.closed.append(self)
        if len(self.closed) == 1:
            raise OSError("the first one cannot be closed")


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[World]]:
    made: list[World] = []
    monkeypatch.setattr(World, "made", made)
    monkeypatch.setattr(World, "closed", [])
    yield made
    for world in made:
        world.go.set()


def wait_for(done: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not done() and time.monotonic() < end:
        time.sleep(0.01)


def test_rollouts_act_in_a_pool_round_after_round_whatever_its_environments_do(worlds: list[World]) -> None:
    pool, template = EnvPool(3, env_cls=World), Template(tokenizer=tiny_tokenizer())
    says = {"wins": ('take", "arguments": {"number": 3}', 2), "breaks": ('take", "arguments": {"number": 9}', 1)}
    says["hangs"] = ('wait", "arguments": {}', 1)

    class Acts(ScriptedSampler):
        def _next(self, row: Any, params: Any) -> Any:
            call, count = says[row["messages"][0]["content"]]
            self.texts = [f'<tool_call>{{"name": "{call}}}</tool_call>'] * count + ["ok"]
            return super()._next(row, params)

    prompts: Any = [{"messages": [{"role": "user", "content": kind}]} for kind in says]
    for _ in range(2):
        pool.reset_batch([0, 1, 2])
        managers = [ToolManager(EnvTool.from_env(env), time_limit=0.5) for env in pool.get_adapters(3)]
        wins, breaks, hangs = MultiTurnRollout(Acts([], template))(prompts, tool_manager=managers)
        assert (wins["turn_rewards"], wins["stop_reason"]) == ([0.0, 0.0], "done")  # type: ignore[typeddict-item]
        assert (breaks["turn_rewards"], breaks["stop_reason"]) == ([0.0], "done")  # type: ignore[typeddict-item]
        assert hangs["messages"][-2]["content"] == "Error: wait: no answer within 0.5 seconds"
        assert hangs["stop_reason"] == "stop"  # type: ignore[typeddict-item]
    assert len(worlds) == 4  # what hung in the first round was replaced in the second
    for world in worlds:
        world.go.set()
    wait_for(lambda: World.closed and not pool._running)
    assert World.closed == [worlds[2]]
    pool.close()
    assert {id(world) for world in World.closed} == {id(world) for world in worlds}


def test_one_that_cannot_be_closed_keeps_no_other_from_it(worlds: list[World]) -> None:
    pool = EnvPool(3, env_cls=World)
    pool.reset_batch([0, 1, 2])
    with pytest.raises(OSError, match="the first one"):
        pool.close()
    assert len(World.closed) == 3


def test_a_step_that_hangs_shares_its_environment_with_no_other_episode(worlds: list[World]) -> None:
    pool = EnvPool(1, env_cls=World)
    hangs = threading.Thread(target=pool.step, args=(0, "wait", {}))
    hangs.start()
    wait_for(lambda: pool._running)
    assert pool.step(0, "take", {"number": 1}).info == {
        "error": "RuntimeError: the slot is still busy with the step before"
    }
    assert pool.reset(0).observation == "There are 4."
    assert pool.step(0, "take", {"number": 1}).observation == "There are 3."
    assert (worlds[0].left, len(worlds), World.closed) == (4, 2, [])
    World.closed.append(worlds[1])  # so that closing does not raise
    worlds[0].go.set()
    hangs.join(30)
    assert World.closed[1:] == [worlds[0]]
    assert pool.step(0, "take", {"number": 1}).observation == "There are 2."


class Workers(LocalRuntime):
    """Builds each pool twice and calls both as the marks of its methods say; what has no mark runs on the stand-in."""

    def __init__(self) -> None:
        super().__init__()
        self.pools: list[EnvPool] = []

    def construct(self, cls: type, args: Any, kwargs: Any) -> Any:
        if cls is not EnvPool or self.pools:
            return None
        self.pools.append(None)  # type: ignore[arg-type]
        self.pools = [EnvPool(*args, **kwargs) for _ in range(2)]
        return _StandIn(self.pools)


class _StandIn:
    def __init__(self, pools: list[EnvPool]) -> None:
        self.pools, self.pool_size = pools, pools[0].pool_size

    def __getattr__(self, name: str) -> Any:
        function = getattr(EnvPool, name)
        marks = getattr(function, "__twinkle_remote__", None)
        if marks is None:
            return functools.partial(function, self)
        assert (marks.dispatch, marks.collect) in {("all", "first"), ("all", "none")}
        return lambda *args, **kwargs: self.called(name, *args, **kwargs)[0]

    def called(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [getattr(pool, name)(*args, **kwargs) for pool in self.pools]


def test_a_pool_on_several_workers_answers_like_one(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Workers()
    monkeypatch.setattr(current, "_current", runtime)
    pool = EnvPool(2, env_cls=CountdownEnv, env_kwargs={"start": 5})
    assert len(runtime.pools) == 2
    assert [step.observation for step in pool.reset_batch([0, 1])] == ["There are 5."] * 2
    found = pool.step_batch([1, 0], ["take"] * 2, [{"number": 3}, {"number": 1}])
    assert [step.observation for step in found] == ["There are 2.", "There are 4."]
    one, two = pool.get_adapters(2)
    (take,) = EnvTool.from_env(two)
    assert take("take", {"number": 2}) == "There are 0."
    assert one.evaluate([{"messages": [{"role": "assistant", "content": "0"}]}]) == [1.0]
    assert [[pool._env(idx).left for idx in (0, 1)] for pool in runtime.pools] == [[4, 0]] * 2  # type: ignore[attr-defined]
    pool.close()
