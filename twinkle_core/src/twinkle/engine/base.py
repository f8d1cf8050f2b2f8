"""The contract `Engine` of one base model that trains and samples many adapters.

The server, and recipes that train several adapters, use a backend through this contract alone. All methods of an engine
are called from one thread, except where a docstring says otherwise.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from twinkle.data_format import InputFeature, ModelOutput, SampleResponse, SamplingParams, StopReason
from twinkle.errors import Unsupported

if TYPE_CHECKING:
    from twinkle.model.base import TwinkleModel

Feature = Literal[
    "composition",
    "early_results",
    "full_parameters",
    "interrupt",
    "logit_bias",
    "min_p",
    "model",
    "page",
    "penalties",
    "prompt_scores",
    "stop_strings",
    "structured_outputs",
    "train_unembed",
]
"""Optional abilities of an engine; see `EngineInfo.features`."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine's base model is, and what the engine supports.

    Attributes:
        architecture: name of the model's class.
        context: maximum number of tokens of a row, prompt and completion together.
        vocabulary: number of token ids; the ids are 0 to `vocabulary - 1`.
        tokenizer: folder with the model's tokenizer; None if the model has none.
        device: device that computes, such as `cpu` or `cuda:0`.
        dtype: dtype of the base model's matrix products, such as `bfloat16`.
        features: the optional parts of the contract that this engine has:

            - `composition`: an operation is recomputed bit for bit from `OperationResult.composition`; an engine whose
              numbers never depend on the operations beside it does not need this;
            - `early_results`: `run` calls the function given to `report` as soon as an operation has ended;
            - `full_parameters`: `add` with the rank 0 trains all weights of the base model instead of an adapter;
            - `interrupt`: `run` calls the function given to `interrupt` between its passes;
            - `logit_bias`, `min_p`, `structured_outputs`: sampling has the parameter of this name;
            - `model`: adapters have components of their own (loss, scheduler, template, processor, metrics), which
              `as_model` sets and uses;
            - `page`: adapters can be moved to host memory and disk;
            - `penalties`: sampling has `presence_penalty` and `frequency_penalty`;
            - `prompt_scores`: sampling scores prompt tokens (`prompt_logprobs`, `prompt_logprobs_last`,
              `prompt_temperature`, `prompt_targets`, `prompt_draws`);
            - `stop_strings`: sampling stops at texts, not only at token ids;
            - `train_unembed`: adapters can adapt the output projection.

            Using a feature that is absent raises `Unsupported`, except `composition`, `early_results` and `interrupt`,
            whose absence costs exactness of replays and latency of results and of sampling.
        losses: losses that the engine computes itself. `Operation.loss` may be such a name, with the options in
            `loss_options`; any other loss is an object that the engine calls with tensors of torch.
        paths: the evidence for each fast path, as JSON data: `path`, `exact`, `reason`, `summary`.
    """

    architecture: str
    context: int
    vocabulary: int
    tokenizer: Path | None = None
    device: str = "cpu"
    dtype: str = "float32"
    features: frozenset[Feature] = frozenset()
    losses: frozenset[str] = frozenset()
    paths: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A LoRA adapter to create. Its initial weights are a function of these fields and of the base model alone.

    Attributes:
        rank: rank of every pair of matrices that `rank_pattern` does not name. 0 trains all weights of the base model,
            beginning with its own (feature `full_parameters`); `dropout`, `targets` and the patterns must then be left
            out, and the other fields are not read.
        seed: seed of the initial weights and of dropout. Those of a layer are a function of the seed, the layer's name
            and its size alone: they do not depend on which other layers are adapted.
        alpha: the low-rank term is scaled by `alpha / rank`.
        dropout: probability, applied to the input of the low-rank term.
        train_attn: adapt the projections of attention.
        train_mlp: adapt the linear layers of the MLPs, experts included.
        train_unembed: adapt the output projection.
        targets: adapt these layers instead of those that the three switches select: last names of layers, or
            `("all-linear",)`, all linear layers but the output projection, or, as a text, a regular expression for the
            whole path of a layer. `()` lets the engine choose, as PEFT does.
            An engine without the feature `model` may refuse this field, and the fields below, with `Unsupported`.
        rank_pattern: ranks of single layers: pairs of a pattern and a rank. A pattern is a regular expression for the
            end of a layer's path that begins at a dot, as in PEFT; the first one that matches counts.
        alpha_pattern: `alpha` of single layers, in the same way.
        exclude: layers that `targets` selects and that are not adapted: last names, or a regular expression, as there.
        rslora: the low-rank term is scaled by `alpha / sqrt(rank)` instead.
        init: the first weights: A is uniform ("kaiming") or normal ("gaussian") as in PEFT, and B is 0; or neither is
            ("random"), as with PEFT's `init_lora_weights=False`.
    """

    rank: int
    seed: int = 0
    alpha: float = 32.0
    dropout: float = 0.0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    targets: tuple[str, ...] | str | None = None
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    exclude: tuple[str, ...] | str = ()
    rslora: bool = False
    init: Literal["kaiming", "gaussian", "random"] = "kaiming"

    def __post_init__(self) -> None:
        """Make tuples of the lists that JSON has."""
        for name in ("targets", "exclude"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in _PATTERNS:
            object.__setattr__(self, name, tuple(tuple(pair) for pair in getattr(self, name)))

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON data for `from_json`; defaults that older versions lack are left out."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in values.items() if name not in _ADDED or value != _ADDED[name]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "AdapterSpec":
        """Return a specification from what `as_json` returned.

        Raises:
            TypeError: a field is missing or unknown, or one that selects or scales layers has another type.
        """
        for field_name in ("targets", "exclude"):
            names = values.get(field_name)
            listed = isinstance(names, list) and all(isinstance(name, str) for name in names)
            if names is not None and not isinstance(names, str) and not listed:
                raise TypeError(f"{field_name} must be a list of names, or a text, got {names!r}")
        if values.get("init", "kaiming") not in ("kaiming", "gaussian", "random"):
            raise TypeError(f"init must be 'kaiming', 'gaussian' or 'random', got {values['init']!r}")
        if not isinstance(values.get("rslora", False), bool):
            raise TypeError(f"rslora must be True or False, got {values['rslora']!r}")
        for name in _PATTERNS:
            pairs = values.get(name, [])
            if not isinstance(pairs, list) or not all(_is_pair(pair) for pair in pairs):
                raise TypeError(f"{name} must be a list of pairs of a pattern and a number, got {pairs!r}")
        return cls(**values)


_PATTERNS = ("rank_pattern", "alpha_pattern")
_ADDED: Mapping[str, Any] = {
    "rank_pattern": (), "alpha_pattern": (), "exclude": (), "rslora": False, "init": "kaiming",
}  # fmt: skip
"""Fields that later versions added, with their defaults."""


def _is_pair(pair: Any) -> bool:
    return (
        isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str) and type(pair[1]) in (int, float)
    )


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """An adapter that was added. A later adapter of the same name has another generation.

    Attributes:
        name: its name.
        generation: number of adapters that were added before it.
    """

    name: str
    generation: int


