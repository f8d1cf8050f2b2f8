"""How a run that was cut off goes on: what it left, and how to say so."""

import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from twinkle.cli.processes import twinkle_command
from twinkle.errors import CheckpointError
from twinkle.paths import write_text
from twinkle.platform import Platform
from twinkle.run import Run
from twinkle_recipes.checkpoints import Checkpoints, find_checkpoint, run_folder_of
from twinkle_recipes.config import SFTConfig
from twinkle_recipes.plots import History
from twinkle_recipes.progress import Display


def resume(config: SFTConfig, model: Any, training: Any, run: Run) -> tuple[int, History]:
    """Continue from `config.resume_from`, if given.

    Weights, optimizer, scheduler, random state and position in the data are those of the checkpoint, so the next step
    is the one that the uninterrupted run would have made.

    Returns:
        The number of steps already made, and their numbers.

    Raises:
        CheckpointError: there is no such checkpoint, or it was made with another `gradient_accumulation_steps`.
    """
    if config.resume_from is None:
        return 0, History()
    checkpoint = find_checkpoint(config.resume_from)
    progress = model.resume_from_checkpoint(str(checkpoint))
    size = progress["gradient_accumulation_steps"]
    if size != config.gradient_accumulation_steps:
        raise CheckpointError(
            f"{checkpoint} was made with gradient_accumulation_steps {size}, "
            f"but {config.gradient_accumulation_steps} is configured; use {size} again"
        )
    training.resume_from_checkpoint(progress["consumed_train_samples"])
    done = -(-progress["cur_step"] // size)
    earlier = run_folder_of(checkpoint) or run.folder
    return done, History.read(earlier / "metrics.jsonl", done)


def score_of(history: History, best: Path | None) -> float:
    """Return the evaluation loss of the checkpoint that `best` names; infinity where nothing is known."""
    scores = {f"step-{step}": loss for step, loss in zip(*history.series("eval/loss"), strict=True)}
    return scores.get(best.name, math.inf) if best is not None else math.inf


def write_config(config: SFTConfig, folder: Path) -> None:
    """Write the whole effective configuration to `folder/config.yaml`.

    `resume_from` is left out: the file describes the whole run, however often it was cut off.
    """
    values = config.model_dump(mode="json", exclude={"resume_from"})
    write_text(folder / "config.yaml", yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


@contextmanager
def say_how_to_resume(show: Display, folder: Path) -> Iterator[None]:
    """After Ctrl-C within the block, tell where the last checkpoint is and which command continues from it."""
    try:
        yield
    except KeyboardInterrupt:
        checkpoint = Checkpoints(folder / "checkpoints").path("last")
        if checkpoint is None:
            show.say("interrupted before the first checkpoint; nothing to continue from")
        else:
            show.say(f"interrupted; checkpoint: {checkpoint}")
            show.say(f"continue with: {resume_command(folder)}")
        raise


def resume_command(folder: Path) -> str:
    """Return the command that continues the run in `folder`, as it works from here."""
    processes = Platform.get_world_size()
    several = ["--nproc", str(processes)] if processes > 1 else []
    return shlex.join([*twinkle_command(), "run", "sft", *several, "--resume_from", str(folder)])
