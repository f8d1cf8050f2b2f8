"""What may differ from the configuration of a checkpoint: nothing that would be ignored, or make two runs of one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from twinkle.errors import ConfigError
from twinkle.run import recipe_of
from twinkle_recipes.config.parts import RunConfig
from twinkle_recipes.run.checkpoints import find_checkpoint, run_folder_of

Config = TypeVar("Config", bound=RunConfig)


def whole_run(config: Config) -> Config:
    """Return the configuration of the whole run, of which `config` may make a part.

    It is `config` itself, but for the `max_steps` of a run that goes on in its folder: a smaller one stops earlier this
    time and shortens neither the run nor the schedule of its learning rate.

    Raises:
        CheckpointError: `resume_from` is no checkpoint.
        ConfigError: `config` differs from that of the run in the folder, or, where only a checkpoint is given, in what
            the checkpoint holds; or the folder does not say how its run was configured.
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
    kept = {key: pair for key, pair in changed.items() if key.partition(".")[0] in config.kept_in_checkpoints}
    if config.run_folder is None:
        if kept:
            raise ConfigError(_message(f"a run that starts from {checkpoint} takes these keys from it", kept, folder))
        return config
    if changed:
        advice = "" if kept else f", or start afresh from the checkpoint: --resume_from {checkpoint}"
        raise ConfigError(_message(f"the run in {folder} can only go on as it began", changed, folder) + advice)
    return config.model_copy(update={"max_steps": earlier.max_steps})


def _check_recipe(config: RunConfig, folder: Path, checkpoint: Path) -> None:
    """Refuse the run of another recipe.

    Raises:
        ConfigError: says with what this one can begin.
    """
    recipe = recipe_of(folder)
    if recipe not in (None, config.recipe):
        raise ConfigError(
            f"the run in {folder} is one of {recipe!r}, and {config.recipe!r} cannot go on in it or from its "
            f"checkpoint {checkpoint.name}; begin with its result: --lora.init_from {folder / 'adapter'}, or, where "
            f"all parameters were trained, --model.id {folder / 'model'}"
        )


def _message(reason: str, changed: dict[str, list[Any]], folder: Path) -> str:
    file = folder / "config.yaml"
    lines = [f"{key}: {_text(old)} in {file}, {_text(new)} now" for key, (old, new) in changed.items()]
    return "\n  ".join([f"{reason}, but {len(changed)} differ:", *lines, "leave them as they were"]) + (
        ", or begin a new run without resume_from"
    )


def _stops_earlier(old: int | None, new: int | None) -> bool:
    return new is not None and (old is None or new < old)


def _differences(old: BaseModel, new: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, old value, new value) of everything that differs."""
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
            f"{file} cannot be read, so nobody knows how the run in {folder} began ({error}); restore it, "
            f"or start afresh from the checkpoint: --resume_from {checkpoint}"
        ) from error
