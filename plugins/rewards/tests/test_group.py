"""Several rewards as one: sums, names, kinds of rewards, and every way in which one can fail."""

import asyncio
import math
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from twinkle.errors import ArgumentError, ComponentNotFound, DataError
from twinkle_rewards.advantages.grpo import GRPOAdvantage
from twinkle_rewards.advantages.reinforce import ReinforcePlusPlusAdvantage
from twinkle_rewards.advantages.rloo import RLOOAdvantage
from twinkle_rewards.exact import ExactMatchReward
from twinkle_rewards.group import RewardGroup


def rows(*said: str) -> Any:
    return [{"messages": [{"role": "assistant", "content": text}], "user_data": {"ground_truth": "1"}} for text in said]


def length(trajectories: Any, **kwargs: Any) -> list[float]:
    """Characters of the last turn."""
    return [float(len(row["messages"][-1]["content"])) for row in trajectories]


def fragile(trajectories: Any, **kwargs: Any) -> list[float]:
    """1 over the length, so that an empty answer raises."""
    return [1 / score for score in length(trajectories)]


async def slow_judge(trajectories: Any, **kwargs: Any) -> list[float]:
    """Wait, then find everything good."""
    await asyncio.sleep(0.01)
    return [1.0 for _ in trajectories]


STUCK = """
import os


def stuck(trajectories, **kwargs):
    print("a reward may print")
    said = [row["messages"][-1]["content"] for row in trajectories]
    if "deadly" in said:
        os._exit(3)
    hard = "hard" in said
    return [float(pow(9, 9**9) if hard else 1) for _ in trajectories]  # in C, which only the process's end ends
"""


@pytest.fixture
def blocked() -> Iterator[Any]:
    """A reward that waits until the test is over."""
    gate = threading.Event()

    def wait(trajectories: Any, **kwargs: Any) -> list[float]:
        gate.wait(60)
        return [1.0 for _ in trajectories]

    yield wait
    gate.set()


def test_scores_are_weighted_summed_and_told_by_name() -> None:
    group = RewardGroup(
        {
            "right": "ExactMatchReward",
            "last": {"type": "ExactMatchReward", "take": "last_number", "weight": 0.5},
            "length": length,
            "judge": slow_judge,
        },
        weights={"length": 0.0, "judge": -2.0},
    )
    scores = group.score(rows("1", "so 1", "22"))
    assert scores.by_name == {"right": [1, 0, 0], "last": [1, 1, 0], "length": [1, 4, 2], "judge": [1, 1, 1]}
    assert scores.total == [-0.5, -1.5, -2.0] == group(rows("1", "so 1", "22"))
    assert (scores.kept, scores.rows, scores.failures) == ([True] * 3, [0, 1, 2], [])
    assert set(scores.seconds) == set(scores.by_name)


def test_a_list_names_rewards_by_their_classes() -> None:
    group = RewardGroup(
        [ExactMatchReward(), length, {"type": "F1Reward", "name": "words"}, "twinkle-rewards/CoTReward"]
    )
    assert list(group.score(rows("1")).by_name) == ["ExactMatchReward", "length", "words", "CoTReward"]


def test_what_belongs_to_the_rows_reaches_every_reward() -> None:
    def other(trajectories: Any, *, hints: Any, step: int, **kwargs: Any) -> torch.Tensor:
        assert step == 3
        return torch.tensor([float(len(hint)) for hint in hints])

    group = RewardGroup({"right": "ExactMatchReward", "other": other})
    scores = group.score(rows("1", "2"), ground_truths=["0", "2"], hints=["", "ab"], step=3)
    assert scores.by_name == {"right": [0, 1], "other": [0, 2]}


def test_rewards_wait_at_the_same_time() -> None:
    together = threading.Barrier(2, timeout=30)

    def meets(trajectories: Any, **kwargs: Any) -> list[float]:
        together.wait()
        return [1.0 for _ in trajectories]

    assert RewardGroup({"one": meets, "two": meets})(rows("1")) == [2.0]


