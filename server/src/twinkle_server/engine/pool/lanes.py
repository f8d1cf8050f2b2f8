"""The models that live in the pool, by their lanes."""

from dataclasses import dataclass
from typing import Any

from twinkle.model.pool import AdapterRef
from twinkle_server.engine.backend import UserError
from twinkle_server.payloads import Create, OptimStep

ALPHA = 32
"""LoRA's alpha: the wire carries none, and clients count on a scale of 32 / rank."""


@dataclass(slots=True)
class Lane:
    """A model.

    Attributes:
        name: of its adapter in the pool.
        ref: of that adapter.
        create: how it was made.
    """

    name: str
    ref: AdapterRef
    create: Create


class Lanes:
    """Adds and finds models.

    Args:
        model: the model of the pool.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._lanes: dict[str, Lane] = {}
        self._count = 0

    def __contains__(self, lane: str) -> bool:
        return lane in self._lanes

    def __getitem__(self, lane: str) -> Lane:
        """Return a model.

        Raises:
            UserError: there is none.
        """
        found = self._lanes.get(lane)
        if found is None:
            raise UserError(f"there is no model {lane!r}; it was never created, or it is over")
        return found

    def backwards(self) -> int:
        """Return how many gradients all models together were given since each was made."""
        return sum(self._model.optimizer_group[lane.name].cur_step for lane in self._lanes.values())

    def add(self, lane: str, create: Create) -> Lane:
        """Make a model with fresh weights; they follow from rank, switches and seed alone.

        Raises:
            UserError: there is one already, or the rank makes no sense.
            ArgumentError: everything is switched off.
            CapacityError: there is no room.
        """
        if lane in self._lanes:
            raise UserError(f"there is a model {lane!r} already")
        if isinstance(create.rank, bool) or not isinstance(create.rank, int) or create.rank < 1:
            raise UserError(f"rank is {create.rank!r}; it must be a whole number of at least 1")
        self._count += 1
        name = f"model-{self._count}"
        config = {
            "r": create.rank, "lora_alpha": ALPHA, "lora_dropout": 0.0, "train_attn": create.train_attn,
            "train_mlp": create.train_mlp, "train_unembed": create.train_unembed,
        }  # fmt: skip
        self._model.add_adapter_to_model(name, config, seed=create.seed)
        try:
            self._set_optimizer(name)
            ref = self._model.pool.ref(name)
        except BaseException:
            self._model.remove_adapter(name)
            raise
        made = self._lanes[lane] = Lane(name, ref, create)
        return made

    def reset_optimizer(self, lane: str) -> None:
        """Put a fresh optimizer in place of a model's own; its pending gradients are gone too."""
        name = self[lane].name
        self._model.zero_grad(adapter_name=name)
        self._set_optimizer(name)

    def remove(self, lane: str) -> None:
        """Zero and forget a model; one that is not there is no error."""
        if lane in self._lanes:
            self._model.remove_adapter(self._lanes.pop(lane).name)

    def _set_optimizer(self, name: str) -> None:
        first = OptimStep()
        self._model.set_optimizer(
            "AdamW", adapter_name=name, lr=first.learning_rate, betas=(first.beta1, first.beta2), eps=first.eps,
            weight_decay=first.weight_decay,
        )  # fmt: skip