@dataclass(slots=True)
class Operation:
    """Rows for one adapter (or the base model), and what to compute with them.

    Attributes:
        adapter: name or reference; None is the base model, which has no backward.
        kind: "forward" computes outputs (and the loss, if `loss` is not None); "forward_backward" also adds gradients.
        rows: encoded rows, as lists or arrays of numpy: `input_ids` `[T]`; `labels` `[T]`, or `[T, K]` for K targets at
            each position, where `labels[i]` is the target of position i and -100 is none; and `loss_scale`, weights in
            the shape of the labels. Other fields may be refused with `Unsupported`.
        loss: a loss, in any form of component argument, or a name of `EngineInfo.losses`. None computes no loss for
            "forward"; for "forward_backward" it is the adapter's own, and an `ArgumentError` where adapters have none.
        loss_inputs: arguments of the loss. An engine that calls the loss with a part of the rows splits those with one
            entry for each row: the usual ones, such as `old_logps` and `advantages`, and those of `Loss.row_inputs`.
            `ref_logps="base"` stands for the base model's log-probabilities of the rows, computed in the same call.
            `rewards`, a number for each row, may be given for any loss; one that does not take it does not get it.
        options: `temperature` (1.0), `return_logits` (False), `task` ("causal_lm" or "embedding"), `topk_logprobs`
            (None; k also returns the k most probable tokens at each trained position). An engine may refuse all but
            `temperature` with `Unsupported`.
        number: number of the operation, a seed of dropout; None takes the adapter's own count.
        composition: `OperationResult.composition` of an earlier run of the same operation. The operation is computed in
            passes of the same composition, and gives the same numbers bit for bit. None lets the engine choose.
        loss_options: options of the loss's constructor, where `loss` is not an instance.
        metrics_of: an adapter whose metrics see this operation, as if `loss` were its own. A "forward" becomes
            the adapter's last one, which `TwinkleModel.calculate_loss` scores; its rows may go through the base model.
            Requires the feature `model`.
    """

    adapter: str | AdapterRef | None
    kind: Literal["forward", "forward_backward"]
    rows: Sequence[InputFeature]
    loss: Any = None
    loss_inputs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    number: int | None = None
    composition: Sequence[Mapping[str, Any]] | None = None
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    metrics_of: str | AdapterRef | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the training of an adapter is.

    Attributes:
        cur_step: number of backward calls.
        updates: number of optimizer steps.
        pending: number of backward calls since the last step.
        gradient_accumulation_steps: number of backward calls for each step.
        learning_rates: learning rate of each parameter group; empty without an optimizer.
    """

    cur_step: int = 0
    updates: int = 0
    pending: int = 0
    gradient_accumulation_steps: int = 1
    learning_rates: tuple[float, ...] = ()


@dataclass(slots=True)
class Usage:
    """What an operation cost.

    Attributes:
        tokens: tokens of its rows.
        computed: tokens that went through the model: fewer than `tokens` where rows share a prefix, more where
            activations were recomputed.
        padded: padding tokens that went through the model.
        flops: floating-point operations of matrix products with weights. For each computed token a forward takes
            `2P + 2l`, a forward and backward through a frozen base `4P + 6l` (`6P + 8l` with recomputation), where P
            and l are the numbers of active parameters of the base model and of the adapter.
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
    """The result of an operation.

    Attributes:
        outputs: one for each row, in order: `logps` float32 in the shape of the row's labels, 0 where the label is
            -100, absent without labels; and what the options request; detached.
        loss_sum: the loss, not divided; None where no loss was computed.
        denominator: what the loss is divided by.
        metrics: further numbers of the loss, summed over the rows.
        usage: what the operation cost.
        composition: the passes that computed it, in order, as JSON data: which of its rows each pass had, and the
            shapes (not the contents) of the other rows of the pass. Empty without the feature `composition`.
    """

    outputs: list[ModelOutput]
    loss_sum: float | None = None
    denominator: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)
    composition: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Step:
    """An optimizer step of one adapter from its pending gradients.

    Attributes:
        adapter: name or reference.
        max_grad_norm: clip the gradient to this norm; 0 or less does not clip.
        optim_params: `lr`, `weight_decay`, `betas`, `eps`: new values, for this step and later ones.
        divide: divide the gradient by the losses' denominators; False for losses that are sums.
        zero_if_none: without pending gradients, step with a gradient of zero, so that momentum and weight decay act;
            otherwise such a step is an error.
    """

    adapter: str | AdapterRef
    max_grad_norm: float = 0.0
    optim_params: Mapping[str, Any] = field(default_factory=dict)
    divide: bool = True
    zero_if_none: bool = False