def test_a_row_that_makes_a_reward_raise_does_not_cost_the_others() -> None:
    said = rows("1", "", "22")
    with pytest.raises(DataError, match="reward 'fragile': row 1: it raised ZeroDivisionError") as caught:
        RewardGroup({"fragile": fragile, "length": length}).score(said)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    zero = RewardGroup({"fragile": fragile, "length": length}, on_error="zero").score(said)
    assert (zero.total, zero.kept) == ([2.0, 0.0, 2.5], [True] * 3)
    drop = RewardGroup({"fragile": fragile, "length": length}, on_error="drop")
    scores = drop.score(said)
    assert (scores.total, scores.kept, scores.rows) == ([2.0, 0.0, 2.5], [True, False, True], [0, 2])
    assert scores.failures == ["reward 'fragile': row 1: it raised ZeroDivisionError: float division by zero"]
    with pytest.raises(DataError, match=r"row 1 is dropped .*ZeroDivisionError.* call score\(\)"):
        drop(said)


def test_a_reward_that_is_only_reported_drops_no_row() -> None:
    group = RewardGroup({"fragile": fragile, "length": length}, weights={"fragile": 0}, on_error="drop")
    scores = group.score(rows("1", ""))
    assert (scores.total, scores.kept) == ([1.0, 0.0], [True, True])
    assert scores.failures == ["reward 'fragile': row 1: it raised ZeroDivisionError: float division by zero"]


def test_all_rows_may_be_dropped_and_no_rows_have_no_advantages() -> None:
    scores = RewardGroup({"fragile": fragile}, on_error="drop").score(rows("", ""))
    assert (scores.total, scores.rows) == ([0.0, 0.0], [])
    for advantage in (GRPOAdvantage(), RLOOAdvantage(), ReinforcePlusPlusAdvantage()):
        assert advantage([], group_ids=[]).tolist() == []  # type: ignore[union-attr]


def test_a_row_whose_judge_did_not_answer_in_time_does_not_cost_the_others() -> None:
    def asks(trajectories: Any, **kwargs: Any) -> list[float]:
        if any(row["messages"][-1]["content"] == "b" for row in trajectories):
            raise TimeoutError("the judge is away")
        return [1.0 for _ in trajectories]

    scores = RewardGroup({"asks": asks}, on_error="zero").score(rows("a", "b", "c"))
    assert scores.total == [1.0, 0.0, 1.0]
    assert scores.failures == ["reward 'asks': row 1: it raised TimeoutError: the judge is away"]


def test_arguments_of_rows_go_with_the_row_that_is_asked_again() -> None:
    def divides(trajectories: Any, by: Any, **kwargs: Any) -> list[float]:
        return [12 / one for one in by]

    scores = RewardGroup({"divides": divides}, on_error="zero").score(rows("a", "b", "c"), by=[2, 0, 3])
    assert scores.by_name == {"divides": [6.0, 0.0, 4.0]}


def test_a_reward_that_compares_rows_is_not_asked_row_by_row() -> None:
    def ranks(trajectories: Any, **kwargs: Any) -> list[float]:
        assert len(trajectories) > 1
        raise RuntimeError("no ranking")

    ranks.compares_rows = True  # type: ignore[attr-defined]
    scores = RewardGroup({"ranks": ranks}, on_error="zero").score(rows("a", "b"))
    assert scores.failures == ["reward 'ranks': all 2 rows: it raised RuntimeError: no ranking"]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ([1.0, math.nan], "row 1: its score is nan, no finite number"),
        ([1.0, None], "row 1: its score is None"),
        ([1.0, "1"], "row 1: its score is '1'"),
        ([1.0], "all 2 rows: it gave 1 scores for 2 rows"),
        (None, "all 2 rows: it gave None for 2 rows"),
        ("12", "all 2 rows: it gave '12'"),
        ({0: 1.0, 1: 1.0}, "all 2 rows: it gave {0: 1.0, 1: 1.0} for"),
    ],
)
def test_scores_that_are_none_are_failures_with_their_rows(found: Any, says: str) -> None:
    def odd(trajectories: Any, **kwargs: Any) -> Any:
        return found

    with pytest.raises(DataError) as caught:
        RewardGroup({"odd": odd})(rows("a", "b"))
    assert f"reward 'odd': {says}" in str(caught.value)
    kept = RewardGroup({"odd": odd}, on_error="drop").score(rows("a", "b")).kept
    assert kept == [says.startswith("row 1"), False]


