"""Saving and loading a model's weights with their training state, in one atomic folder."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from safetensors.torch import save_file

from twinkle.digests import check_digests, write_digests
from twinkle.errors import CheckpointError, OutputError
from twinkle.hub.local import reference_of
from twinkle.hub.quiet import quiet_transformers
from twinkle.paths import new_directory, recovered
from twinkle_transformers import adapters, checkpoint
from twinkle_transformers.group import OptimizerGroup
from twinkle_transformers.reading import read_tensors
from twinkle_transformers.sharding import copy_into, local

if TYPE_CHECKING:
    from twinkle_transformers.checkpoints import Checkpoints

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "preprocessor_config.json",
    "generation_config.json",
)


def save(
    model: "Checkpoints",
    group: OptimizerGroup,
    target: Path,
    *,
    save_optimizer: bool,
    consumed_train_samples: int,
    loop_state: dict[str, Any],
) -> None:
    """Write weights, tokenizer files and training state to `target`, which never exists half-written."""
    ranks = model.parallel.ranks
    ranks.agree(f"save to {target}", group.cur_step)
    model.parallel.settle()
    names = model._names(group)
    held = model._weights(group)
    sharded_or_small = bool(group.adapter_name) or model.parallel.in_lockstep
    tensors = checkpoint.gathered(held, ranks.is_first) if sharded_or_small else None
    snapshot = checkpoint.take_snapshot(
        group, names, model.parallel, consumed_train_samples=consumed_train_samples, optimizer=save_optimizer
    )
    if loop_state:
        snapshot.state["loop"] = loop_state
    if group.adapter_name:  # a full model's checkpoint has its own weights
        snapshot.state["base"] = model.base

    def write() -> None:
        _check_target(recovered(target))
        with new_directory(target) as work:
            if group.adapter_name:
                save_file(tensors, work / adapters.WEIGHTS, metadata={"format": "pt"})
                _write_adapter_config(model, group, work)
            else:
                with quiet_transformers():
                    model.model.save_pretrained(work, **({} if tensors is None else {"state_dict": tensors}))
            for name in _TOKENIZER_FILES:
                source = model.model_path / name
                if source.is_file() and not (work / name).exists():
                    (work / name).write_bytes(source.read_bytes())
            snapshot.write(work)
            write_digests(work)

    ranks.on_first(f"saving to {target}", write)


def find(model: "Checkpoints", folder: Path) -> Path:
    """Return the folder, put back by the first rank if a process was killed while replacing it; its files are checked.

    Raises:
        CheckpointError: a file is not the one that was saved.
    """

    def look() -> Path:
        found = recovered(folder)
        check_digests(found)
        return found

    return model.parallel.ranks.on_first(f"looking for {folder}", look)


def _check_target(target: Path) -> None:
    """Refuse to replace what is no checkpoint of ours."""
    if target.is_dir() and (not any(target.iterdir()) or (target / checkpoint.STATE).is_file()):
        return
    if target.exists() or target.is_symlink():
        raise OutputError(
            f"cannot save to {target}: something that is no checkpoint stands there ({checkpoint.STATE} is missing); "
            "choose another name or move it away"
        )


def load_weights(model: "Checkpoints", group: OptimizerGroup, folder: Path) -> None:
    """Load an adapter's or a full model's weights; names and shapes are compared before anything is copied.

    Raises:
        CheckpointError: missing, incomplete, or of another model.
    """
    model._place(group)
    model.parallel.settle()
    if group.adapter_name:
        model._load_adapter(group, folder)
        return
    files = _weight_files(folder)
    own = model.model.state_dict()
    shapes: dict[str, list[int]] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                shapes |= {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - not a dict
        except Exception as error:  # safetensors raises its own type, a bare Exception in older versions
            raise CheckpointError(f"{path} cannot be read ({error}); the file is truncated or corrupt") from error
    present = {local(own[key]).data_ptr() for key in shapes if key in own}
    tied = {key for key in own.keys() - shapes.keys() if local(own[key]).data_ptr() in present}
    for key in sorted((own.keys() | shapes.keys()) - tied):
        mine = list(own[key].shape) if key in own else "absent"
        if mine != shapes.get(key, "absent"):
            raise CheckpointError(
                f"the checkpoint in {folder} belongs to another model: {key} is {shapes.get(key, 'absent')} in the "
                f"files and {mine} in this model"
            )
    for path in files:
        for key, tensor in read_tensors(path).items():
            copy_into(own[key], tensor)


def resume(model: "Checkpoints", group: OptimizerGroup, folder: Path, *, only_model: bool) -> dict[str, int]:
    """Load weights, counters and (unless `only_model`) optimizer, scheduler and random state.

    Raises:
        CheckpointError: something needed is missing or belongs to another model or optimizer.
    """
    ranks = model.parallel.ranks
    folder = find(model, folder)
    model._place(group)
    model.parallel.settle()
    names = model._names(group)

    def read() -> tuple[dict[str, Any], checkpoint.Training | None]:
        state = checkpoint.read_state(folder)
        if group.adapter_name:
            checkpoint.compare_bases(folder, state.get("base"), model.base)
        return state, None if only_model else checkpoint.read_training(folder, state, group, names, ranks)

    # Everything is read and compared first, the weights included: an error leaves the model as it was.
    state, training = ranks.together(f"reading {folder}", read)
    ranks.together(f"loading weights from {folder}", lambda: load_weights(model, group, folder))
    group.drop_passes()
    group.cur_step, group.updates = state["cur_step"], state["updates"]
    group.scheduled = state["scheduled"]
    if group.seed is not None:
        group.seed = state.get("seed", group.seed)
    group.gradient_accumulation_steps = state["gradient_accumulation_steps"]
    if training is not None:
        training.apply(group, names, model.parallel)
    model._resumed(group)
    return {key: state[key] for key in ("cur_step", "consumed_train_samples", "gradient_accumulation_steps")}


def _write_adapter_config(model: "Checkpoints", group: OptimizerGroup, folder: Path) -> None:
    config = group.adapter_config
    kept = config.base_model_name_or_path, config.inference_mode
    config.base_model_name_or_path, config.inference_mode = _name_for_peft(model), True
    try:
        config.save_pretrained(str(folder))
    finally:
        config.base_model_name_or_path, config.inference_mode = kept


def _name_for_peft(model: "Checkpoints") -> str:
    """Return what PEFT can load the base model by: the id it has on a hub, or else the local folder."""
    reference = None if Path(model.model_id).expanduser().exists() else reference_of(model.model_id)
    scheme, _, name = (reference or "").partition("://")
    # Models have the same names on both hubs, and PEFT asks one of them alone.
    return name.partition("@")[0] if scheme in ("hf", "ms") else str(Path(model.model_path).resolve())


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        wanted = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        if missing := [name for name in wanted if not (folder / name).is_file()]:
            raise CheckpointError(f"{folder} is incomplete: {missing[0]} is missing ({len(missing)} such files)")
        return [folder / name for name in wanted]
    single = folder / "model.safetensors"
    if not single.is_file():
        hint = "; it holds an adapter: add one first and load into it" if (folder / adapters.CONFIG).is_file() else ""
        found = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else "no such folder"
        raise CheckpointError(f"no model weights at {folder}: model.safetensors is missing; found: {found}{hint}")
    return [single]
