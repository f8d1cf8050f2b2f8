"""Training state beside the weights: optimizer, scheduler, counters and random state, in safetensors and JSON."""

import copy
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from twinkle.errors import CheckpointError
from twinkle.logging import get_logger
from twinkle.mesh.ranks import Ranks
from twinkle_transformers.group import OptimizerGroup
from twinkle_transformers.parallel import Replicated, local, placed_like, whole


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, on the CPU."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; the checkpoint is incomplete") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); the file is truncated or corrupt") from error
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; the checkpoint is incomplete") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); the checkpoint is incomplete") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} holds a {type(document).__name__}, not an object; the checkpoint is damaged")
    return document


_PAIRS, _COUNTER = "__pairs__", "__counter__"


def encode_state(value: Any, where: str) -> Any:
    """Return `value` as JSON data; mappings with keys other than text become marked lists of pairs.

    Raises:
        CheckpointError: it contains anything but numbers, text, lists and mappings.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [encode_state(item, where) for item in value]
    if isinstance(value, Counter):
        return {_COUNTER: [[encode_state(k, where), v] for k, v in value.items()]}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: encode_state(item, where) for key, item in value.items()}
        return {_PAIRS: [[encode_state(k, where), encode_state(v, where)] for k, v in value.items()]}
    raise CheckpointError(
        f"cannot save the state of {where}: it contains a {type(value).__name__}; save with "
        "save_optimizer=False, or use a scheduler whose state is numbers"
    )


def decode_state(value: Any) -> Any:
    """Undo `encode_state`, except that tuples stay lists."""
    if isinstance(value, list):
        return [decode_state(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_COUNTER}:
            return Counter({k: v for k, v in value[_COUNTER]})
        if value.keys() == {_PAIRS}:
            return {decode_state(k): decode_state(v) for k, v in value[_PAIRS]}
        return {key: decode_state(item) for key, item in value.items()}
    return value


_NAME = "rng_state_{rank}"


@dataclass(frozen=True, slots=True)
class RandomState:
    """Random state that was read, but not applied."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None
    numpy: tuple[Any, ...]
    python: tuple[Any, ...]

    def apply(self) -> None:
        """Set the random state of this process."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


def capture_random() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return this process's random state, as tensors and as plain values."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    name, keys, *rest = np.random.get_state()
    tensors["numpy"] = torch.from_numpy(np.asarray(keys).astype(np.int64))
    version, internal, gauss = random.getstate()
    tensors["python"] = torch.tensor(internal, dtype=torch.int64)
    return tensors, {"numpy": [name, *rest], "python": [version, gauss]}


def write_random(folder: Path, rank: int, captured: tuple[dict[str, torch.Tensor], dict[str, Any]]) -> None:
    """Write the random state that `capture_random` returned on a rank."""
    base = _NAME.format(rank=rank)
    save_file(captured[0], folder / f"{base}.safetensors")
    (folder / f"{base}.json").write_text(json.dumps(captured[1]) + "\n", "utf-8")


def fresh_random(seed: int) -> RandomState:
    """Return the state after seeding every generator with `seed`, without changing this process's."""
    generator = torch.Generator().manual_seed(seed)
    return RandomState(
        cpu=generator.get_state(),
        cuda=torch.Generator("cuda").manual_seed(seed).get_state() if torch.cuda.is_available() else None,
        numpy=tuple(np.random.RandomState(seed % 2**32).get_state(legacy=True)),
        python=random.Random(seed).getstate(),
    )


