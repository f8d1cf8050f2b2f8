"""What a run leaves at its end, and how it is told."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinkle_recipes.config.parts import RunConfig
from twinkle_recipes.config.sft import SFTConfig
from twinkle_recipes.rows.loading import batches_per_epoch
from twinkle_recipes.run.checkpoints import Checkpoints
from twinkle_recipes.show.numbers import losses_of

_FEW = 10  # below, one row more or less moves a mean or a share by a tenth


def result_name(config: RunConfig) -> str:
    """Return the name of the folder that holds the trained weights."""
    return "adapter" if config.lora else "model"


def is_finished(config: RunConfig, folder: Path, done: int, steps: int) -> bool:
    """Say whether the run that is to go on in `folder` is over, with its result and, of sft, its answers."""
    if config.run_folder is None or done < steps or not (folder / result_name(config)).is_dir():
        return False
    questions = getattr(config, "questions", [])
    return not questions or _is_answered(folder / "answers.json", questions)


def summary(config: SFTConfig, folder: Path, steps: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return where everything lies, and the losses of the last step."""
    best = Checkpoints(folder / "checkpoints").path("best")
    files = {
        "best": best,
        "curve": folder / "loss.png",
        "answers": folder / "answers.json" if config.questions else None,
    }
    found = {name: str(path) if path is not None and path.exists() else None for name, path in files.items()}
    return {"path": str(folder / result_name(config)), "steps": steps, **losses_of(metrics), **found}


def counted(number: int, one: str) -> str:
    """Return `1 batch`, `2 batches`."""
    return f"{number} {one}" if number == 1 else f"{number} {one}es"


def told_of(batches: int | None, held_out: Any) -> str:
    """Return how many batches an epoch has (None: a stream), and what is held out."""
    training = "a stream" if batches is None else f"{counted(batches, 'batch')} an epoch"
    if held_out is None:
        return training
    size = batches_per_epoch(held_out)
    few = "" if size is None or (rows := len(held_out.dataset)) >= _FEW else f" (only {rows}: their numbers say little)"
    return f"{training}; {'a stream' if size is None else counted(size, 'batch')} of other rows to evaluate on{few}"


def _is_answered(path: Path, questions: list[str]) -> bool:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return [row["question"] for row in rows if row["after"] is not None] == questions
    except (OSError, ValueError, KeyError, TypeError):
        return False
