"""Questions asked before and after training: the answers, and the file that stores them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle.data_format import SamplingParams
from twinkle.paths import write_text
from twinkle_recipes.config import SFTConfig
from twinkle_recipes.display import Display

if TYPE_CHECKING:
    from twinkle.mesh.ranks import Ranks


class Interview:
    """The questions of a run: asked and written by the first rank, if it has the whole model.

    Args:
        config: The configuration of the run.
        folder: The run folder.
        show: The display.
        ranks: The processes that train the model.
    """

    def __init__(self, config: SFTConfig, folder: Path, show: Display, ranks: "Ranks") -> None:
        self._config, self._show = config, show
        self._path = folder / "answers.json"
        sharded = not ranks.alone and (config.mesh.fsdp or 1) > 1
        self._is_asked = bool(config.questions) and ranks.is_first and not sharded
        self._before: list[str] = []
        if config.questions and sharded:
            show.say("the questions are skipped: with mesh.fsdp no process has the whole model")

    def before(self, model: Any) -> None:
        """Ask before training, unless an earlier part of this run did."""
        if self._is_asked:
            questions = self._config.questions
            self._before = answers_before(self._path, questions) or ask(model, self._config)
            write_answers(self._path, questions, self._before)

    def after(self, model: Any) -> None:
        """Ask after training, and show both answers."""
        if self._is_asked:
            after = ask(model, self._config)
            write_answers(self._path, self._config.questions, self._before, after)
            self._show.answers(list(zip(self._config.questions, self._before, after, strict=True)))

    def is_complete(self) -> bool:
        """Return whether an earlier part of this run wrote the answers after training, or there are no questions."""
        questions = self._config.questions
        if not questions:
            return True
        try:
            rows = json.loads(self._path.read_text(encoding="utf-8"))
            return [row["question"] for row in rows if row["after"] is not None] == questions
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def written(self) -> str | None:
        """Return the path of the answers, or None if there are none."""
        return str(self._path) if self._config.questions and self._path.exists() else None


def ask(model: Any, config: SFTConfig) -> list[str]:
    """Return the model's answers to `config.questions`, in order."""
    sampler = config.build("sampler", config.sampler.name, model=model)
    params = SamplingParams(
        max_tokens=config.sampler.max_tokens, temperature=config.sampler.temperature, seed=config.seed
    )
    conversations = [{"messages": [{"role": "user", "content": question}]} for question in config.questions]
    responses = sampler.sample(conversations, params)
    return [(response.sequences[0].decoded or "").strip() for response in responses]


def write_answers(path: Path, questions: Sequence[str], before: Sequence[str], after: Sequence[str] = ()) -> None:
    """Write `[{"question", "before", "after"}, ...]`; `after` is null until the run is over."""
    later: list[str | None] = [*after] if after else [None] * len(questions)
    rows = [
        {"question": question, "before": old, "after": new}
        for question, old, new in zip(questions, before, later, strict=True)
    ]
    write_text(path, json.dumps(rows, indent=2, ensure_ascii=False) + "\n")


def answers_before(path: Path, questions: Sequence[str]) -> list[str] | None:
    """Return the answers that an earlier part of this run wrote for the same questions, or None."""
    if not path.is_file():
        return None
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        answers = {row["question"]: row["before"] for row in rows}
    except (ValueError, KeyError, TypeError):
        return None
    return [answers[question] for question in questions] if all(question in answers for question in questions) else None