def read_random(folder: Path, rank: int) -> RandomState:
    """Read a process's random state.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    base = _NAME.format(rank=rank)
    tensors, extra = read_tensors(folder / f"{base}.safetensors"), read_json(folder / f"{base}.json")
    try:
        name, *rest = extra["numpy"]
        version, gauss = extra["python"]
        return RandomState(
            cpu=tensors["torch"],
            cuda=tensors.get("cuda"),
            numpy=(name, tensors["numpy"].numpy().astype(np.uint32), *rest),
            python=(version, tuple(tensors["python"].tolist()), gauss),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / base}.*: not a random state ({error}); the checkpoint is damaged") from error


VERSION = 1
STATE = "trainer_state.json"
OPTIMIZER = "optimizer.safetensors"
GRADIENTS = "gradients.safetensors"
_COUNTERS = ("cur_step", "updates", "scheduled", "gradient_accumulation_steps", "consumed_train_samples")

Names = Mapping[str, torch.nn.Parameter]


@dataclass(frozen=True, slots=True)
class TrainingSnapshot:
    """The contents of a checkpoint beside the weights, gathered from all ranks; only the first rank has the tensors."""

    state: dict[str, Any]
    optimizer: dict[str, torch.Tensor] | None = None
    gradients: dict[str, torch.Tensor] | None = None
    random: Sequence[tuple[dict[str, torch.Tensor], dict[str, Any]]] = ()

    def write(self, folder: Path) -> None:
        """Write the files into an existing folder."""
        if self.optimizer is not None:
            save_file(self.optimizer, folder / OPTIMIZER)
        if self.gradients is not None:
            save_file(self.gradients, folder / GRADIENTS)
        for rank, captured in enumerate(self.random):
            write_random(folder, rank, captured)
        (folder / STATE).write_text(json.dumps(self.state, indent=2) + "\n", "utf-8")


def take_snapshot(
    group: OptimizerGroup, names: Names, parallel: Replicated, *, consumed_train_samples: int, optimizer: bool
) -> TrainingSnapshot:
    """Gather the state that training needs to continue; collective.

    Args:
        group: training state of the adapter.
        names: the trained parameters by saved name.
        parallel: how the parameters are distributed over ranks.
        consumed_train_samples: number of samples that were consumed.
        optimizer: also gather optimizer, scheduler, random state and gradients of an unfinished accumulation.
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
    if group.seed is not None:
        state["seed"] = group.seed
    if not optimizer or group.optimizer is None:
        return TrainingSnapshot(state)
    keep = parallel.ranks.is_first
    tensors, state["optimizer"] = pack_optimizer(group.optimizer, names)
    packed = gathered(tensors, keep)
    if (scheduler := group.lr_scheduler) is not None:
        name = type(scheduler).__name__
        state["scheduler"] = {"class": name, "state": encode_state(scheduler.state_dict(), name)}
    if group.loss_scale is not None:
        state["loss_scale"] = group.loss_scale.state_dict()
    gradients = None
    if group.pending and not group.stepped:
        state["accumulation"] = {field: getattr(group, field) for field in ("pending", "divided", "dropped")}
        sums = parallel.ranks.agree("saving an unfinished step", group.denominator, group.loss_sum).sum(0).tolist()
        state["accumulation"]["denominator"], state["accumulation"]["loss_sum"] = sums
        gradients = gathered(parallel.summed_gradients(names, group.divided), keep)
    return TrainingSnapshot(state, packed, gradients, parallel.ranks.gather("random state", capture_random()))


def gathered(tensors: Mapping[str, torch.Tensor], keep: bool) -> dict[str, torch.Tensor]:
    """Return whole tensors on the CPU if `keep` is true, else nothing; collective if they are sharded."""
    kept: dict[str, torch.Tensor] = {}
    seen: dict[Any, torch.Tensor] = {}
    for name, tensor in tensors.items():
        part = local(tensor)
        key = (part.data_ptr(), tensor.shape, part.stride()) if part.numel() else name
        if key not in seen:  # tied weights are gathered once and stay one tensor
            full = whole(tensor)
            seen[key] = full.cpu().contiguous() if keep else full.new_empty(0)
        if keep:
            kept[name] = seen[key]
    return kept


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
        raise CheckpointError(f"{path} is damaged: {wrong[0]} must be an integer, got {state.get(wrong[0])!r}")
    return state


