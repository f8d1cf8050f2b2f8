"""Saving and loading models: states with their optimizer, and weights as PEFT's files."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from twinkle.errors import ArgumentError, CheckpointError
from twinkle_server.engine.backend import State, UserError
from twinkle_server.engine.pool.faults import damaged
from twinkle_server.engine.pool.lanes import Lane, Lanes
from twinkle_server.engine.pool.states import ReadState, SavedState, is_state
from twinkle_server.payloads import Create, Load, Save

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""PEFT's names of its files."""
_SHAPE = ("rank", "train_attn", "train_mlp", "train_unembed")


@dataclass(frozen=True, slots=True)
class _Adapter:
    """A copy of a model's weights, and the configuration that PEFT wants beside them."""

    tensors: dict[str, Tensor]
    config: Any

    def write(self, folder: Path) -> None:
        """Write PEFT's files; see `State`."""
        save_file(self.tensors, folder / WEIGHTS, metadata={"format": "pt"})
        self.config.save_pretrained(str(folder))


class Checkpoints:
    """Writes and reads models.

    Args:
        model: the model of the pool.
        lanes: who has which adapter.
        base: what PEFT's files call the base model.
    """

    def __init__(self, model: Any, lanes: Lanes, base: str) -> None:
        self._model, self._lanes, self._base = model, lanes, base

    def create(self, lane: str, create: Create, source: Path | None) -> None:
        """Make a model, with a checkpoint's weights if a source is given; nothing is left of one that failed."""
        made = self._lanes.add(lane, create)
        if source is None:
            return
        try:
            self._fill(lane, made, source, create.optimizer)
        except BaseException:
            self._lanes.remove(lane)
            raise

    def load(self, lane: str, load: Load, source: Path) -> None:
        """Put a checkpoint in place of a model's weights; it is as it was where that fails."""
        self._fill(lane, self._lanes[lane], source, load.optimizer)

    def save(self, lane: str, save: Save) -> tuple[State, Mapping[str, Any]]:
        """Copy what a checkpoint is to hold; see `Backend.save`."""
        found = self._lanes[lane]
        copied: State
        if save.kind == "weights":
            copied = self._without_gradient(found)
        elif save.kind in ("sampler_weights", "external_weights"):
            copied = self._adapter(found)
        else:
            raise UserError(f"there is no kind of checkpoint {save.kind!r}")
        return copied, {name: getattr(found.create, name) for name in _SHAPE}

    def snapshot(self, lane: str) -> SavedState:
        """Copy all of a model's state, pending gradients included."""
        found = self._lanes[lane]
        taken = self._model.pool.snapshot(found.ref)
        return SavedState(found.create, taken["tensors"], taken["state"])

    def restore(self, lane: str, folder: Path) -> None:
        """Make a model again as a snapshot has it; one that stands in its lane goes first."""
        saved = ReadState.of(folder)
        self._lanes.remove(lane)
        made = self._lanes.add(lane, saved.create)
        try:
            self._put(made, saved)
        except BaseException:
            self._lanes.remove(lane)
            raise

    def _without_gradient(self, lane: Lane) -> SavedState:
        """Return the state that a later run may begin with: what no update has used yet is no part of it."""
        taken = self._model.pool.snapshot(lane.ref, gradient=False)
        return SavedState(lane.create, taken["tensors"], taken["state"])

    def _fill(self, lane: str, made: Lane, source: Path, optimizer: bool) -> None:
        if not is_state(source):
            if optimizer:
                raise UserError("this checkpoint holds weights alone, without the optimizer's state; load it without")
            self._weights(made, source)
            self._lanes.reset_optimizer(lane)
            return
        saved = ReadState.of(source)
        for name in _SHAPE:
            mine, theirs = getattr(made.create, name), getattr(saved.create, name)
            if mine != theirs:
                raise UserError(f"the checkpoint was saved with {name}={theirs}, and this model has {name}={mine}")
        self._put(made, saved)
        if not optimizer:
            self._lanes.reset_optimizer(lane)

    def _put(self, made: Lane, saved: ReadState) -> None:
        own = self._model.pool.snapshot(made.ref, gradient=False)["state"]
        try:
            self._model.pool.restore(made.ref, saved.snapshot_for(own))
        except CheckpointError as error:
            raise damaged(error) from error

    def _weights(self, made: Lane, source: Path) -> None:
        try:
            self._model.load(str(source), adapter_name=made.name)
        except (CheckpointError, ArgumentError, OSError) as error:
            raise damaged(CheckpointError(str(error))) from error

    def _adapter(self, lane: Lane) -> _Adapter:
        config = copy.deepcopy(self._model.optimizer_group[lane.name].adapter_config)
        config.base_model_name_or_path, config.inference_mode = self._base, True
        return _Adapter(dict(self._model.get_state_dict(adapter_name=lane.name)), config)