@dataclass(slots=True)
class StepResult:
    """The result of a step.

    Attributes:
        grad_norm: norm of the gradient after the division, before clipping.
        updated: whether the weights were updated; False where the norm is not finite and such steps are skipped.
    """

    grad_norm: float
    updated: bool = True


@dataclass(slots=True)
class OperationError:
    """The failure of an operation or step, which has not changed its adapter.

    Attributes:
        error: the exception.
        adapter: name of the adapter; None for the base model.
        index: index of the operation in the call.
    """

    error: Exception
    adapter: str | None
    index: int


@dataclass(frozen=True, slots=True)
class AdapterBytes:
    """Memory of one adapter, in bytes.

    Attributes:
        device: on the model's device.
        host: in host memory, where it is paged there.
        disk: in files, where it is paged there.
    """

    device: int = 0
    host: int = 0
    disk: int = 0


class SavedAdapter(Protocol):
    """A copy of an adapter that is to be written; later operations do not change it."""

    def write(self, folder: Path) -> None:
        """Write the copy into an existing, empty folder, as regular files without subfolders.

        May be called from any thread. `manifest.json` is the caller's: the server adds one with the files' digests.
        Whatever reads the folder ignores files that are not its own.
        """


class AdapterVersion(Protocol):
    """The weights of an adapter at one time, for sampling; later training does not change them."""

    @property
    def nbytes(self) -> int:
        """Memory that the weights take, in bytes."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Tokens of a sample from some position on.

    Attributes:
        tokens: token ids, in order.
        logprobs: log-probability of each token; empty where none were requested.
        stop_reason: why the sample ended; None while it grows.
        topk: for each token the most probable tokens at its position; empty where none were requested.
        cached_tokens: number of prompt tokens that came from the prefix cache.
    """

    tokens: list[int]
    logprobs: list[float]
    stop_reason: StopReason | None = None
    topk: list[list[tuple[int, float]]] = field(default_factory=list)
    cached_tokens: int = 0