def test_a_reward_that_hangs_is_not_waited_for_and_not_called_again_until_it_ends(blocked: Any) -> None:
    group = RewardGroup({"blocked": blocked, "length": length}, time_limit=0.2, on_error="zero")
    began = time.monotonic()
    first, second = group.score(rows("1")), group.score(rows("1"))
    assert time.monotonic() - began < 30
    assert first.total == second.total == [1.0]
    assert first.failures == ["reward 'blocked': row 0: it took longer than 0.2 s; its thread runs on"]
    assert second.failures == ["reward 'blocked': row 0: an earlier call still runs beside; it was not called"]
    with pytest.raises(DataError, match="reward 'blocked': row 0: it took longer"):
        RewardGroup({"blocked": blocked}, time_limit=0.1)(rows("1"))


def test_an_async_reward_that_is_late_is_cancelled() -> None:
    cancelled = threading.Event()

    async def endless(trajectories: Any, **kwargs: Any) -> list[float]:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()
        return []

    group = RewardGroup({"endless": endless}, time_limit=0.2, on_error="zero")
    assert group.score(rows("1", "2")).total == [0.0, 0.0]
    again = group.score(rows("1", "2"))  # called anew, and not refused because of the call before
    assert again.failures[0].startswith("reward 'endless': all 2 rows: it took")
    assert cancelled.wait(30)


@pytest.mark.full
def test_an_isolated_reward_is_killed_when_its_time_is_over_may_end_its_process_and_answers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_stuck.py").write_text(STUCK)
    monkeypatch.syspath_prepend(tmp_path)
    named = {"stuck": "acme_stuck:stuck"}
    group = RewardGroup(named, time_limit=0.5, on_error="zero", isolate=["stuck"])
    late = group.score(rows("hard", "easy"))
    assert late.failures[0].startswith("reward 'stuck': all 2 rows: it took longer than")
    again = RewardGroup(named, isolate="stuck")
    feature = {**rows("easy")[0], "input_ids": torch.tensor([1, 2])}
    assert again.score([feature]).total == [1.0]
    deadly = RewardGroup(named, on_error="drop", isolate="stuck").score(rows("easy", "deadly"))
    assert (deadly.total, deadly.kept) == ([1.0, 0.0], [True, False])
    assert deadly.failures == ["reward 'stuck': row 1: its process ended with code 3"]


def test_a_reward_in_a_file_of_its_own_can_be_isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(STUCK)
    scores = RewardGroup({"stuck": "./mine.py:stuck"}, isolate=["stuck"], on_error="zero").score(rows("easy"))
    assert (scores.total, scores.failures) == ([1.0], [])


def test_a_reward_that_another_process_cannot_have_says_so() -> None:
    with pytest.raises(DataError, match="reward 'odd': all 2 rows: it cannot be sent to another process"):
        RewardGroup({"odd": lambda rows, **kwargs: []}, isolate=["odd"]).score(rows("1", "2"))


def test_rows_that_fail_are_told_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    RewardGroup({"fragile": fragile}, on_error="zero").score(rows("", "", "1"))
    assert [record.getMessage() for record in caplog.records] == [
        "reward 'fragile': row 0: it raised ZeroDivisionError: float division by zero (2 failures; on_error='zero')"
    ]


def test_it_pickles_and_scores_nothing_of_no_rows() -> None:
    group = pickle.loads(pickle.dumps(RewardGroup({"right": "ExactMatchReward"}, weights={"right": 3})))
    assert group(rows("1", "2")) == [3.0, 0.0]
    assert group([]) == []


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"rewards": {}}, ArgumentError, "there are no rewards"),
        ({"rewards": "ExactMatchReward"}, ArgumentError, "give a mapping"),
        ({"rewards": [length, length]}, ArgumentError, "two rewards are called 'length'"),
        ({"rewards": [{"weight": 1}]}, ArgumentError, "has no type"),
        ({"rewards": ["ExactMatchRewrad"]}, ComponentNotFound, "ExactMatchReward"),
        ({"rewards": [{"type": "ExactMatchReward", "taek": "all"}]}, ArgumentError, "taek"),
        ({"rewards": [length], "weights": {"lenght": 1}}, ArgumentError, "weights names 'lenght', nearest: 'length'"),
        ({"rewards": [length], "weights": {"length": math.nan}}, ArgumentError, "weight of 'length' is nan"),
        ({"rewards": [length], "isolate": ["other"]}, ArgumentError, "isolate names 'other'"),
        ({"rewards": [length], "on_error": "skip"}, ArgumentError, "on_error is 'skip'"),
        ({"rewards": [length], "time_limit": 0}, ArgumentError, "time_limit is 0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(arguments: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        RewardGroup(**arguments)
