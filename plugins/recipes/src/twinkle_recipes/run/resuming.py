"""How a run that was cut off goes on: what it left, and how to say so."""

import json
import math
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from twinkle.command import twinkle_command
from twinkle.errors import CheckpointError
from twinkle.paths import write_text
from twinkle.platform import Platform
from twinkle.run import Run
from twinkle_recipes.config.parts import RunConfig
from twinkle_recipes.run.checkpoints import Checkpoints, find_checkpoint, run_folder_of
from twinkle_recipes.show.plots import History
from twinkle_recipes.show.progress import Display


@dataclass(frozen=True)
class Resumed:
    """Where a run stands before its next step; as it is, at the beginning.

    Attributes:
        done: steps already made.
        history: their numbers.
        consumed: how many rows of the data they read.
        state: what the loop itself kept in the checkpoint (`loop_state` of `model.save`).
    """

    done: int = 0
    history: History = field(default_factory=History)
    consumed: int = 0
    state: Mapping[str, Any] = field(default_factory=dict)


def resume(config: RunConfig, model: Any, run: Run, accumulation: int = 1) -> Resumed:
    """Continue from `config.resume_from`, if given.

    Weights, optimizer, scheduler and random state are those of the checkpoint. With the data at `consumed` the next
    step is the one that the uninterrupted run would have made.

    Args:
        config: of the run.
        model: built as configured; its state is replaced.
        run: the run that goes on, or begins.
        accumulation: backward passes of one step, where the loop keeps no `step` in its state.

    Raises:
        CheckpointError: there is no such checkpoint, or it was made with another `gradient_accumulation_steps`.
    """
    if config.resume_from is None:
        return Resumed()
    checkpoint = find_checkpoint(config.resume_from)
    progress = model.resume_from_checkpoint(str(checkpoint))
    size = progress["gradient_accumulation_steps"]
    if size != accumulation:
        raise CheckpointError(
            f"{checkpoint} was made with gradient_accumulation_steps {size}, "
            f"but {accumulation} is configured; use {size} again"
        )
    state = loop_state(checkpoint)
    done = state.get("step", -(-progress["cur_step"] // size))
    earlier = run_folder_of(checkpoint) or run.folder
    history = History.read(earlier / "metrics.jsonl", done)
    return Resumed(done, history, progress["consumed_train_samples"], state)


def loop_state(checkpoint: Path) -> Mapping[str, Any]:
    """Return what a loop kept in a checkpoint; nothing where it kept nothing.

    Raises:
        CheckpointError: the file that holds it is damaged.
    """
    file = checkpoint / "trainer_state.json"
    try:
        state = json.loads(file.read_text(encoding="utf-8")).get("loop", {})
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); the checkpoint is damaged") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{file}: loop is {state!r:.60}, not a mapping; the checkpoint is damaged")
    return state


def score_of(history: History, best: Path | None, name: str = "eval/loss", *, highest: bool = False) -> float:
    """Return the score of the checkpoint that `best` names; infinity where nothing is known.

    Args:
        history: of the run.
        best: the checkpoint.
        name: of the number that decides.
        highest: whether the highest is the best, so that the score is its negative.
    """
    scores = {f"step-{step}": value for step, value in zip(*history.series(name), strict=True)}
    score = scores.get(best.name, math.inf) if best is not None else math.inf
    return -score if highest and math.isfinite(score) else score


def write_config(config: RunConfig, folder: Path) -> None:
    """Write the whole effective configuration to `folder/config.yaml`.

    `resume_from` is left out: the file describes the whole run, however often it was cut off.
    """
    values = config.model_dump(mode="json", exclude={"resume_from"})
    write_text(folder / "config.yaml", yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


@contextmanager
def say_how_to_resume(show: Display, folder: Path, recipe: str) -> Iterator[None]:
    """After Ctrl-C within the block, tell where the last checkpoint is and which command continues from it."""
    try:
        yield
    except KeyboardInterrupt:
        checkpoint = Checkpoints(folder / "checkpoints").path("last")
        if checkpoint is None:
            show.say("interrupted before the first checkpoint; nothing to continue from")
        else:
            show.say(f"interrupted; checkpoint: {checkpoint}")
            show.say(f"continue with: {resume_command(folder, recipe)}")
        raise


def resume_command(folder: Path, recipe: str) -> str:
    """Return the command that continues the run in `folder`, as it works from here."""
    processes = Platform.get_world_size()
    several = ["--nproc", str(processes)] if processes > 1 else []
    return shlex.join([*twinkle_command(), "run", recipe, *several, "--resume_from", str(folder)])
