"""Checkpoints: standard weight folders, optimizer state in safetensors, counters and random state beside them."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from twinkle.errors import CheckpointError
from twinkle_transformers.group import OptimizerGroup

VERSION = 1
STATE = "trainer_state.json"
OPTIMIZER = "optimizer.safetensors"
GRADIENTS = "gradients.safetensors"
RANDOM = "rng_state_{rank}"


def write_state(
    folder: Path,
    group: OptimizerGroup,
    names: Mapping[str, torch.nn.Parameter],
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
        "gradient_accumulation_steps": group.gradient_accumulation_steps,
        "consumed_train_samples": consumed_train_samples,
    }
    if optimizer and group.optimizer is not None:
        tensors, state["optimizer"] = _pack_optimizer(group.optimizer, names)
        save_file(tensors, folder / OPTIMIZER)
        if group.lr_scheduler is not None:
            state["scheduler"] = _plain(group.lr_scheduler)
        if group.pending:
            state |= {"pending": group.pending, "denominator": group.denominator}
            grads = {name: p.grad.contiguous() for name, p in names.items() if p.grad is not None}
            save_file(grads, folder / GRADIENTS)
        _write_random(folder, rank)
    (folder / STATE).write_text(json.dumps(state, indent=2) + "\n", "utf-8")


def read_state(folder: Path) -> dict[str, Any]:
    """Return `trainer_state.json` of a checkpoint.

    Raises:
        CheckpointError: the folder or the file is missing, or of another version.
    """
    path = folder / STATE
    if not path.is_file():
        raise CheckpointError(
            f"{folder} cannot be resumed: {STATE} is missing"
            + ("" if folder.is_dir() else " (no such folder)")
            + "; save with save_optimizer=True, or load the weights alone with load()"
        )
    try:
        state: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); the checkpoint is incomplete") from error
    if state.get("checkpoint_version") != VERSION:
        raise CheckpointError(
            f"{path}: checkpoint_version {state.get('checkpoint_version')!r}; this is version {VERSION}"
        )
    return state


def read_optimizer(
    folder: Path, state: Mapping[str, Any], group: OptimizerGroup, names: Mapping[str, torch.nn.Parameter], rank: int
) -> None:
    """Restore optimizer, scheduler, pending gradients and random state.

    Raises:
        CheckpointError: the checkpoint has none, or for another optimizer or other parameters.
    """
    saved = state.get("optimizer")
    if saved is None or not (folder / OPTIMIZER).is_file():
        raise CheckpointError(
            f"{folder} has weights but no optimizer state; resume with resume_only_model=True, or from a checkpoint "
            "saved with save_optimizer=True"
        )
    have = None if group.optimizer is None else type(group.optimizer).__name__
    if have != saved["class"]:
        raise CheckpointError(
            f"{folder} holds the state of {saved['class']}, the model has {have or 'no optimizer'}; "
            f"call set_optimizer({saved['class']!r}, ...) before resuming"
        )
    _unpack_optimizer(folder, saved, group.optimizer, names)
    if "scheduler" in state:
        if group.lr_scheduler is None or type(group.lr_scheduler).__name__ != state["scheduler"]["class"]:
            raise CheckpointError(
                f"{folder} holds the state of the scheduler {state['scheduler']['class']}; "
                "call set_lr_scheduler with it before resuming"
            )
        group.lr_scheduler.load_state_dict(state["scheduler"]["state"])
    if state.get("pending"):
        group.pending, group.denominator = state["pending"], state["denominator"]
        for name, grad in load_file(folder / GRADIENTS).items():
            names[name].grad = grad.to(names[name].device)
    _read_random(folder, rank)


def _pack_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[str, torch.nn.Parameter]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
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
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [name_of[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "values": values}


def _unpack_optimizer(
    folder: Path,
    saved: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    names: Mapping[str, torch.nn.Parameter],
) -> None:
    stored = {name for group in saved["groups"] for name in group["params"]}
    if odd := sorted(stored ^ set(names)):
        where = "checkpoint" if odd[0] in stored else "model"
        raise CheckpointError(
            f"{folder}: its optimizer is for other parameters; {odd[0]} is only in the {where} ({len(odd)} such names)"
        )
    if len(saved["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{folder}: its optimizer has {len(saved['groups'])} groups of parameters, "
            f"this one {len(optimizer.param_groups)}"
        )
    optimizer.state.clear()
    for key, tensor in load_file(folder / OPTIMIZER).items():
        field, _, name = key.partition("/")
        parameter = names[name]
        device = parameter.device if tensor.shape == parameter.shape else tensor.device
        optimizer.state.setdefault(parameter, {})[field] = tensor.to(device)
    for name, values in saved["values"].items():
        optimizer.state.setdefault(names[name], {}).update(values)
    for group, stored_group in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in stored_group.items():
            group[key] = [names[n] for n in value] if key == "params" else _like(group.get(key), value)


def _like(old: Any, new: Any) -> Any:
    return tuple(new) if isinstance(old, tuple) else new


def _plain(scheduler: Any) -> dict[str, Any]:
    state = scheduler.state_dict()
    try:
        return {"class": type(scheduler).__name__, "state": json.loads(json.dumps(state))}
    except TypeError as error:
        raise CheckpointError(
            f"the state of {type(scheduler).__name__} holds something that is not a number or text ({error}); "
            "save with save_optimizer=False, or use a scheduler with plain state"
        ) from error


def _write_random(folder: Path, rank: int) -> None:
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    name, keys, *rest = np.random.get_state()
    tensors["numpy"] = torch.from_numpy(np.asarray(keys).astype(np.int64))
    version, internal, gauss = random.getstate()
    tensors["python"] = torch.tensor(internal, dtype=torch.int64)
    base = RANDOM.format(rank=rank)
    save_file(tensors, folder / f"{base}.safetensors")
    extra = {"numpy": [name, *rest], "python": [version, gauss]}
    (folder / f"{base}.json").write_text(json.dumps(extra) + "\n", "utf-8")


def _read_random(folder: Path, rank: int) -> None:
    base = RANDOM.format(rank=rank)
    path = folder / f"{base}.safetensors"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint was made with fewer processes than rank {rank} needs")
    tensors, extra = load_file(path), json.loads((folder / f"{base}.json").read_text("utf-8"))
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    name, *rest = extra["numpy"]
    np.random.set_state((name, tensors["numpy"].numpy().astype(np.uint32), *rest))
    version, gauss = extra["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
