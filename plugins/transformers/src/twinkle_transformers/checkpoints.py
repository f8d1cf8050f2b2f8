"""ModelCheckpoints of a model: weights, tokenizer files and training state in one folder that is written atomically."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from twinkle.digests import check_digests, write_digests
from twinkle.errors import CheckpointError, OutputError
from twinkle.hub import local_folder
from twinkle.hub.local import reference_of
from twinkle.hub.quiet import quiet_transformers
from twinkle.paths import new_directory, recovered
from twinkle_transformers import adapters, training_state
from twinkle_transformers.group import OptimizerGroup, check_name, plain_state
from twinkle_transformers.loaded_model import LoadedModel
from twinkle_transformers.parallel import copy_into, local
from twinkle_transformers.training import Adapters
from twinkle_transformers.training_state import read_tensors

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


class ModelCheckpoints:
    """Saves, loads and resumes the adapters of a model, or the full model.

    Args:
        loaded: the model.
        adapters: its adapters; every method takes the name of one, or None for the active one.
    """

    def __init__(self, loaded: LoadedModel, adapters: Adapters) -> None:
        self._loaded, self._adapters = loaded, adapters

    def save(
        self, adapter: str | None, name: str | None, output_dir: str | None, interval: int, *, save_optimizer: bool,
        consumed_train_samples: int, loop_state: Mapping[str, Any] | None,
    ) -> str | None:  # fmt: skip
        """Save a checkpoint if it is due; see `TransformersModel.save`."""
        group = self._adapters.trained(adapter, saving=True)
        name = name or f"checkpoint-step-{group.cur_step}"
        check_name(name, interval)
        if group.cur_step % interval:
            return None
        target = Path(output_dir or "output", name)
        state: dict[str, Any] = {}
        if kept := plain_state(loop_state):
            state["loop"] = kept
        if group.adapter_name:  # the checkpoint of a full model contains its own weights
            state["base"] = self._loaded.base
        self._save(group, target, save_optimizer, consumed_train_samples, state)
        return str(target)

    def _save(
        self, group: OptimizerGroup, target: Path, optimizer: bool, consumed_train_samples: int, state: dict[str, Any]
    ) -> None:
        loaded = self._loaded
        ranks = loaded.parallel.ranks
        ranks.agree(f"save to {target}", group.cur_step)
        loaded.parallel.settle()
        weights = self._adapters.weights(group)
        # A full model that is whole on this rank is written by transformers from the module itself, without a copy.
        sharded_or_small = bool(group.adapter_name) or loaded.parallel.in_lockstep
        tensors = training_state.gathered(weights, ranks.is_first) if sharded_or_small else None
        snapshot = training_state.take_snapshot(
            group, self._adapters.parameters(group), loaded.parallel, consumed_train_samples=consumed_train_samples,
            optimizer=optimizer,
        )  # fmt: skip
        snapshot.state.update(state)

        def write() -> None:
            _check_target(recovered(target))
            with new_directory(target) as folder:
                if group.adapter_name and tensors is not None:
                    save_file(tensors, folder / adapters.WEIGHTS, metadata={"format": "pt"})
                    self._write_adapter_config(group, folder)
                else:
                    with quiet_transformers():
                        given = {} if tensors is None else {"state_dict": tensors}
                        loaded.module.save_pretrained(folder, **given)
                copy_tokenizer(loaded.tokenizer_path, folder)
                snapshot.write(folder)
                write_digests(folder)

        ranks.on_first(f"saving to {target}", write)

    def _write_adapter_config(self, group: OptimizerGroup, folder: Path) -> None:
        config = group.adapter_config
        before = config.base_model_name_or_path, config.inference_mode
        config.base_model_name_or_path, config.inference_mode = self._name_for_peft(), True
        try:
            config.save_pretrained(str(folder))
        finally:
            config.base_model_name_or_path, config.inference_mode = before

    def _name_for_peft(self) -> str:
        """Return what PEFT can load the base model by: its id on a hub, or else the local folder."""
        model_id = self._loaded.model_id
        if self._loaded.path is None:
            return ""
        reference = None if Path(model_id).expanduser().exists() else reference_of(model_id, bare=True)
        scheme, _, name = (reference or "").partition("://")
        # Both hubs use the same names for models; PEFT looks them up at Hugging Face.
        return name.partition("@")[0] if scheme in ("hf", "ms") else str(Path(self._loaded.path).resolve())

    def load(
        self, adapter: str | None, name: str, output_dir: str | None, *, load_optimizer: bool, token: str | None
    ) -> None:
        """Load weights, or with `load_optimizer` the training state too; see `TransformersModel.load`."""
        folder = Path(output_dir, name) if output_dir else local_folder(name, **({"token": token} if token else {}))
        if load_optimizer:
            self.resume(adapter, folder, only_model=False)
        else:
            group = self._adapters.trained(adapter, saving=True)
            self._load_weights(group, self._checked(folder))

    def resume(self, adapter: str | None, folder: Path, *, only_model: bool) -> dict[str, int]:
        """Load weights, counters and (unless `only_model`) optimizer, scheduler and random state.

        Raises:
            CheckpointError: something is missing, or belongs to another model or optimizer; nothing has changed.
        """
        group, parallel = self._adapters.trained(adapter), self._loaded.parallel
        ranks = parallel.ranks
        folder = self._checked(folder)
        self._adapters.place(group)
        parallel.settle()
        names = self._adapters.parameters(group)

        def read() -> tuple[dict[str, Any], training_state.SavedTraining | None]:
            state = training_state.read_state(folder)
            if group.adapter_name:
                training_state.compare_bases(folder, state.get("base"), self._loaded.base)
            return state, None if only_model else training_state.read_training(folder, state, group, names, ranks)

        # Everything is read and compared before the first change, so that an error leaves the model as it was.
        state, training = ranks.together(f"reading {folder}", read)
        ranks.together(f"loading weights from {folder}", lambda: self._load_weights(group, folder))
        group.drop_passes()
        group.cur_step, group.updates = state["cur_step"], state["updates"]
        group.scheduled = state["scheduled"]
        if group.seed is not None:
            group.seed = state.get("seed", group.seed)
        group.gradient_accumulation_steps = state["gradient_accumulation_steps"]
        if training is not None:
            training.apply(group, names, parallel)
        self._adapters.resumed(group)
        return {key: state[key] for key in ("cur_step", "consumed_train_samples", "gradient_accumulation_steps")}

    def _checked(self, folder: Path) -> Path:
        """Return a folder after checking its digests; the first rank restores one whose replacement was interrupted.

        Raises:
            CheckpointError: a file was changed since it was saved.
        """

        def check() -> Path:
            path = recovered(folder)
            check_digests(path)
            return path

        return self._loaded.parallel.ranks.on_first(f"looking for {folder}", check)

    def _load_weights(self, group: OptimizerGroup, folder: Path) -> None:
        """Load weights; names and shapes are compared before anything is copied.

        Raises:
            CheckpointError: files are missing, incomplete, or of another model.
        """
        self._adapters.place(group)
        self._loaded.parallel.settle()
        if group.adapter_name:
            self._adapters.load_weights(group, folder)
        else:
            load_full_model(self._loaded.module.state_dict(), folder)


def copy_tokenizer(source: Path | None, folder: Path) -> None:
    """Copy the files of a tokenizer into a checkpoint, except those that it has."""
    for path in () if source is None else [source / name for name in _TOKENIZER_FILES]:
        if path.is_file() and not (folder / path.name).exists():
            (folder / path.name).write_bytes(path.read_bytes())


def check_full_model(own: Mapping[str, Any], folder: Path) -> list[Path]:
    """Return the files of a full model's weights, whose names and shapes are those of a module.

    Args:
        own: `state_dict` of the module.
        folder: of the files.

    Raises:
        CheckpointError: files are missing, damaged, or of another model.
    """
    files = _weight_files(folder)
    shapes: dict[str, list[int]] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                shapes |= {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - not a dict
        except Exception as error:  # safetensors raises its own type, a bare Exception in older versions
            raise CheckpointError(f"{path} cannot be read ({error}); the file is truncated or corrupt") from error
    # A file holds one of several tied weights; the names of the others need not be in it.
    present = {local(own[key]).data_ptr() for key in shapes if key in own}
    tied = {key for key in own.keys() - shapes.keys() if local(own[key]).data_ptr() in present}
    for key in sorted((own.keys() | shapes.keys()) - tied):
        shape = list(own[key].shape) if key in own else "absent"
        if shape != shapes.get(key, "absent"):
            raise CheckpointError(
                f"the checkpoint in {folder} belongs to another model: {key} is {shapes.get(key, 'absent')} in the "
                f"files and {shape} in this model"
            )
    return files


def load_full_model(own: Mapping[str, Any], folder: Path) -> None:
    """Copy the weights in a folder into those of a module, after checking all of them; see `check_full_model`."""
    for path in check_full_model(own, folder):
        for key, tensor in read_tensors(path).items():
            copy_into(own[key], tensor)


def _check_target(target: Path) -> None:
    """Refuse to replace anything but a checkpoint or an empty folder."""
    if target.is_dir() and (not any(target.iterdir()) or (target / training_state.STATE).is_file()):
        return
    if target.exists() or target.is_symlink():
        raise OutputError(
            f"cannot save to {target}: it exists and is not a checkpoint ({training_state.STATE} is missing); "
            "choose another name or move it away"
        )


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise CheckpointError(f"{folder} is incomplete: {missing[0]} is missing ({len(missing)} such files)")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if not single.is_file():
        hint = "; it holds an adapter: add one first and load into it" if (folder / adapters.CONFIG).is_file() else ""
        present = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else "no such folder"
        raise CheckpointError(f"no model weights at {folder}: model.safetensors is missing; found: {present}{hint}")
    return [single]
