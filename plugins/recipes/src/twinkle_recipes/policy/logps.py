"""The log-probabilities that a policy loss compares with: those at sampling time, and those of a reference."""

from collections.abc import Sequence
from typing import Any

from twinkle_recipes.policy.config import GRPOConfig
from twinkle_recipes.policy.rollouts import Answer
from twinkle_recipes.run.building import as_before, build_frozen


class Logps:
    """Collects `old_logps`, `ref_logps` and `rollout_logps` of a step's answers, as far as the configuration asks.

    The reference is the model without its adapter, or with the one that the run began with; where all parameters are
    trained, a frozen copy of the weights that the run began with.
    """

    def __init__(self, config: GRPOConfig, model: Any) -> None:
        self._config = config
        self._model = model
        self._copy = build_frozen(config, config.model) if config.asks_reference and config.lora is None else None

    def __call__(self, answers: Sequence[Answer], chosen: Sequence[int]) -> dict[str, list[Any]]:
        """Return the chosen answers' numbers by name, a list of one entry for each."""
        rows = [answers[index].row for index in chosen]
        sampled = [answers[index].logps for index in chosen]
        known: dict[str, list[Any]] = {"old_logps": sampled}
        if self._config.old_logps == "trainer":
            known = {"old_logps": self._scored(self._model, rows), "rollout_logps": sampled}
        if self._config.asks_reference:
            known["ref_logps"] = self._reference(rows)
        return known

    def _reference(self, rows: list[Any]) -> list[Any]:
        if self._config.lora is None:
            return self._scored(self._copy, rows)
        return self._scored(self._model, rows, **as_before(self._config.lora))

    def _scored(self, model: Any, rows: list[Any], **options: Any) -> list[Any]:
        """Return one tensor `[T]` a row."""
        temperature = self._config.sampling.temperature
        outputs = model.forward_only(inputs=rows, temperature=temperature, **self._config.in_memory, **options)
        return list(outputs["logps"])
