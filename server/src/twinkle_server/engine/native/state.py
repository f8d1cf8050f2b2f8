"""What the service keeps of a model beside the engine: its components by name, and calls that a restart makes again.

It is a function of the model's operations, and written into each snapshot, so that a restored model goes on with the
same numbers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from twinkle.engine import AdapterSpec, SavedAdapter
from twinkle.errors import CheckpointError

FILE: Final = "native.json"
CALLS: Final = "native-{}.frame"
Named = tuple[str, dict[str, Any]]
"""A component: its name, and its options."""


@dataclass(slots=True)
class Staged:
    """A forward whose loss may be calculated later.

    Attributes:
        payload: of the forward.
        composition: passes of a forward that shared them, as JSON text.
        losses: payloads of the calls of `calculate_loss` since then.
    """

    payload: bytes
    composition: str | None = None
    losses: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class NativeState:
    """See the module.

    Attributes:
        loss: of the model; None is cross entropy.
        optimizer: of the model; None is that of a new model.
        scheduler: of the learning rate.
        template: encodes conversations.
        processor: collates rows.
        patches: applied to this model alone: name and options.
        metrics: added ones: name, options, and whether for training (None: both).
        consumed: samples that the client had consumed at the checkpoint; of a model, at the one that it last loaded.
        pending_tokens: tokens since the last step, whose outputs wait for metrics.
        forward: last `forward`, until its `backward`.
        forward_only: last `forward_only`, until the next.
        training: whether the last forward was in training mode.
        embeds: whether a backward call was for embeddings.
    """

    loss: Named | None = None
    optimizer: Named | None = None
    scheduler: Named | None = None
    template: Named | None = None
    processor: Named | None = None
    metrics: list[tuple[str, dict[str, Any], bool | None]] = field(default_factory=list)
    patches: list[Named] = field(default_factory=list)
    consumed: int = 0
    pending_tokens: int = 0
    forward: Staged | None = None
    forward_only: Staged | None = None
    training: bool = True
    embeds: bool = False

    def write(self, folder: Path, spec: AdapterSpec, *, calls: bool = True) -> None:
        """Write the state into a folder; a checkpoint has no calls to make again."""
        document: dict[str, Any] = {"format": 1, "adapter": spec.as_json()}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not isinstance(value, Staged):
                document[entry.name] = value
                continue
            if not calls:
                continue
            payloads = [value.payload, *value.losses]
            document[entry.name] = {"composition": value.composition, "payloads": len(payloads)}
            for index, payload in enumerate(payloads):
                (folder / CALLS.format(f"{entry.name}-{index}")).write_bytes(payload)
        (folder / FILE).write_text(json.dumps(document, indent=2), "utf-8")

    @classmethod
    def read(cls, folder: Path) -> "NativeState | None":
        """Read a folder; None if it holds no such state.

        Raises:
            CheckpointError: the files are damaged, or were written by a newer version.
        """
        if not (folder / FILE).is_file():
            return None
        try:
            document = json.loads((folder / FILE).read_bytes())
            if document.pop("format") != 1:
                raise ValueError("it was written by a newer version")
            del document["adapter"]
            state = cls(**{name: _named(value) for name, value in document.items()})
            state.patches = [(name, options) for name, options in state.patches]
            state.metrics = [(name, options, training) for name, options, training in state.metrics]
            for name in ("forward", "forward_only"):
                if (head := document.get(name)) is not None:
                    setattr(state, name, _staged(folder, name, head))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"cannot read {FILE} in {folder}: {error}") from error
        return state


def read_spec(folder: Path) -> AdapterSpec | None:
    """Return how the adapter of a checkpoint was created; None if its folder does not say so.

    Raises:
        CheckpointError: the file is damaged.
    """
    if not (folder / FILE).is_file():
        return None
    try:
        return AdapterSpec.from_json(json.loads((folder / FILE).read_bytes())["adapter"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"cannot read {FILE} in {folder}: {error}") from error


def _named(value: Any) -> Any:
    """Return what JSON made a list of as the pair that it was."""
    pair = isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)
    return tuple(value) if pair else value


def _staged(folder: Path, name: str, head: Mapping[str, Any]) -> Staged:
    first, *losses = [(folder / CALLS.format(f"{name}-{index}")).read_bytes() for index in range(head["payloads"])]
    return Staged(first, head["composition"], losses)


@dataclass(frozen=True, slots=True)
class WithState:
    """A copy of an adapter, with the service's state of the model beside it.

    Attributes:
        parts: copies of the adapter that have no files in common.
        state: a copy of the state.
        spec: how the adapter was created.
        calls: whether to write the calls to make again.
    """

    parts: tuple[SavedAdapter, ...]
    state: NativeState
    spec: AdapterSpec
    calls: bool

    def write(self, folder: Path) -> None:
        """Write all of it into a folder."""
        for part in self.parts:
            part.write(folder)
        self.state.write(folder, self.spec, calls=self.calls)
