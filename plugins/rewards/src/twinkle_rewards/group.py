"""Several rewards as one: with names, weights, time limits, and a policy for those that fail."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from twinkle.data_format import Trajectory
from twinkle.errors import ArgumentError, DataError
from twinkle.logging import get_logger
from twinkle.reward import Reward
from twinkle_rewards.mathematics import limit
from twinkle_rewards.running import Failed, Member

_POLICIES = ("fail", "zero", "drop")


@dataclass(frozen=True, slots=True)
class Scores:
    """What a `RewardGroup` gives.

    Attributes:
        total: the weighted sum of each row; 0.0 in a row that is not kept.
        by_name: the scores of each reward, before weights; 0.0 where one failed.
        kept: whether a row may be trained; all True but with `on_error="drop"`.
        failures: what went wrong, a line each.
        seconds: how long each reward took.
    """

    total: list[float]
    by_name: dict[str, list[float]]
    kept: list[bool]
    failures: list[str]
    seconds: dict[str, float]

    @property
    def rows(self) -> list[int]:
        """The numbers of the rows that are kept; pick features, log-probabilities and group ids by them."""
        return [row for row, keep in enumerate(self.kept) if keep]


class RewardGroup(Reward):
    """The weighted sum of several rewards, which run at the same time.

    Each reward runs in a thread of its own; functions, objects, batched ones and `async` ones all do. One that raises
    is asked again row by row, so that one row does not cost the others (not if it has `compares_rows = True`, since its
    rows belong together). One that takes longer than `time_limit` fails for all rows, and is not waited for: its
    thread cannot be ended, goes on beside the run, and until it is over each call of that reward fails. What
    computes in C without letting go of the interpreter holds up everything; name such a reward in `isolate`. It then
    runs in another process, which is killed when the time is over; it has to be picklable, stand in a module that can
    be imported, and does not see tensors and arrays of the rows.

    Args:
        rewards: each a component of kind reward in any form, or a mapping with `type`, its arguments, and perhaps
            `weight`; under their names, or a list, where the class gives the name.
        weights: by name; 1 where none is given. A reward of weight 0 is only reported.
        time_limit: seconds for one reward over all rows of a call.
        on_error: where a reward raises, is late, or gives no finite number for a row (or not one number a row):
            "fail" raises and names reward and row; "zero" counts 0 for it there; "drop" marks the row in
            `Scores.kept`, so that the loop leaves it out, unless the reward has weight 0.
        isolate: names of rewards that run in a process of their own.

    Raises:
        ArgumentError: an option is outside its range, or names no reward.
    """

    def __init__(
        self,
        rewards: Mapping[str, Any] | Sequence[Any],
        weights: Mapping[str, float] | None = None,
        time_limit: float = 60.0,
        on_error: Literal["fail", "zero", "drop"] = "fail",
        isolate: Sequence[str] = (),
    ) -> None:
        if on_error not in _POLICIES:
            raise ArgumentError(f"{type(self).__name__}: on_error is {on_error!r}; it is one of {', '.join(_POLICIES)}")
        self.time_limit = limit(self, time_limit)
        self.on_error = on_error
        self.weights: dict[str, float] = {}
        parts: dict[str, Any] = {}
        for name, given in _named(rewards):
            if name in parts:
                raise ArgumentError(f"{type(self).__name__}: two rewards are called {name!r}; give them names")
            parts[name], self.weights[name] = _built(given)
        if not parts:
            raise ArgumentError(f"{type(self).__name__}: there are no rewards; name one at least")
        for name, weight in (weights or {}).items():
            _check_known(name, parts, "weights")
            self.weights[name] = _weight(name, weight)
        for name in [isolate] if isinstance(isolate, str) else isolate:
            _check_known(name, parts, "isolate")
        self._members = {name: Member(part, name in isolate) for name, part in parts.items()}

    def __call__(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[float]:
        """Return the weighted sums.

        Raises:
            DataError: a reward fails (`on_error="fail"`), or rows are dropped, which a list of sums cannot say.
        """
        scores = self.score(trajectories, **kwargs)
        if not all(scores.kept):
            raise DataError(
                f"{type(self).__name__}: row {scores.kept.index(False)} is dropped ({scores.failures[0]}), and a list "
                "of sums cannot say so; call score() and train its rows alone, or set on_error='zero'"
            )
        return scores.total

    def score(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> Scores:
        """Return sums, scores by name, and what failed.

        Args:
            trajectories: conversations whose last turn is scored.
            **kwargs: handed to every reward; lists have one entry a row.

        Raises:
            DataError: a reward fails, with `on_error="fail"`; names it and the row.
        """
        rows = list(trajectories)
        for member in self._members.values():
            member.start(rows, kwargs, self.time_limit)
        found = {name: member.finish(len(rows)) for name, member in self._members.items()}
        failures = [f"reward {name!r}: {why}" for name, one in found.items() for why in _told(one.scores)]
        if failures and self.on_error == "fail":
            raise DataError(f"{failures[0]} (on_error='zero' or 'drop' continues without it)") from _cause(
                found.values()
            )
        if failures:
            get_logger().warning("%s (%d failures; on_error=%r)", failures[0], len(failures), self.on_error)
        by_name = {name: [_number(score) for score in one.scores] for name, one in found.items()}
        counting = [one.scores for name, one in found.items() if self.weights[name]]
        whole = [not any(isinstance(scores[row], Failed) for scores in counting) for row in range(len(rows))]
        kept = whole if self.on_error == "drop" else [True] * len(rows)
        total = [self._sum(by_name, row) if keep else 0.0 for row, keep in enumerate(kept)]
        return Scores(total, by_name, kept, failures, {name: one.seconds for name, one in found.items()})

    def _sum(self, by_name: Mapping[str, Sequence[float]], row: int) -> float:
        return math.fsum(self.weights[name] * scores[row] for name, scores in by_name.items())


def _named(rewards: Any) -> list[tuple[str, Any]]:
    if isinstance(rewards, Mapping):
        return [(str(name), given) for name, given in rewards.items()]
    if isinstance(rewards, str) or not isinstance(rewards, Sequence):
        raise ArgumentError(f"RewardGroup: rewards is {rewards!r:.60}; give a mapping of names to rewards, or a list")
    return [(_name(given), given) for given in rewards]


def _name(given: Any) -> str:
    if isinstance(given, Mapping):
        return str(given.get("name") or _name(given.get("type")))
    if isinstance(given, str):
        return given.rpartition("#")[2].rpartition(":")[2].rpartition("/")[2]
    return str(getattr(given, "__name__", type(given).__name__))


def _built(given: Any) -> tuple[Any, float]:
    """Return a reward, ready to be called, and its weight."""
    from twinkle._registry import registry

    if not isinstance(given, Mapping):
        return registry().build(given, "reward"), 1.0
    options = {key: value for key, value in given.items() if key not in ("type", "weight", "name")}
    if "type" not in given:
        raise ArgumentError(f"RewardGroup: the reward {dict(given)!r:.60} has no type; name the component there")
    name = _name(given)
    return registry().build(given["type"], "reward", **options), _weight(name, given.get("weight", 1.0))


def _weight(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ArgumentError(f"RewardGroup: the weight of {name!r} is {value!r}; it is a finite number")
    return float(value)


def _check_known(name: Any, parts: Mapping[str, Any], option: str) -> None:
    from twinkle_registry import nearest

    if name not in parts:
        close = nearest(str(name), parts, 1)
        hint = f", nearest: {close[0]!r}" if close else ""
        raise ArgumentError(f"RewardGroup: {option} names {name!r}{hint}; the rewards are {', '.join(parts)}")


def _told(scores: Sequence[Any]) -> list[str]:
    """Return each failure once: one of all rows as such, others with their rows."""
    failed = {row: score for row, score in enumerate(scores) if isinstance(score, Failed)}
    if len(failed) > 1 and len(failed) == len(scores) and len({score.why for score in failed.values()}) == 1:
        return [f"all {len(scores)} rows: {failed[0].why}"]
    return [f"row {row}: {score.why}" for row, score in failed.items()]


def _cause(outcomes: Any) -> BaseException | None:
    failed = (score.cause for one in outcomes for score in one.scores if isinstance(score, Failed))
    return next((cause for cause in failed if cause is not None), None)


def _number(score: "float | Failed") -> float:
    return 0.0 if isinstance(score, Failed) else score