def compare_bases(folder: Path, saved: Mapping[str, str] | None, own: Mapping[str, str]) -> None:
    """Refuse to resume an adapter on another base model; checkpoints of older versions do not contain the base.

    Args:
        folder: folder of the checkpoint.
        saved: `id`, `fingerprint` and `commit` of the base model that the adapter was trained on.
        own: those of the loaded model.

    Raises:
        CheckpointError: the fingerprints differ.
    """
    if saved is None or saved.get("fingerprint") == own["fingerprint"]:
        return
    raise CheckpointError(
        f"cannot resume {folder}: its adapter was trained on {describe_base(saved)}, but the loaded model is "
        f"{describe_base(own)}; load the model that it was trained on, or, to train the adapter on this model, "
        f"start a new run with its weights (--lora.init_from {folder}; in a script: "
        "add_adapter_to_model(name, folder))"
    )


def describe_base(base: Mapping[str, str]) -> str:
    """Return a description of a base model for messages."""
    commit = f", commit {base['commit']}" if base.get("commit") else ""
    return f"{base.get('id')} (fingerprint {base.get('fingerprint')}{commit})"


@dataclass(frozen=True, slots=True)
class SavedTraining:
    """Training state that was read and validated, but not applied."""

    tensors: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any] | None
    accumulation: dict[str, Any]
    gradients: dict[str, torch.Tensor]
    random: RandomState
    loss_scale: dict[str, Any] | None

    def apply(self, group: OptimizerGroup, names: Names, parallel: Replicated) -> None:
        """Set the state of `group`, whose pending gradients were discarded before."""
        unpack_optimizer(group.optimizer, self.optimizer, self.tensors, names)
        if self.scheduler is not None:
            group.lr_scheduler.load_state_dict(self.scheduler)
        for field, value in self.accumulation.items():
            setattr(group, field, value)
        if group.loss_scale is not None and self.loss_scale is not None:
            group.loss_scale.load_state_dict(self.loss_scale)
        if not parallel.ranks.is_first:
            group.denominator = group.loss_sum = 0.0  # the first rank has the sums of all ranks, which the step adds up
        if parallel.in_lockstep or parallel.ranks.is_first or group.divided:
            for name, grad in self.gradients.items():
                names[name].grad = placed_like(grad, names[name])
        self.random.apply()


def read_training(
    folder: Path, state: Mapping[str, Any], group: OptimizerGroup, names: Names, ranks: Ranks
) -> SavedTraining:
    """Read optimizer, scheduler, pending gradients and this rank's random state, and compare them with `group`.

    A rank without a saved random state starts with a fresh one, and logs a warning.

    Raises:
        CheckpointError: the checkpoint has none, is damaged, or is for another optimizer, scheduler or parameters.
    """
    saved = state.get("optimizer")
    if saved is None:
        raise CheckpointError(
            f"{folder} has weights but no optimizer state; resume with resume_only_model=True, or from a checkpoint "
            "saved with save_optimizer=True"
        )
    compare_optimizers(folder, saved, group.optimizer, names)
    compare_schedulers(folder, state.get("scheduler"), group.lr_scheduler)
    if group.loss_scale is not None and state.get("loss_scale") is not None:
        copy.copy(group.loss_scale).load_state_dict(state["loss_scale"])  # raises an error before anything is changed
    accumulation = state.get("accumulation", {})
    gradients = read_tensors(folder / GRADIENTS) if accumulation else {}
    if odd := sorted(gradients.keys() - names.keys()):
        raise CheckpointError(f"{folder / GRADIENTS} contains a gradient of {odd[0]}, which the model does not train")
    return SavedTraining(
        tensors=read_tensors(folder / OPTIMIZER),
        optimizer=saved,
        scheduler=decode_state(state["scheduler"]["state"]) if "scheduler" in state else None,
        accumulation=accumulation,
        gradients=gradients,
        random=_random_of(folder, state, ranks),
        loss_scale=state.get("loss_scale"),
    )


