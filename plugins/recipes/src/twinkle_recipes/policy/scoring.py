"""Rewards and advantages of a step's answers, and the log-probabilities that a policy loss compares with."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from twinkle.logging import get_logger
from twinkle_recipes.policy.config import GRPOConfig
from twinkle_recipes.policy.rollouts import Answer
from twinkle_recipes.run.building import as_before, build_frozen


class Logps:
    """Collects `old_logps`, `ref_logps` and `rollout_logps` of a step's answers, as configured.

    The reference is the model without its adapter, or with the initial adapter of the run; if all parameters are
    trained, a frozen copy of the initial weights.
    """

    def __init__(self, config: GRPOConfig, model: Any) -> None:
        self._config = config
        self._model = model
        self._copy = build_frozen(config, config.model) if config.asks_reference and config.lora is None else None

    def __call__(self, answers: Sequence[Answer], chosen: Sequence[int]) -> dict[str, list[Any]]:
        """Return the log-probabilities of the chosen answers by name, one list entry per answer."""
        rows = [answers[index].row for index in chosen]
        sampled = [answers[index].logps for index in chosen]
        columns: dict[str, list[Any]] = {"old_logps": sampled}
        if self._config.old_logps == "trainer":
            columns = {"old_logps": self._scored(self._model, rows), "rollout_logps": sampled}
        if self._config.asks_reference:
            columns["ref_logps"] = self._reference(rows)
        return columns

    def _reference(self, rows: list[Any]) -> list[Any]:
        if self._config.lora is None:
            return self._scored(self._copy, rows)
        return self._scored(self._model, rows, **as_before(self._config.lora))

    def _scored(self, model: Any, rows: list[Any], **options: Any) -> list[Any]:
        """Return one tensor `[T]` per row."""
        temperature = self._config.sampling.temperature
        outputs = model.forward_only(inputs=rows, temperature=temperature, **self._config.in_memory, **options)
        return list(outputs["logps"])


@dataclass(frozen=True)
class Scores:
    """Rewards and advantages of some answers.

    Attributes:
        total: the weighted sum of each answer's rewards; invalid for dropped answers.
        by_name: the individual rewards, by name.
        kept: indices of the answers that are not dropped.
        advantages: advantage of each kept answer, by index: a number, or a tensor with one entry per token.
    """

    total: Sequence[float]
    by_name: dict[str, Sequence[float]]
    kept: list[int]
    advantages: dict[int, Any] = field(default_factory=dict)

    def advantages_of(self, chosen: Sequence[int]) -> list[Any]:
        """Return the advantages of some answers."""
        return [self.advantages[index] for index in chosen]

    def metrics(self) -> dict[str, float]:
        """Return mean and standard deviation of the totals, and the mean of each reward."""
        totals = [self.total[index] for index in self.kept]
        if not totals:
            return {"reward": math.nan, "dropped": len(self.total)}
        means = {f"reward/{name}": _mean(values, self.kept) for name, values in self.by_name.items()}
        dropped = {"dropped": len(self.total) - len(totals)} if len(totals) < len(self.total) else {}
        return {"reward": statistics.fmean(totals), "reward_std": statistics.pstdev(totals), **means, **dropped}


class Scorer:
    """Scores answers, and compares the answers to each prompt."""

    def __init__(self, config: GRPOConfig) -> None:
        self._config = config
        settings = config.scoring
        self._group: Any = config.build(
            "reward",
            settings.name,
            rewards={one.label: config.build("reward", one.name, **one.args) for one in config.rewards},
            weights={one.label: one.weight for one in config.rewards},
            time_limit=settings.time_limit,
            on_error=settings.on_error,
            isolate=settings.isolate,
        )
        self._advantage: Any = config.build("advantage", config.advantage.name, **config.advantage.args)
        self._has_warned = False
        self._try()

    def __call__(self, answers: Sequence[Answer]) -> Scores:
        """Return rewards and advantages of the answers to several prompts."""
        scores = self.rewards(answers)
        size = {"num_generations": self._config.sampling.num_generations}
        group_sizes = Counter(answers[index].group for index in scores.kept)
        # The only remaining answer of a group cannot be compared.
        alone = {group for group, count in group_sizes.items() if count == 1 and size["num_generations"] > 1}
        scored = [index for index in scores.kept if answers[index].group not in alone]
        if not scored:
            return Scores(scores.total, scores.by_name, [])
        all_scored = len(scored) == len(answers)
        groups = size if all_scored else {"group_ids": [answers[index].group for index in scored]}
        advantages = self._compared([scores.total[index] for index in scored], **groups)
        self._warn_of_equal(advantages)
        known = list(advantages) if isinstance(advantages, list) else advantages.tolist()
        return Scores(scores.total, scores.by_name, scored, dict(zip(scored, known, strict=True)))

    def rewards(self, answers: Sequence[Answer]) -> Scores:
        """Return the rewards of answers.

        Raises:
            DataError: a reward raises, times out or returns NaN, and `scoring.on_error` is `fail`.
        """
        scores = self._group.score([answer.row for answer in answers])
        return Scores(scores.total, scores.by_name, [index for index, valid in enumerate(scores.kept) if valid])

    def _compared(self, totals: Sequence[float], **groups: Any) -> Any:
        return self._advantage(totals, scale=self._config.advantage.scale, **groups)

    def _try(self) -> None:
        """Call the advantage with equal rewards, to detect invalid arguments before the first step."""
        config, count = self._config, self._config.sampling.num_generations
        self._compared([0.0] * config.answers, num_generations=count)
        if config.scoring.on_error == "drop":
            self._compared([0.0] * config.answers, group_ids=[index // count for index in range(config.answers)])

    def _warn_of_equal(self, advantages: Any) -> None:
        if self._has_warned or any(bool((row != 0).any()) for row in advantages):
            return
        self._has_warned = True
        get_logger(__name__).warning(
            "all answers to each prompt of this step have the same reward, so the step trains only the other terms of "
            "the loss (KL, entropy); if this persists, use easier or harder prompts, or a higher temperature. "
            "(Logged once; see `reward_std` and `grad_norm` for each step.)"
        )


def _mean(values: Sequence[float], kept: Sequence[int]) -> float:
    return statistics.fmean(values[index] for index in kept)
