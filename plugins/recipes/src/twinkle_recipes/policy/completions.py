"""Writes every answer of a run to `completions.jsonl`, and shows some of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinkle.errors import OutputError
from twinkle.paths import write_text
from twinkle_recipes.display import Display
from twinkle_recipes.history import is_due
from twinkle_recipes.policy.config import GRPOConfig
from twinkle_recipes.policy.rollouts import Answer
from twinkle_recipes.policy.scoring import Scores

_SHOWN = 300  # characters of a text on the screen; the file has the full text


class Completions:
    """Writes the answers of each step, one JSON line each, and shows some.

    Args:
        folder: the run folder.
        config: configuration of the run.
        show: the display.
        first_step: the first step of this part of the run; existing lines of it and of later steps are dropped, so that
            no step is written twice.
    """

    def __init__(self, folder: Path, config: GRPOConfig, show: Display, first_step: int) -> None:
        self._path = folder / "completions.jsonl"
        self._config = config
        self._show = show
        if self._path.is_file():
            lines = self._path.read_text(encoding="utf-8").split("\n")
            write_text(self._path, "".join(f"{line}\n" for line in lines if _is_before(line, first_step)))

    def add(self, step: int, answers: Sequence[Answer], scores: Scores) -> None:
        """Write the answers of a step, and show some if a table is due.

        Raises:
            OutputError: the file cannot be written.
        """
        lines = [json.dumps(self._line(step, answers[i], scores, i), ensure_ascii=False) for i in range(len(answers))]
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
        except OSError as error:
            raise OutputError(f"cannot write {self._path}: {error.strerror or error}") from error
        if is_due(step, self._config.completions_every):
            self._table(step, answers, scores)

    def _line(self, step: int, answer: Answer, scores: Scores, index: int) -> dict[str, object]:
        is_scored = index in scores.advantages
        advantage: Any = scores.advantages.get(index)
        return {
            "step": step,
            "prompt": answer.prompt,
            "completion": answer.text,
            "reward": scores.total[index] if is_scored else None,
            "rewards": {name: values[index] for name, values in scores.by_name.items()} if is_scored else {},
            "advantage": advantage.tolist() if hasattr(advantage, "tolist") else advantage,
            "tokens": len(answer.logps),
            "stop_reason": answer.stop_reason,
        }

    def _table(self, step: int, answers: Sequence[Answer], scores: Scores) -> None:
        """Show the best and the worst answers, in the order of their rewards."""
        ranked = sorted(scores.kept, key=lambda index: (-scores.total[index], index))
        shown = self._config.completions_shown
        some = ranked if len(ranked) <= shown else ranked[: -(-shown // 2)] + ranked[len(ranked) - shown // 2 :]
        rows = [
            (_cut(answers[index].prompt), _cut(answers[index].text), f"{scores.total[index]:.2f}") for index in some
        ]
        self._show.table(f"answers of step {step}", ("prompt", "answer", "reward"), rows)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _is_before(line: str, step: int) -> bool:
    try:
        return int(json.loads(line)["step"]) < step
    except (ValueError, KeyError, TypeError):
        return False
