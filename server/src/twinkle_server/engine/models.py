"""The models of tenants as adapters of the engine: created, saved, loaded, restored and removed."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinkle.engine import AdapterRef, AdapterSpec, Engine, SavedAdapter
from twinkle.errors import CheckpointError
from twinkle_server.engine.errors import UserError, damaged_checkpoint
from twinkle_server.payloads import Create, Load, OptimStep, Save

_SHAPE = ("rank", "train_attn", "train_mlp", "train_unembed")


@dataclass(frozen=True, slots=True)
class Model:
    """A model of a tenant.

    Attributes:
        ref: its adapter.
        spec: how the adapter was created.
    """

    ref: AdapterRef
    spec: AdapterSpec


class Models:
    """The models that are in memory, by id.

    Args:
        engine: holds their adapters.
        base: what PEFT's files call the base model.
    """

    def __init__(self, engine: Engine, base: str) -> None:
        self._engine, self._base = engine, base
        self._models: dict[str, Model] = {}
        self._count = 0

    def __contains__(self, queue_id: str) -> bool:
        return queue_id in self._models

    def __getitem__(self, queue_id: str) -> Model:
        """Return a model.

        Raises:
            UserError: there is none of this id.
        """
        if queue_id not in self._models:
            raise UserError(f"model {queue_id!r} does not exist; it was never created or it was unloaded")
        return self._models[queue_id]

    def create(self, queue_id: str, create: Create, source: Path | None) -> None:
        """Create a model with fresh weights, or with those of a checkpoint.

        Raises:
            UserError: the id is taken, or rank or checkpoint are wrong.
            CapacityError: there is not enough memory.
        """
        if isinstance(create.rank, bool) or not isinstance(create.rank, int) or create.rank < 1:
            raise UserError(f"rank must be an integer of at least 1, got {create.rank!r}")
        spec = AdapterSpec(
            create.rank, create.seed, train_attn=create.train_attn, train_mlp=create.train_mlp,
            train_unembed=create.train_unembed,
        )  # fmt: skip
        model = self._add(queue_id, spec)
        if source is not None:
            with self._removed_on_error(queue_id), _checkpoint_errors():
                self._fill(model, source, create.optimizer)

    def load(self, queue_id: str, load: Load, source: Path) -> None:
        """Replace a model's weights by those of a checkpoint; a failure changes nothing."""
        with _checkpoint_errors():
            self._fill(self[queue_id], source, load.optimizer)

    def save(self, queue_id: str, save: Save) -> tuple[SavedAdapter, Mapping[str, Any]]:
        """Copy what a checkpoint holds; return it with the columns of the checkpoint's row."""
        model = self[queue_id]
        if save.kind == "weights":  # a run that starts from it has no pending gradients
            copied = self._engine.snapshot(model.ref, gradient=False)
        elif save.kind in ("sampler_weights", "external_weights"):
            copied = self._engine.export(model.ref, self._base)
        else:
            raise UserError(f"unknown kind of checkpoint {save.kind!r}")
        return copied, {name: getattr(model.spec, name) for name in _SHAPE}

    def snapshot(self, queue_id: str) -> SavedAdapter:
        """Copy the complete state of a model, pending gradients included."""
        return self._engine.snapshot(self[queue_id].ref)

    def restore(self, queue_id: str, folder: Path) -> None:
        """Create a model from a snapshot, in place of the one that has the id."""
        with _checkpoint_errors():
            spec = self._engine.read_spec(folder)
            if spec is None:
                raise CheckpointError(f"no snapshot found in {folder}")
            self.remove(queue_id)
            model = self._add(queue_id, spec)
            with self._removed_on_error(queue_id):
                self._engine.restore(model.ref, folder)

    def remove(self, queue_id: str) -> None:
        """Remove a model and zero its weights; no-op if there is none of this id."""
        if (model := self._models.pop(queue_id, None)) is not None:
            self._engine.remove(model.ref)

    def _add(self, queue_id: str, spec: AdapterSpec) -> Model:
        if queue_id in self._models:
            raise UserError(f"model {queue_id!r} already exists")
        self._count += 1
        model = self._models[queue_id] = Model(self._engine.add(f"model-{self._count}", spec), spec)
        with self._removed_on_error(queue_id):
            self._reset_optimizer(model)
        return model

    def _fill(self, model: Model, source: Path, optimizer: bool) -> None:
        spec = self._engine.read_spec(source)
        if spec is None:
            if optimizer:
                raise UserError("this checkpoint contains only weights; load it without the optimizer state")
            self._engine.load(model.ref, source)
            self._reset_optimizer(model)
            return
        for name in _SHAPE:
            own, saved = getattr(model.spec, name), getattr(spec, name)
            if own != saved:
                raise UserError(f"{name} of the checkpoint must equal that of the model ({own}), got {saved}")
        self._engine.restore(model.ref, source)
        if not optimizer:
            self._reset_optimizer(model)

    def _reset_optimizer(self, model: Model) -> None:
        first = OptimStep()
        self._engine.set_optimizer(
            model.ref, "AdamW", lr=first.learning_rate, betas=(first.beta1, first.beta2), eps=first.eps,
            weight_decay=first.weight_decay,
        )  # fmt: skip

    @contextmanager
    def _removed_on_error(self, queue_id: str) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.remove(queue_id)
            raise


@contextmanager
def _checkpoint_errors() -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise damaged_checkpoint(error) from error
