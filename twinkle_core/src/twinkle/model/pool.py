"""The contract of a pool of adapters on one base model, which servers and calls for several adapters stand on."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from twinkle.data_format import InputFeature, ModelOutput


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """An adapter of a pool as it was when it was added: a later adapter of the same name is another.

    Attributes:
        name: its name.
        generation: counts the adapters that the pool ever had.
    """

    name: str
    generation: int


@dataclass(slots=True)
class Operation:
    """What one adapter (or the base model) has to do with some rows.

    Attributes:
        adapter: its name or reference; None is the base model, which only goes forward.
        kind: "forward" computes outputs (and the loss, if `loss` is not None); "forward_backward" adds gradients too.
        rows: encoded rows; `labels[i]` is the target of position i.
        loss: a loss, in any form of component argument; None is the adapter's own for "forward_backward".
        loss_inputs: arguments of the loss; those with one entry a row are cut with the rows. `ref_logps="base"` stands
            for the base model's log-probabilities of the rows, computed in the same pass.
        options: `temperature` (1.0), `return_logits` (False), `task` ("causal_lm" or "embedding"), `topk_logprobs`
            (None; a number asks for so many of the most probable tokens at each trained position).
        number: of the operation, from which dropout is drawn; None takes the adapter's own count.
        composition: `OperationResult.composition` of an earlier run of the same operation: it is computed in passes of
            the same composition again, and its numbers are equal to the bit. None lets the pool compose the passes.
    """

    adapter: str | AdapterRef | None
    kind: Literal["forward", "forward_backward"]
    rows: Sequence[InputFeature]
    loss: Any = None
    loss_inputs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    number: int | None = None
    composition: Sequence[Mapping[str, Any]] | None = None


@dataclass(slots=True)
class Usage:
    """What an operation cost.

    Attributes:
        tokens: of its rows, each row counted whole.
        computed: tokens that went through the model; fewer where rows share a prefix, more where activations were
            computed again.
        padded: tokens computed for nothing.
        flops: floating-point operations of matrix products with weights: `2P + 2l` a computed token of a forward,
            `4P + 6l` with its backward through a frozen base (`6P + 8l` with recomputation); P and l are the base's and
            the adapter's numbers that a token meets.
    """

    tokens: int = 0
    computed: int = 0
    padded: int = 0
    flops: float = 0.0

    def __add__(self, other: "Usage") -> "Usage":
        """Return the sum of both."""
        return Usage(
            self.tokens + other.tokens,
            self.computed + other.computed,
            self.padded + other.padded,
            self.flops + other.flops,
        )


@dataclass(slots=True)
class OperationResult:
    """What an operation gave.

    Attributes:
        outputs: one a row, in order: `logps` float32 `[T]` and what the options ask for; no graph.
        loss_sum: the loss, not divided; None where none was calculated.
        denominator: what divides it.
        metrics: numbers that the loss gave beside it.
        usage: what it cost.
        composition: the passes that computed it, in order, as JSON data: which of its rows each had, and the shapes
            (not the contents) of what other operations had beside them. Empty where a pool does not record it.
    """

    outputs: list[ModelOutput]
    loss_sum: float | None = None
    denominator: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)
    composition: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Step:
    """An update of one adapter from its pending gradients.

    Attributes:
        adapter: its name or reference.
        max_grad_norm: bound of the norm of its gradient; 0 or less measures only.
        optim_params: `lr`, `weight_decay`, `betas`, `eps` to overwrite from now on.
        divide: whether gradients are divided by what the losses counted; a service whose losses are sums says False.
        zero_if_none: step with a zero gradient where none is pending: momentum and decay act all the same. Otherwise
            such a step is refused.
    """

    adapter: str | AdapterRef
    max_grad_norm: float = 0.0
    optim_params: Mapping[str, Any] = field(default_factory=dict)
    divide: bool = True
    zero_if_none: bool = False


@dataclass(slots=True)
class StepResult:
    """What a step gave.

    Attributes:
        grad_norm: norm of the gradient before clipping, after the division.
        updated: whether the weights were updated; not so where the norm is not finite and such steps are left out.
    """

    grad_norm: float
    updated: bool = True


@dataclass(slots=True)
class OperationError:
    """Why an operation failed; the gradients of its adapter are as they were before it.

    Attributes:
        error: what was raised.
        adapter: name of the adapter, None for the base model.
        index: place of the operation in the call.
    """

    error: Exception
    adapter: str | None
    index: int


@dataclass(frozen=True, slots=True)
class AdapterBytes:
    """Memory of one adapter.

    Attributes:
        device: bytes where the model is.
        host: bytes in host memory, when it is paged there.
        disk: bytes in files, when it is paged there.
    """

    device: int = 0
    host: int = 0
    disk: int = 0


class AdapterPool(ABC):
    """Many adapters, each with its own state, on one frozen base model.

    What an operation computes does not depend on the operations beside it, and a failure harms only the operation that
    failed: gradients reach an adapter after the whole operation has succeeded.
    """

    @abstractmethod
    def add(self, name: str, config: Any, *, seed: int | None = None) -> AdapterRef:
        """Add an adapter.

        Args:
            name: letters, digits, `_` and `-`.
            config: `peft.LoraConfig`, a mapping of its fields (and of `seed`, `train_attn`, `train_mlp`,
                `train_unembed`), or the folder of a saved adapter.
            seed: of the first weights and of dropout.

        Raises:
            ArgumentError: the name is taken, or the configuration is wrong or matches nothing.
            CapacityError: there is no room; says how much is needed, for whom, and how much there is.
        """

    @abstractmethod
    def remove(self, adapter: str | AdapterRef) -> None:
        """Remove an adapter and everything that belongs to it; its memory is zeroed."""

    @abstractmethod
    def run(self, operations: Sequence[Operation]) -> list[OperationResult | OperationError]:
        """Do operations together; returns one result each, in order.

        Operations of one adapter are done in their order. Only what harms all of them is raised.
        """

    @abstractmethod
    def step(self, steps: Sequence[Step]) -> list[StepResult | OperationError]:
        """Update several adapters together, each from its own pending gradients; returns one result each, in order.

        An adapter whose step failed is as it was, but for gradients that are not finite: those are gone.
        """

    @abstractmethod
    def snapshot(self, adapter: str | AdapterRef, *, gradient: bool = True) -> dict[str, Any]:
        """Return a copy of all that an adapter is: weights, pending gradients, optimizer, scheduler, counters.

        Args:
            adapter: its name or reference.
            gradient: False leaves out what is pending, as if the last update had just been made.
        """

    @abstractmethod
    def restore(self, adapter: str | AdapterRef, snapshot: Mapping[str, Any]) -> None:
        """Put a snapshot in place of an adapter's state, whole or not at all."""

    @abstractmethod
    def page(
        self, adapter: str | AdapterRef, to: Literal["device", "host", "disk"], folder: Path | None = None
    ) -> None:
        """Move an adapter's state; whatever needs it brings it back by itself."""

    @abstractmethod
    def version(self, adapter: str | AdapterRef) -> Any:
        """Return the adapter's weights as they are now, for a sampler; training does not change them."""

    @abstractmethod
    def usage(self, adapter: str | AdapterRef) -> Usage:
        """Return what all operations of an adapter have cost since it was added."""

    @abstractmethod
    def bytes_of(self, adapter: str | AdapterRef) -> AdapterBytes:
        """Return how much memory an adapter takes."""
