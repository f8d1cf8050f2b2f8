"""Training state beside the weights: optimizer in safetensors by parameter name, scheduler, counters, random state."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from twinkle.errors import CheckpointError
from twinkle_transformers import plain
from twinkle_transformers.group import OptimizerGroup
from twinkle_transformers.random_state import RandomState, read_random, write_random
from twinkle_transformers.reading import read_json, read_tensors

VERSION = 1
STATE = "trainer_state.json"
OPTIMIZER = "optimizer.safetensors"
GRADIENTS = "gradients.safetensors"
_COUNTERS = ("cur_step", "updates", "scheduled", "gradient_accumulation_steps", "consumed_train_samples")

Names = Mapping[str, torch.nn.Parameter]


def write_state(
    folder: Path,
    group: OptimizerGroup,
    names: Names,
    *,
    rank: int,
    consumed_train_samples: int,
    optimizer: bool,
) -> None:
    """Write what training needs to go on, beside the weights.

    Args:
        folder: an existing folder.
        group: whose state.
        names: the trained parameters by saved name.
        rank: the process whose random state is written.
        consumed_train_samples: how far the data has been read.
        optimizer: also write optimizer, scheduler, random state and gradients of an unfinished accumulation.
    """
    state: dict[str, Any] = {
        "checkpoint_version": VERSION,
        "adapter_name": group.adapter_name,
        "cur_step": group.cur_step,
        "updates": group.updates,
        "scheduled": group.scheduled,
        "gradient_accumulation_steps": group.gradient_accumulation_steps,
        "consumed_train_samples": consumed_train_samples,
    }
    if optimizer and group.optimizer is not None:
        tensors, state["optimizer"] = _pack_optimizer(group.optimizer, names)
        save_file(tensors, folder / OPTIMIZER)
        if (scheduler := group.lr_scheduler) is not None:
            name = type(scheduler).__name__
            state["scheduler"] = {"class": name, "state": plain.encode(scheduler.state_dict(), name)}
        if group.pending and not group.stepped:
            pending = ("pending", "denominator", "divided", "dropped")
            state["accumulation"] = {field: getattr(group, field) for field in pending}
            grads = {name: p.grad.contiguous() for name, p in names.items() if p.grad is not None}
            save_file(grads, folder / GRADIENTS)
        write_random(folder, rank)
    (folder / STATE).write_text(json.dumps(state, indent=2) + "\n", "utf-8")


def read_state(folder: Path) -> dict[str, Any]:
    """Return `trainer_state.json` of a checkpoint.

    Raises:
        CheckpointError: the folder or the file is missing, damaged, or of another version.
    """
    path = folder / STATE
    if not path.is_file():
        raise CheckpointError(
            f"{folder} cannot be resumed: {STATE} is missing"
            + ("" if folder.is_dir() else " (no such folder)")
            + "; save with save_optimizer=True, or load the weights alone with load()"
        )
    state = read_json(path)
    if state.get("checkpoint_version") != VERSION:
        raise CheckpointError(f"{path}: checkpoint_version {state.get('checkpoint_version')!r}; this is {VERSION}")
    if wrong := [name for name in _COUNTERS if type(state.get(name)) is not int]:
        raise CheckpointError(f"{path}: {wrong[0]} is {state.get(wrong[0])!r}, not a whole number; it is damaged")
    return state


@dataclass(frozen=True, slots=True)
class Training:
    """Training state that was read and compared, not yet in force."""

    tensors: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any] | None
    accumulation: dict[str, Any]
    gradients: dict[str, torch.Tensor]
    random: RandomState

    def apply(self, group: OptimizerGroup, names: Names) -> None:
        """Make it the state of `group`, whose pending gradients are gone already."""
        _unpack_optimizer(group.optimizer, self.optimizer, self.tensors, names)
        if self.scheduler is not None:
            group.lr_scheduler.load_state_dict(self.scheduler)
        for field, value in self.accumulation.items():
            setattr(group, field, value)
        for name, grad in self.gradients.items():
            names[name].grad = grad.to(names[name].device)
        self.random.apply()


def read_training(folder: Path, state: Mapping[str, Any], group: OptimizerGroup, names: Names, rank: int) -> Training:
    """Read optimizer, scheduler, pending gradients and random state, and compare them with `group`.

    Raises:
        CheckpointError: the checkpoint has none, is damaged, or is for another optimizer, scheduler or parameters.
    """
    saved = state.get("optimizer")
    if saved is None:
        raise CheckpointError(
            f"{folder} has weights but no optimizer state; resume with resume_only_model=True, or from a checkpoint "
            "saved with save_optimizer=True"
        )
    _compare_optimizers(folder, saved, group.optimizer, names)
    _compare_schedulers(folder, state.get("scheduler"), group.lr_scheduler)
    accumulation = state.get("accumulation", {})
    gradients = read_tensors(folder / GRADIENTS) if accumulation else {}
    if odd := sorted(gradients.keys() - names.keys()):
        raise CheckpointError(f"{folder / GRADIENTS} holds a gradient of {odd[0]}, which the model does not train")
    return Training(
        tensors=read_tensors(folder / OPTIMIZER),
        optimizer=saved,
        scheduler=plain.decode(state["scheduler"]["state"]) if "scheduler" in state else None,
        accumulation=accumulation,
        gradients=gradients,
        random=read_random(folder, rank),
    )


def _compare_optimizers(folder: Path, saved: Mapping[str, Any], optimizer: Any, names: Names) -> None:
    have = None if optimizer is None else type(optimizer).__name__
    if have != saved["class"]:
        raise CheckpointError(
            f"{folder} holds the state of {saved['class']}, the model has {have or 'no optimizer'}; "
            f"call set_optimizer({saved['class']!r}, ...) before resuming"
        )
    name_of = {id(parameter): name for name, parameter in names.items()}
    mine = [[name_of.get(id(p), "?") for p in group["params"]] for group in optimizer.param_groups]
    stored = [group["params"] for group in saved["groups"]]
    own, theirs = ({name for group in groups for name in group} for groups in (mine, stored))
    if odd := sorted(own ^ theirs):
        where = "checkpoint" if odd[0] in theirs else "model"
        raise CheckpointError(
            f"{folder}: its optimizer is for other parameters; {odd[0]} is only in the {where} ({len(odd)} such names)"
        )
    if len(mine) != len(stored):
        raise CheckpointError(
            f"{folder}: its optimizer has {len(stored)} groups of parameters, this one has {len(mine)}"
        )


def _compare_schedulers(folder: Path, saved: Mapping[str, Any] | None, scheduler: Any) -> None:
    have = None if scheduler is None else type(scheduler).__name__
    theirs = None if saved is None else saved["class"]
    if have != theirs:
        do = f"call set_lr_scheduler({theirs!r}, ...)" if theirs else "set none"
        raise CheckpointError(
            f"{folder} was saved with {theirs or 'no scheduler'}, the model has {have or 'none'}; {do} before resuming"
        )


def _pack_optimizer(optimizer: torch.optim.Optimizer, names: Names) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    name_of = {id(parameter): name for name, parameter in names.items()}
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = name_of[id(parameter)]
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{key}/{name}"] = value.detach().contiguous()
            else:
                values.setdefault(name, {})[key] = value
    groups = [
        {key: plain.encode(value, type(optimizer).__name__) for key, value in group.items() if key != "params"}
        | {"params": [name_of[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "values": values}


def _unpack_optimizer(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], names: Names
) -> None:
    optimizer.state.clear()
    for key, tensor in tensors.items():
        field, _, name = key.partition("/")
        parameter = names[name]
        device = parameter.device if tensor.shape == parameter.shape else tensor.device
        optimizer.state.setdefault(parameter, {})[field] = tensor.to(device)
    for name, values in saved["values"].items():
        optimizer.state.setdefault(names[name], {}).update(values)
    for group, stored in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in stored.items():
            if key == "params":
                group[key] = [names[name] for name in value]
            else:
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
