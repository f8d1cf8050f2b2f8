"""The checkpoints of a run: saving and removing them, resuming from one, and checks of the resumed configuration."""

import json
import math
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from twinkle.command import twinkle_command
from twinkle.errors import CheckpointError, ConfigError
from twinkle.paths import recovered, write_text
from twinkle.platform import Platform
from twinkle.run import Run, recipe_of
from twinkle_recipes.config import RunConfig
from twinkle_recipes.display import Display
from twinkle_recipes.history import History

_STEP = re.compile(r"step-(\d+)")
_SHOWN = 5


class Checkpoints:
    """Saves checkpoints, updates the pointers `last` and `best`, and removes old checkpoints.

    `best` and `last` are text files with the name of a checkpoint folder. They are replaced atomically, after the
    folder is complete, so that they never name a partial checkpoint.

    Args:
        folder: `checkpoints` of the run; created with the first checkpoint.
        limit: number of recent checkpoints to keep; None keeps all. `best` and `last` are always kept.
        best_score: the lowest evaluation loss so far, for a resumed run.
        writes: whether this process updates pointers and removes checkpoints: the first rank.
    """

    def __init__(
        self, folder: Path, limit: int | None = None, best_score: float = math.inf, *, writes: bool = True
    ) -> None:
        self.folder = folder
        self.limit = limit
        self.best_score = best_score
        self._writes = writes

    def is_best(self, score: float | None) -> bool:
        """Return whether `score` is lower than all previous ones; False for a missing or non-finite score."""
        return score is not None and math.isfinite(score) and score < self.best_score

    def save(self, step: int, score: float | None, write: Callable[..., Any]) -> Path:
        """Save step `step`, point `last` (and, with a new lowest score, `best`) to it, and remove old ones.

        Args:
            step: number of the optimizer step.
            score: evaluation loss of this step; None if it was not evaluated.
            write: `model.save` with everything but `name` and `output_dir` bound.
        """
        path = self.folder / f"step-{step}"
        write(name=path.name, output_dir=str(self.folder))
        self._point("last", path)
        if score is not None and self.is_best(score):
            self.best_score = score
            self._point("best", path)
        self._forget_old()
        return path

    def path(self, pointer: str) -> Path | None:
        """Return the folder that `best` or `last` names, or None if there is no such pointer yet."""
        file = self.folder / pointer
        return self.folder / file.read_text(encoding="utf-8").strip() if file.is_file() else None

    def _point(self, pointer: str, path: Path) -> None:
        if self._writes:
            write_text(self.folder / pointer, path.name + "\n")

    def _forget_old(self) -> None:
        if self.limit is None or not self._writes:
            return
        spared = {self.path("best"), self.path("last")}
        numbered = [(int(match[1]), path) for path in self.folder.iterdir() if (match := _STEP.fullmatch(path.name))]
        for _, path in sorted(numbered)[: -self.limit]:
            if path not in spared:
                shutil.rmtree(path)


def find_checkpoint(place: str) -> Path:
    """Return the checkpoint of `resume_from`: a checkpoint, a pointer file, or a run folder (its last one).

    Raises:
        CheckpointError: there is none.
    """
    path = Path(place)
    if not recovered(path).exists():
        raise CheckpointError(f"cannot resume from {place}: there is no such folder; {_runs_near(path)}")
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints" / "last"
    if path.is_file() and path.name in ("best", "last"):
        path = path.parent / path.read_text(encoding="utf-8").strip()
    path = recovered(path)
    if not (path / "trainer_state.json").is_file():
        raise CheckpointError(
            f"cannot resume from {place}: {path} is not a checkpoint with optimizer state (no trainer_state.json); "
            "use a run folder that has checkpoints/, or one of its checkpoints/step-N"
        )
    return path


def _runs_near(path: Path) -> str:
    """Return folders to suggest in an error: the siblings of the path, else the runs of this folder."""
    folder = next((f for f in (path.parent, Path("runs")) if f != Path() and f.is_dir()), None)
    if folder is None:
        return "use a run folder (by default below runs/), or one of its checkpoints/step-N"
    runs = [entry for entry in folder.iterdir() if entry.is_dir() and any(map(_is_seen, entry.iterdir()))]
    newest = sorted(runs, key=lambda f: f.stat().st_mtime)[::-1]
    names = ", ".join(entry.name for entry in newest[:_SHOWN]) or "no folder"
    return f"{folder}/ has {names}" + (f" and {len(newest) - _SHOWN} older ones" if len(newest) > _SHOWN else "")


def _is_seen(path: Path) -> bool:
    """Return whether a file belongs to a run; a new run folder has only a hidden lock."""
    return not path.name.startswith(".")


def run_folder_of(checkpoint: Path) -> Path | None:
    """Return the run folder of a checkpoint, or None if it is not in one."""
    checkpoints = checkpoint.resolve().parent
    return checkpoints.parent if checkpoints.name == "checkpoints" else None


@dataclass(frozen=True)
class Resumed:
    """The progress of a run before its next step; the defaults are those of a new run.

    Attributes:
        done: number of completed steps.
        history: the metrics of these steps.
        consumed: number of rows that they consumed.
        state: state of the loop in the checkpoint (`loop_state` of `model.save`).
    """

    done: int = 0
    history: History = field(default_factory=History)
    consumed: int = 0
    state: Mapping[str, Any] = field(default_factory=dict)


