"""Engines: the contract `Engine` of a base model that trains and samples many adapters, and every installed engine.

A service, and a recipe of several adapters, use a backend through this contract alone. One thread calls an engine.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from twinkle._lazy import room
from twinkle.data_format import SampleResponse, SamplingParams
from twinkle.model.pool import (
    AdapterBytes,
    AdapterRef,
    Operation,
    OperationError,
    OperationResult,
    Step,
    StepResult,
    Usage,
)

__all__ = [
    "AdapterSpec",
    "AdapterState",
    "AdapterVersion",
    "Engine",
    "EngineInfo",
    "SampleRequest",
]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine's base model is, and what the engine supports.

    Attributes:
        architecture: name of the model's class.
        context: most tokens of a row, prompt and completion together.
        vocabulary: number of token ids.
        tokenizer: folder with the model's tokenizer; None if it has none.
        device: name of the device that computes, such as `cpu` or `cuda:0`.
        dtype: name of the dtype that the base model's products have, such as `bfloat16`.
        unsupported: what the engine refuses, by name: `train_unembed`, `page`, `prompt_logprobs`, `interrupt`,
            `composition`. Everything else of the contract works.
        paths: for each fast path what was measured, as JSON data: `path`, `exact`, `reason`, `summary`.
    """

    architecture: str
    context: int
    vocabulary: int
    tokenizer: Path | None = None
    device: str = "cpu"
    dtype: str = "float32"
    unsupported: frozenset[str] = frozenset()
    paths: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A LoRA adapter to create. Its first weights are a function of these fields alone.

    Attributes:
        rank: of every matrix pair.
        alpha: the low-rank term is scaled by `alpha / rank`.
        seed: of the first weights, and of dropout.
        dropout: probability, applied to the input of the low-rank term.
        train_attn: adapt the projections of attention.
        train_mlp: adapt the linear layers of the MLPs, experts included.
        train_unembed: adapt the output projection.
    """

    rank: int
    alpha: float = 32.0
    seed: int = 0
    dropout: float = 0.0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


class AdapterState(Protocol):
    """A copy of what an adapter is or what is exported of it; later operations do not change it."""

    def write(self, folder: Path) -> None:
        """Write it into an empty folder. Any thread may call this."""


class AdapterVersion(Protocol):
    """Weights of an adapter at one time, for sampling; training does not change them."""

    @property
    def nbytes(self) -> int:
        """Memory that the weights take."""


@runtime_checkable
class SampleRequest(Protocol):
    """One prompt that is being sampled."""

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""

    def result(self) -> SampleResponse:
        """Return the samples, after working until they are complete if they are not.

        Raises:
            NonFiniteError: the model's logits are NaN.
        """

    def cancel(self) -> None:
        """Stop; does nothing when it is done."""


class Engine(ABC):
    """Trains and samples many LoRA adapters on one frozen base model.

    Operations are independent: what one computes does not depend on the operations beside it beyond rounding, and a
    failure harms only the operation that failed. A method that raises has changed nothing, unless it raises
    `EngineFault`, after which the process must end.
    """

    @abstractmethod
    def describe(self) -> EngineInfo:
        """Return what the base model is; it has been loaded."""

    # Adapters

    @abstractmethod
    def add(self, name: str, spec: AdapterSpec) -> AdapterRef:
        """Create an adapter.

        Raises:
            ArgumentError: the name is taken, or the specification is wrong or matches no layer.
            CapacityError: there is no memory for it.
            Unsupported: the engine cannot train or cannot sample such an adapter.
        """

    @abstractmethod
    def remove(self, adapter: AdapterRef) -> None:
        """Remove an adapter and everything that belongs to it, and zero its memory."""

    @abstractmethod
    def set_optimizer(self, adapter: AdapterRef, name: str = "AdamW", **options: Any) -> None:
        """Put a fresh optimizer in place of an adapter's own, and drop its pending gradients.

        Args:
            adapter: the adapter.
            name: a component of kind `optimizer`.
            **options: `lr`, `betas`, `eps`, `weight_decay` and so on; a `Step` may overwrite them.
        """

    @abstractmethod
    def page(self, adapter: AdapterRef, to: Literal["device", "host", "disk"], folder: Path | None = None) -> None:
        """Move an adapter's state; whatever needs the adapter moves it back."""

    @abstractmethod
    def usage(self, adapter: AdapterRef) -> Usage:
        """Return what all operations of an adapter have cost since it was added."""

    @abstractmethod
    def bytes_of(self, adapter: AdapterRef) -> AdapterBytes:
        """Return how much memory an adapter takes."""

    # Training

    @property
    @abstractmethod
    def pass_tokens(self) -> int:
        """Most tokens that go through the model at one time: a function of model and device, never of speed."""

    @abstractmethod
    def run(self, operations: Sequence[Operation]) -> list[OperationResult | OperationError]:
        """Run operations together; return one result each, in order.

        Operations of one adapter run in their order. An operation with a composition gives the numbers that it gave
        before, bit for bit. One without gives the same numbers each time that it runs alone.

        Raises:
            CapacityError: no operation was run, for want of memory; fewer may fit.
            EngineFault: gradients of some operations were added and others not.
        """

    @abstractmethod
    def step(self, steps: Sequence[Step]) -> list[StepResult | OperationError]:
        """Update adapters together, each from its own pending gradients; return one result each, in order.

        Raises:
            EngineFault: some adapters were updated and others not.
        """

    def interrupt(self, between: Callable[[], None]) -> None:
        """Call `between` between the passes of `run`, where sampling may go on; it may call `submit` and `decode`.

        The default does nothing: passes of this engine are not interrupted.
        """
        return

    # State

    @abstractmethod
    def snapshot(self, adapter: AdapterRef, *, gradient: bool = True) -> AdapterState:
        """Copy everything that an adapter is: weights, optimizer, counters, and pending gradients if `gradient`."""

    @abstractmethod
    def restore(self, adapter: AdapterRef, folder: Path) -> None:
        """Put a snapshot that was written to `folder` in place of an adapter's state, whole or not at all.

        Raises:
            CheckpointError: files are missing, damaged, or of an adapter of other layers, rank or sizes.
        """

    @abstractmethod
    def is_snapshot(self, folder: Path) -> bool:
        """Return whether a folder holds a snapshot, and not exported weights."""

    @abstractmethod
    def export(self, adapter: AdapterRef, base: str) -> AdapterState:
        """Copy an adapter's weights in PEFT's format.

        Args:
            adapter: the adapter.
            base: what the files call the base model.
        """

    @abstractmethod
    def load(self, adapter: AdapterRef, folder: Path) -> None:
        """Put weights in PEFT's format in place of an adapter's own, whole or not at all.

        Raises:
            CheckpointError: files are missing, damaged, or of another model.
        """

    # Sampling

    @abstractmethod
    def version(self, adapter: AdapterRef) -> AdapterVersion:
        """Return an adapter's weights as they are now, for `submit`."""

    @abstractmethod
    def read_version(self, folder: Path) -> AdapterVersion:
        """Read weights in PEFT's format, for `submit`.

        Raises:
            CheckpointError: files are missing, damaged, or of another model.
            Unsupported: they hold more than low-rank matrices of linear layers.
        """

    @abstractmethod
    def submit(
        self, tokens: Sequence[int], params: SamplingParams | Mapping[str, Any], version: AdapterVersion | None = None
    ) -> SampleRequest:
        """Begin to sample a prompt.

        Args:
            tokens: the prompt.
            params: how to draw; a mapping is read by `SamplingParams.from_dict`.
            version: the adapter's weights; None samples from the base model.

        Raises:
            ArgumentError: the parameters are wrong.
            CapacityError: prompt and completion are longer than the context, or there is no memory for them.
        """

    @abstractmethod
    def decode(self) -> bool:
        """Take one step of sampling for all requests; return False if there was nothing to do."""


__getattr__, __dir__ = room(__name__, "engine")
