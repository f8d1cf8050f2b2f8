"""Resolves names of arguments: `training.max_steps`, `max_steps`, `lr`; case is ignored, and `-` equals `_`."""

import typing
from collections.abc import Iterator
from dataclasses import Field, fields
from functools import lru_cache
from typing import Any

from twinkle_cli.arguments import groups
from twinkle_cli.configuration import Option

EXTRA = "extra"
USE_MEGATRON = ("model", "use_megatron")
GROUPS: dict[str, type] = {
    "model": groups.ModelArgs,
    "lora": groups.LoraArgs,
    "dataset": groups.DatasetArgs,
    "template": groups.TemplateArgs,
    "training": groups.TrainingArgs,
    "optimizer": groups.OptimizerArgs,
    "scheduler": groups.SchedulerArgs,
    "loss": groups.LossArgs,
    "sampler": groups.SamplerArgs,
    "sampling": groups.SamplingArgs,
    "infra": groups.InfraArgs,
    "server": groups.ServerArgs,
    "rl": groups.RLArgs,
    "checkpoint": groups.CheckpointArgs,
}


def normal(name: str) -> str:
    """Return `training.max_steps` for `Training.max-steps`."""
    return name.lower().replace("-", "_")


def arguments() -> Iterator[tuple[Option, Field[Any]]]:
    """Yield every argument in the order of the table, with its command-line definition and its field."""
    for group, cls in GROUPS.items():
        hints = typing.get_type_hints(cls)
        for field in fields(cls):
            yield Option((group, field.name), hints[field.name], field.metadata["meaning"], field.default), field


@lru_cache(maxsize=1)
def options() -> dict[str, Option]:
    """Return a map from name to argument: names with a group, unambiguous names without one, and aliases."""
    by_name: dict[str, Option] = {EXTRA: Option((EXTRA,), dict[str, Any], "Additional arguments of the script")}
    megatron = Option(USE_MEGATRON, bool, "Sets `strategy` to `megatron`")
    by_name |= {megatron.name: megatron, "use_megatron": megatron}
    bare: dict[str, list[tuple[Option, Field[Any]]]] = {}
    for option, field in arguments():
        by_name[option.name] = option
        for name in filter(None, (field.name, field.metadata["alias"])):
            by_name.setdefault(f"{option.path[0]}.{name}", option)
            if field.metadata["bare"]:
                bare.setdefault(name, []).append((option, field))
    for name, candidates in bare.items():
        primary = candidates if len(candidates) == 1 else [pair for pair in candidates if pair[1].metadata["primary"]]
        by_name[name] = primary[0][0]
    return by_name


def short_name(option: Option) -> str:
    """Return the shortest name of this argument."""
    bare = option.path[-1]
    candidate = options().get(bare)
    return bare if candidate is not None and candidate.path == option.path else option.name