def resume(config: RunConfig, model: Any, run: Run, accumulation: int = 1) -> Resumed:
    """Resume from `config.resume_from`, if set.

    Restores weights, optimizer, scheduler and random state. With the data at `consumed`, the next step is the one of
    the uninterrupted run.

    Args:
        config: configuration of the run.
        model: the configured model, whose state is replaced.
        run: the new or resumed run.
        accumulation: backward passes of one step, if the loop's state has no `step`.

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
    """Return the state of a loop in a checkpoint; empty if it saved none.

    Raises:
        CheckpointError: its file is damaged.
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
    """Return the score of the `best` checkpoint; infinity if unknown.

    Args:
        history: metrics of the run.
        best: the checkpoint.
        name: name of the deciding metric.
        highest: whether the highest value is the best, so that the score is its negative.
    """
    scores = {f"step-{step}": value for step, value in zip(*history.series(name), strict=True)}
    score = scores.get(best.name, math.inf) if best is not None else math.inf
    return -score if highest and math.isfinite(score) else score


def write_config(config: RunConfig, folder: Path) -> None:
    """Write the whole effective configuration to `folder/config.yaml`.

    `resume_from` is omitted: the file describes the whole run, independent of interruptions.
    """
    values = config.model_dump(mode="json", exclude={"resume_from"})
    write_text(folder / "config.yaml", yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


@contextmanager
def show_how_to_resume(show: Display, folder: Path, recipe: str) -> Iterator[None]:
    """After Ctrl-C within the block, print the last checkpoint and the command that resumes from it."""
    try:
        yield
    except KeyboardInterrupt:
        checkpoint = Checkpoints(folder / "checkpoints").path("last")
        if checkpoint is None:
            show.say("interrupted before the first checkpoint; nothing to resume from")
        else:
            show.say(f"interrupted; checkpoint: {checkpoint}")
            show.say(f"continue with: {resume_command(folder, recipe)}")
        raise


def resume_command(folder: Path, recipe: str) -> str:
    """Return the command that resumes the run in `folder` from the working directory."""
    processes = Platform.get_world_size()
    several = ["--nproc", str(processes)] if processes > 1 else []
    return shlex.join([*twinkle_command(), "run", recipe, *several, "--resume_from", str(folder)])


Config = TypeVar("Config", bound=RunConfig)


def whole_run(config: Config) -> Config:
    """Return the configuration of the whole run, of which `config` may cover a part.

    It equals `config`, except for `max_steps` of a run that is resumed in its folder: a smaller value stops this part
    earlier, without shortening the run or its learning-rate schedule.

    Raises:
        CheckpointError: `resume_from` is not a checkpoint.
        ConfigError: `config` differs from that of the run in the folder or, for a checkpoint, in keys that the
            checkpoint determines; or the folder has no configuration.
    """
    if config.resume_from is None:
        return config
    checkpoint = find_checkpoint(config.resume_from)
    folder = config.run_folder or run_folder_of(checkpoint)
    if folder is None or (config.run_folder is None and not (folder / "config.yaml").is_file()):
        return config
    _check_recipe(config, folder, checkpoint)
    earlier = _read(type(config), folder, checkpoint)
    changed = {key: pair for key, *pair in _differences(earlier, config) if key.partition(".")[0] not in config.free}
    if "max_steps" in changed and _stops_earlier(*changed["max_steps"]):
        del changed["max_steps"]
    fixed = {key: pair for key, pair in changed.items() if key.partition(".")[0] in config.kept_in_checkpoints}
    if config.run_folder is None:
        if fixed:
            raise ConfigError(_message(f"a run that starts from {checkpoint} takes these keys from it", fixed, folder))
        return config
    if changed:
        advice = "" if fixed else f", or start a new run from the checkpoint: --resume_from {checkpoint}"
        raise ConfigError(
            _message(f"the run in {folder} must be resumed with its configuration", changed, folder) + advice
        )
    return config.model_copy(update={"max_steps": earlier.max_steps})


def _check_recipe(config: RunConfig, folder: Path, checkpoint: Path) -> None:
    """Refuse the run of another recipe.

    Raises:
        ConfigError: the run is of another recipe; the text explains how to use its result.
    """
    recipe = recipe_of(folder)
    if recipe not in (None, config.recipe):
        raise ConfigError(
            f"the run in {folder} is of the recipe {recipe!r}; {config.recipe!r} cannot resume it or its "
            f"checkpoint {checkpoint.name}; start from its result: --lora.init_from {folder / 'adapter'}, or, if "
            f"all parameters were trained, --model.id {folder / 'model'}"
        )


def _message(reason: str, changed: dict[str, list[Any]], folder: Path) -> str:
    file = folder / "config.yaml"
    lines = [f"{key}: {_text(old)} in {file}, {_text(new)} now" for key, (old, new) in changed.items()]
    return "\n  ".join([f"{reason}, but {len(changed)} differ:", *lines, "restore them"]) + (
        ", or start a new run without resume_from"
    )


def _stops_earlier(old: int | None, new: int | None) -> bool:
    return new is not None and (old is None or new < old)


def _differences(old: BaseModel, new: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, old value, new value) of all differences."""
    for name in type(new).model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(before, BaseModel) and isinstance(after, BaseModel):
            yield from _differences(before, after, f"{prefix}{name}.")
        elif before != after:
            yield prefix + name, before, after


def _text(value: Any) -> str:
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    return json.dumps(plain, ensure_ascii=False, default=str)


def _read(model: type[Config], folder: Path, checkpoint: Path) -> Config:
    file = folder / "config.yaml"
    try:
        return model.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        raise ConfigError(
            f"{file} cannot be read, so the configuration of the run in {folder} is unknown ({error}); restore it, "
            f"or start a new run from the checkpoint: --resume_from {checkpoint}"
        ) from error