@runtime_checkable
class SampleRequest(Protocol):
    """A prompt that is being sampled."""

    @property
    def done(self) -> bool:
        """Whether all samples have ended, or the request has failed or was cancelled."""

    def progress(self, sample: int = 0, start: int = 0) -> SampledTokens:
        """Return what has been drawn so far, without computing anything: what a stream sends.

        Args:
            sample: index of the sample.
            start: number of tokens to leave out.

        Raises:
            ArgumentError: there is no such sample.
            NonFiniteError: the model's logits are NaN.
        """

    def result(self) -> SampleResponse:
        """Return the samples; decode until they are complete if they are not.

        Raises:
            NonFiniteError: the model's logits are NaN.
        """

    def cancel(self) -> None:
        """End the request; its samples keep their tokens and get the stop reason "abort". No-op if it is done."""


def check_features(params: SamplingParams, features: frozenset[Feature]) -> None:
    """Refuse sampling parameters that need a feature that an engine does not have.

    Raises:
        Unsupported: with the name of the parameter and of the feature.
    """
    prompt = params.prompt_logprobs, params.prompt_targets, params.prompt_draws or None
    needs: dict[str, tuple[bool, Feature]] = {
        "logit_bias": (bool(params.logit_bias), "logit_bias"),
        "min_p": (params.min_p > 0, "min_p"),
        "presence_penalty": (params.presence_penalty != 0, "penalties"),
        "frequency_penalty": (params.frequency_penalty != 0, "penalties"),
        "prompt_logprobs, prompt_targets or prompt_draws": (
            any(value is not None for value in prompt),
            "prompt_scores",
        ),
        "a text in stop": (bool(params.stop_strings()), "stop_strings"),
        "structured_outputs": (params.structured_outputs is not None, "structured_outputs"),
    }
    for name, (used, feature) in needs.items():
        if used and feature not in features:
            raise Unsupported(f"{name} needs the feature {feature!r}, which this engine does not have; leave it out")