def _random_of(folder: Path, state: Mapping[str, Any], ranks: Ranks) -> RandomState:
    saved = len(list(folder.glob("rng_state_*.safetensors")))
    if saved != ranks.size and ranks.is_first:
        get_logger().warning(
            "%s was saved by %d ranks and goes on with %d: weights and optimizer state are the same, random numbers "
            "(dropout) are others",
            folder, saved, ranks.size,
        )  # fmt: skip
    if 0 < saved <= ranks.index:
        return fresh_random(state["cur_step"] * 1_000_003 + ranks.index)
    return read_random(folder, ranks.index)


def compare_optimizers(folder: Path | str, saved: Mapping[str, Any], optimizer: Any, names: Names) -> None:
    """Refuse packed state of another optimizer; `folder` names its origin.

    Raises:
        CheckpointError: it is of another class, or for other parameters.
    """
    have = None if optimizer is None else type(optimizer).__name__
    if have != saved["class"]:
        raise CheckpointError(
            f"{folder} contains the state of {saved['class']}, the model has {have or 'no optimizer'}; "
            f"call set_optimizer({saved['class']!r}, ...) before resuming"
        )
    name_of = {id(parameter): name for name, parameter in names.items()}
    own_groups = [[name_of.get(id(p), "?") for p in group["params"]] for group in optimizer.param_groups]
    stored = [group["params"] for group in saved["groups"]]
    own, saved_names = ({name for group in groups for name in group} for groups in (own_groups, stored))
    if odd := sorted(own ^ saved_names):
        where = "checkpoint" if odd[0] in saved_names else "model"
        raise CheckpointError(
            f"{folder}: its optimizer is for other parameters; {odd[0]} is only in the {where} ({len(odd)} such names)"
        )
    if len(own_groups) != len(stored):
        raise CheckpointError(
            f"{folder}: its optimizer has {len(stored)} groups of parameters, this one has {len(own_groups)}"
        )


def compare_schedulers(folder: Path | str, saved: Mapping[str, Any] | None, scheduler: Any) -> None:
    """Refuse the state of another scheduler; `folder` names its origin.

    Raises:
        CheckpointError: it is of another class, or only one of both exists.
    """
    have = None if scheduler is None else type(scheduler).__name__
    saved_class = None if saved is None else saved["class"]
    if have != saved_class:
        do = f"call set_lr_scheduler({saved_class!r}, ...)" if saved_class else "set none"
        raise CheckpointError(
            f"{folder} was saved with {saved_class or 'no scheduler'}, the model has {have or 'none'}; {do} before "
            "resuming"
        )


def pack_optimizer(optimizer: torch.optim.Optimizer, names: Names) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return an optimizer's tensors by `field/name`, not copied, and the rest of its state."""
    name_of = {id(parameter): name for name, parameter in names.items()}
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = name_of[id(parameter)]
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{key}/{name}"] = value.detach()
            else:
                values.setdefault(name, {})[key] = value
    groups = [
        {key: encode_state(value, type(optimizer).__name__) for key, value in group.items() if key != "params"}
        | {"params": [name_of[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "values": values}


def unpack_optimizer(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], names: Names
) -> None:
    """Replace an optimizer's state by validated packed state; tensors are copied only if they must be moved."""
    optimizer.state.clear()
    on_device = {
        id(p)
        for group in optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for p in group["params"]
    }
    for key, tensor in tensors.items():
        field, _, name = key.partition("/")
        parameter = names[name]
        if tensor.shape == parameter.shape:
            tensor = placed_like(tensor, parameter)
        elif (
            field != "step" or id(parameter) in on_device
        ):  # torch keeps step counts on the CPU, except for fused and capturable optimizers
            tensor = tensor.to(local(parameter).device)
        optimizer.state.setdefault(parameter, {})[field] = tensor
    for name, values in saved["values"].items():
        optimizer.state.setdefault(names[name], {}).update(values)
    for group, stored in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in stored.items():
            if key == "params":
                group[key] = [names[name] for name in value]
            else:
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
