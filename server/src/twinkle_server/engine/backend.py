"""What the engine needs of whatever trains and samples; `pool` does it with torch, `ledger` counts for tests.

A backend lives in the engine process and is called by one thread. It is given work that was checked for order; it
checks what the work says. An exception of one item harms that item only; a method that raises has done nothing, and is
asked again with less (`run` and `step` for want of memory, say); `Fatal` says that nothing after it can be trusted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from twinkle_server.engine.composition import Composition
from twinkle_server.operations import ModelInfo
from twinkle_server.payloads import Create, Load, OptimStep, Sample, Save


class UserError(Exception):
    """The request cannot be done as asked; its message is for the client."""


class Fatal(Exception):
    """The process cannot go on (a device fault, say); it ends, is started anew, and replays."""


@dataclass(slots=True)
class Pass:
    """A pass's share of one operation.

    Attributes:
        lane: the model.
        payload: a serialized `ForwardBackwardRequest`; `forward_only` in it decides whether gradients are added.
        number: of the operation, from which dropout is drawn.
        composition: how it was computed before, where it is done again; None composes its passes anew.
    """

    lane: str
    payload: bytes
    number: int
    composition: Composition | None = None


@dataclass(slots=True)
class Sampled:
    """A sampling request that is over.

    Attributes:
        key: what it was submitted under.
        result: a serialized `SampleResponse`; None if it failed.
        error: why it failed.
        tokens: that were sampled.
    """

    key: int
    result: bytes | None
    error: Exception | None = None
    tokens: int = 0


@dataclass(slots=True)
class Cost:
    """What a call of `run` cost: tokens asked for, tokens computed for nothing, floating-point operations.

    Attributes:
        compositions: how the passes of each operation were composed, by its place in the call, where numbers depend on
            that.
    """

    tokens: int = 0
    padded: int = 0
    flops: float = 0.0
    compositions: Mapping[int, Composition] = field(default_factory=dict)


class State(Protocol):
    """A copy of a model's state, or of what a checkpoint has of it, which later operations do not change."""

    def write(self, folder: Path) -> None:
        """Write it; the folder is there and empty. Any thread may."""


class Backend(Protocol):
    """Trains and samples adapters of one base model."""

    def describe(self) -> ModelInfo:
        """Return what the base model is; it has been loaded."""

    def create(self, lane: str, create: Create, source: Path | None) -> None:
        """Make a model, from a checkpoint's folder if one is given."""

    @property
    def pass_tokens(self) -> int:
        """Tokens that go through the model at one time: a function of model and configuration, never of speed."""

    def run(self, passes: Sequence[Pass]) -> tuple[list[bytes | Exception], Cost]:
        """Do passes of many models together; each gives a serialized `ForwardBackwardOutput` or its error.

        One with a composition gives the numbers that it gave before, to the bit, whoever is there with it. One without
        gives the same numbers each time that it is alone.
        """

    def step(self, steps: Sequence[tuple[str, OptimStep]]) -> list[Mapping[str, float] | Exception]:
        """Update models together, each once; each gives its metrics or its error."""

    def save(self, lane: str, save: Save) -> tuple[State, Mapping[str, Any]]:
        """Copy what a checkpoint is to hold, and return with it what the checkpoint's row says (`rank`, ...)."""

    def load(self, lane: str, load: Load, source: Path) -> None:
        """Put a checkpoint in place of a model's weights."""

    def remove(self, lane: str) -> None:
        """Zero and forget a model; one that is not there is no error."""

    def snapshot(self, lane: str) -> State:
        """Copy all of a model's state, pending gradients included."""

    def restore(self, lane: str, folder: Path) -> None:
        """Make a model again as a snapshot has it."""

    def sample(self, key: int, sample: Sample, source: Path | None) -> None:
        """Take a sampling request; it raises what is wrong with it."""

    def decode(self) -> list[Sampled]:
        """Take one step of sampling, and return the requests that are over."""

    @property
    def sampling(self) -> int:
        """Number of sampling requests that are not over."""

    def cancel(self, key: int) -> None:
        """Drop a sampling request; one that is not there is no error."""


@runtime_checkable
class Interruptible(Protocol):
    """A backend that lets sampling go on during long passes."""

    def interrupt(self, between: Callable[[], None]) -> None:
        """Call `between` between the parts of a pass; it may call `decode`, `sample`, `cancel`, and raise `Fatal`."""


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """What a backend is made from.

    Attributes:
        model: folder or Hub id.
        name: what clients call it.
        data: the data directory.
        losses: see `Settings.losses`.
        extra: of one backend only.
    """

    model: str
    name: str
    data: Path
    losses: tuple[str, ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