class Engine(ABC):
    """Trains and samples many LoRA adapters on one frozen base model.

    Operations are independent: beyond rounding, the numbers of an operation do not depend on the operations beside it,
    and a failure affects only the operation that failed. A method that raises has changed nothing, unless it raises
    `EngineFault`: then the process must end, and its state must be restored from snapshots. The reference of an adapter
    that was removed is a `TrainingStateError`.

    A loss is called with the batch of an operation's rows (`input_ids`, `labels`, `loss_scale` if a row has it; tensors
    `[B, T]` or `[B, T, K]`, padded with -100 in the labels) and with outputs that have `logps` in the shape of the
    labels; see `twinkle.loss.Loss`. An engine may split the rows into several calls, where `Loss.splittable` and
    `Loss.rows_together` allow it. A loss that needs other outputs than the engine computes is `Unsupported`.

    A provider is built with `model_id=` (the server gives a local folder), `pass_tokens=` (None lets the engine choose)
    and options of its own.
    """

    @abstractmethod
    def describe(self) -> EngineInfo:
        """Return what the base model is and what the engine supports."""

    # Adapters

    @abstractmethod
    def add(self, name: str, spec: AdapterSpec) -> AdapterRef:
        """Create an adapter with fresh weights and no optimizer.

        With the feature `full_parameters`, a specification of rank 0 is one for a full model: one at a time. All
        methods take its reference where they take that of an adapter, but `page`, `version` and sampling, which an
        engine may refuse with `Unsupported`. The base model itself, and so every adapter, stays as it is.

        Args:
            name: letters, digits, `_` and `-`.
            spec: rank, seed and targets.

        Raises:
            ArgumentError: the name is taken, or the specification is wrong or matches no layer.
            CapacityError: there is not enough memory, or there is a full model already.
            Unsupported: the engine cannot train such an adapter.
        """

    @abstractmethod
    def remove(self, adapter: AdapterRef) -> None:
        """Remove an adapter with its optimizer and gradients, and overwrite its weights with zeros."""

    @abstractmethod
    def set_optimizer(self, adapter: AdapterRef, name: str = "AdamW", **options: Any) -> None:
        """Give an adapter a fresh optimizer, and drop its pending gradients.

        Args:
            adapter: the adapter.
            name: a component of kind `optimizer`.
            **options: `lr`, `betas`, `eps`, `weight_decay` and so on; `Step.optim_params` may change them later.

        Raises:
            ArgumentError: an option is unknown or out of range.
            Unsupported: the engine does not have this optimizer.
        """

    @abstractmethod
    def usage(self, adapter: AdapterRef) -> Usage:
        """Return what all successful operations of an adapter have cost since it was added."""

    @abstractmethod
    def bytes_of(self, adapter: AdapterRef) -> AdapterBytes:
        """Return how much memory an adapter takes; weights that were never used may take none."""

    def page(self, adapter: AdapterRef, to: Literal["device", "host", "disk"], folder: Path | None = None) -> None:
        """Move an adapter's state. An operation that needs the adapter moves it back by itself.

        Args:
            adapter: the adapter.
            to: where its state goes.
            folder: for "disk", the folder of its files.

        Raises:
            Unsupported: the engine does not have the feature `page`.
        """
        raise Unsupported(f"{type(self).__name__}: adapters cannot be paged; its features do not include 'page'")

    # Training

    @property
    @abstractmethod
    def pass_tokens(self) -> int:
        """Maximum number of tokens of a forward pass; a function of the model, the device and the options alone.

        A row is never cut: one that is longer has a pass of its own.
        """

    @abstractmethod
    def run(self, operations: Sequence[Operation]) -> list[OperationResult | OperationError]:
        """Run operations together; return one result for each, in order.

        Operations of one adapter run in their order. The gradients of an operation are added to those of its adapter
        after the whole operation has succeeded. Whatever is wrong with an operation, such as its adapter, rows, options
        or loss, is an `OperationError` with the exception that says so; a loss or gradient that is not finite is one
        with a `NonFiniteError`.

        Raises:
            CapacityError: no operation was run, for lack of memory, but those that were reported; fewer may fit.
            EngineFault: some gradients were added and others were not, or the device has failed.
        """

    @abstractmethod
    def step(self, steps: Sequence[Step]) -> list[StepResult | OperationError]:
        """Update adapters together, each from its pending gradients; return one result for each, in order.

        A step without pending gradients or without an optimizer is an `OperationError` with a `TrainingStateError`. An
        adapter whose gradient is not finite keeps its weights, loses the gradient, and its result is an
        `OperationError` with a `NonFiniteError`.
        With the feature `model`, a scheduler or metric that fails after the update is one with a `TrainingStateError`
        that says so.

        Raises:
            EngineFault: some adapters were updated and others were not, or the device has failed.
        """

    def report(self, ended: Callable[[int, OperationResult | OperationError], None]) -> None:
        """Set the function that `run` calls as soon as an operation has ended, before the passes of others.

        Its arguments are the index of the operation in the call, and what `run` will return for it. Each operation is
        reported once, and those of one adapter in their order. An exception of the function ends `run` with an
        `EngineFault`. Without the feature `early_results` this method does nothing.
        """
        return

    def interrupt(self, between: Callable[[], None]) -> None:
        """Set the function that `run` calls between its passes, when no activations are in memory.

        The function may call `submit` and `decode`, and methods of requests. An exception that it raises ends `run`
        with an `EngineFault`. Without the feature `interrupt` this method does nothing.
        """
        return

    # Adapters as a model

    def as_model(self) -> "TwinkleModel":
        """Return the adapters as a model, whose methods take `adapter_name=`: the name of a reference.

        It has the methods of `TwinkleModel` that neither add adapters nor use files, and `drop_forward`, which frees
        the graph of an adapter's last `forward`. An error of one adapter never changes another; an optimizer that
        cannot make a step is refused when it is set.

        Raises:
            Unsupported: the engine does not have the feature `model`.
        """
        raise Unsupported(f"{type(self).__name__}: adapters have no components; its features do not include 'model'")

    def progress(self, adapter: AdapterRef) -> Progress:
        """Return how far the training of an adapter is.

        Raises:
            Unsupported: the engine does not have the feature `model`.
        """
        raise Unsupported(f"{type(self).__name__}: adapters have no counters; its features do not include 'model'")

    # State

    @abstractmethod
    def snapshot(self, adapter: AdapterRef, *, gradient: bool = True) -> SavedAdapter:
        """Copy the complete state of an adapter: specification, weights, optimizer, scheduler and counters.

        With the feature `model`, the state of metrics is included; components themselves are not, and whoever restores
        the copy must set them before. The graph of a last `forward` is not included either.

        Args:
            adapter: the adapter.
            gradient: include pending gradients, and what metrics have not seen yet.
        """

    @abstractmethod
    def read_spec(self, folder: Path) -> AdapterSpec | None:
        """Return the specification in a written snapshot; None if the folder holds no snapshot.

        Raises:
            CheckpointError: the snapshot is damaged, or was written by a newer version.
        """

    @abstractmethod
    def restore(self, adapter: AdapterRef, folder: Path) -> None:
        """Replace the state of an adapter by a written snapshot, whole or not at all.

        Raises:
            CheckpointError: files are missing or damaged, or belong to an adapter of other layers, rank or sizes.
        """

    @abstractmethod
    def export(self, adapter: AdapterRef, base: str) -> SavedAdapter:
        """Copy the weights of an adapter in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

        The copy of a full model is a folder of transformers: `config.json`, `model.safetensors` and the tokenizer. Its
        snapshot has the same files, beside those of the training state.

        Args:
            adapter: the adapter.
            base: `base_model_name_or_path` of the files.
        """

    @abstractmethod
    def load(self, adapter: AdapterRef, folder: Path) -> None:
        """Replace the weights of an adapter by files in PEFT's format, whole or not at all; its optimizer stays.

        Raises:
            CheckpointError: files are missing or damaged, or belong to another model or to an adapter of other shapes.
        """

    # Sampling

    @abstractmethod
    def version(self, adapter: AdapterRef) -> AdapterVersion:
        """Return the present weights of an adapter, for `submit`."""

    @abstractmethod
    def read_version(self, folder: Path) -> AdapterVersion:
        """Read weights in PEFT's format, for `submit`.

        Raises:
            CheckpointError: files are missing or damaged, or belong to another model.
            Unsupported: the files hold more than the engine can sample with.
        """

    @abstractmethod
    def submit(
        self,
        tokens: Sequence[int],
        params: SamplingParams | Mapping[str, Any],
        version: AdapterVersion | None = None,
        *,
        cache_salt: str | None = None,
    ) -> SampleRequest:
        """Begin to sample a prompt; `decode` makes progress.

        Args:
            tokens: the prompt.
            params: sampling parameters; a mapping is read by `SamplingParams.from_dict`. `max_tokens=None` samples up
                to the end of the context, or as much as memory allows; `max_tokens=0` scores the prompt only. At the
                end of the context a sample ends with the reason "length". Requests with a seed draw the same tokens
                whatever is sampled beside them. `repetition_penalty`, `sampled_logprobs` and `raw_logprobs` may be
                refused.
            version: weights of an adapter; None samples from the base model.
            cache_salt: names the owner of the prompt. An engine that uses what it has computed of one prompt for
                another does so only for requests with equal salts (None is a salt of its own): neither `cached_tokens`
                nor the time of a request may depend on the content of prompts with other salts. The numbers do not
                depend on it.

        Raises:
            ArgumentError: a parameter is unknown.
            ValueError: a parameter is out of range; `SamplingParams` raises it.
            CapacityError: the sequence does not fit into memory.
            DataError: the prompt is empty, longer than the context, or holds an id outside of the vocabulary.
            Unsupported: a parameter needs a feature that the engine does not have, or is one that it may refuse.
        """

    @abstractmethod
    def decode(self) -> bool:
        """Take one step for all requests; return False if there was nothing to do.

        A request whose computation fails is done, and its `result` raises the error.

        Raises:
            EngineFault: the device has failed.
        """
