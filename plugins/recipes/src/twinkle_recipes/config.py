"""The configuration keys that all recipes share, and those of `sft`: type, default and meaning."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from twinkle._registry import registry
from twinkle.errors import ConfigError
from twinkle_registry import nearest

if TYPE_CHECKING:
    from twinkle.mesh import DeviceMesh


Arguments = dict[str, Any]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]


class Strict(BaseModel):
    """A pydantic model that rejects unknown keys and validates assignments like constructor arguments.

    In a model with a key `name` or `id`, a plain string is read as a mapping with that key.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys_only(cls, values: Any) -> Any:
        if isinstance(values, str) and (key := next((key for key in ("name", "id") if key in cls.model_fields), "")):
            return {key: values}
        if not isinstance(values, dict):
            return values
        keys = list(cls.model_fields)
        for key in values:
            if key not in keys:
                close = nearest(str(key), keys, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(keys)}"
                raise ConfigError(f"unknown key {key!r}; {hint}")
        return values


SELF_COGNITION = "builtin://self-cognition"
NAMES = ("SelfCognitionProcessor", {"model_name": "Glow", "model_author": "the Twinkle founders"})


class DataConfig(Strict):
    """Data set, preprocessing and tokenization."""

    id: str = Field(default=SELF_COGNITION, description="File, folder, `hf://org/name`, `ms://org/name` or builtin")
    type: str = Field(default="Dataset", description="Component of kind `dataset`")
    loader: str = Field(default="DataLoader", description="Component of kind `dataloader`")
    subset: str = Field(default="default", description="Subset (configuration) of the data set")
    split: str = Field(default="train", description="Split of the data set")
    slice: str | Positive | None = Field(
        default=None, description="Rows to use: a count, or `start:stop` or `start:stop:step`"
    )
    preprocessor: str | None = Field(
        default=None,
        description="Component of kind `preprocessor`; null: rows already contain `messages` (for "
        "`builtin://self-cognition` the default fills in the names)",
    )
    preprocessor_args: Arguments = Field(default={}, description="Keyword arguments of the preprocessor")
    args: Arguments = Field(
        default={}, description="Additional keyword arguments of the data set, such as `size` of `builtin://arithmetic`"
    )
    template: str = Field(default="Template", description="Component of kind `template`")
    template_args: Arguments = Field(
        default={}, description="Additional keyword arguments of the template, such as `loss_scale`"
    )
    max_length: Positive = Field(default=2048, description="Maximum row length in tokens")
    truncation: Literal["raise", "left", "right", "split", "delete"] = Field(
        default="right", description="Handling of rows longer than `max_length`"
    )
    padding_free: bool = Field(
        default=False, description="Concatenate the rows of a pass instead of padding them to the same length"
    )
    shuffle: bool = Field(default=True, description="Shuffle the rows in each epoch; the order is determined by `seed`")
    shuffle_buffer: Positive | None = Field(
        default=None, description="Size of the shuffle buffer of a stream, in rows; default 1000"
    )
    eval_fraction: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Fraction of the rows held out for evaluation; 0: none (required for a stream)",
    )
    eval_id: str | None = Field(
        default=None, description="Separate evaluation data set, instead of held-out rows of `id`"
    )
    eval_split: str | None = Field(
        default=None, description="Split of the evaluation data set; without `eval_id`: this split of `id`"
    )
    eval_args: Arguments = Field(
        default={}, description="Keyword arguments of the evaluation data set; they override `args`"
    )

    @model_validator(mode="before")
    @classmethod
    def _names_filled_in(cls, values: Any) -> Any:
        """Set the preprocessor that fills the name placeholders of `builtin://self-cognition`."""
        default = cls.model_fields["id"].default
        if not isinstance(values, dict) or values.get("id", default) != SELF_COGNITION:
            return values
        if values.get("preprocessor", NAMES[0]) != NAMES[0]:
            return values
        arguments = values.get("preprocessor_args") or {}
        return {**values, "preprocessor": NAMES[0], "preprocessor_args": {**NAMES[1], **arguments}}

    @field_validator("slice")
    @classmethod
    def _readable_slice(cls, value: str | int | None) -> str | int | None:
        if isinstance(value, str):
            parse_slice(value)
        return value

    @property
    def separate_eval(self) -> bool:
        """Whether evaluation rows come from another data set or split."""
        return self.eval_id is not None or self.eval_split is not None


def parse_slice(value: str | int | None) -> slice:
    """Parse a `slice` key: a count, `start:stop` or `start:stop:step`; None selects all rows.

    Raises:
        ValueError: `value` has none of these forms.
    """
    if value is None or isinstance(value, int):
        return slice(value)
    try:
        parts = [int(part) if part.strip() else None for part in value.split(":")]
        if len(parts) > 3 or (len(parts) == 3 and parts[2] == 0):
            raise ValueError
    except ValueError as error:
        raise ValueError(f"slice must be a count, `start:stop` or `start:stop:step`, got {value!r}") from error
    return slice(*parts)


class ModelConfig(Strict):
    """Base model and its precision."""

    id: str = Field(
        default="builtin://smollm2-135m-instruct", description="Folder, `hf://org/name`, `ms://org/name` or builtin"
    )
    type: str = Field(default="TransformersModel", description="Component of kind `model`")
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = Field(
        default="auto",
        description="Precision of the forward pass; auto: the default of the model class (TransformersModel: bf16 if "
        "the hardware supports it, else no)",
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="Precision of the frozen and trained weights; default: chosen by the model class"
    )
    gradient_checkpointing: Literal["auto"] | bool = Field(
        default="auto",
        description="Recompute activations in the backward pass; auto: only if they do not fit in memory",
    )
    args: Arguments = Field(default={}, description="Additional keyword arguments of the model class")


class LoraConfig(Strict):
    """Low-rank adapters (arXiv:2106.09685)."""

    rank: Positive = Field(default=16, description="Rank of the update")
    alpha: float = Field(default=32.0, gt=0, description="The update is scaled by alpha / rank")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout on the input of the adapter")
    target_modules: str | list[str] = Field(
        default="all-linear", description="Modules with an adapter: `all-linear`, a list of names, or a regex"
    )
    init_from: Text | None = Field(
        default=None,
        description="Folder of a trained adapter to start from; it determines rank, alpha, dropout and modules",
    )

    @model_validator(mode="after")
    def _nothing_beside_a_trained_one(self) -> Self:
        others = self.model_dump(exclude={"init_from"})
        if self.init_from is not None and others != LoraConfig().model_dump(exclude={"init_from"}):
            changed = ", ".join(key for key, value in others.items() if value != LoraConfig.model_fields[key].default)
            raise ValueError(f"the adapter in {self.init_from} determines {changed}; remove these keys")
        return self


class OptimizerConfig(Strict):
    """Optimizer and its arguments."""

    name: str = Field(default="AdamW", description="Component of kind `optimizer`")
    lr: float = Field(default=2e-4, gt=0, description="Peak learning rate")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay")
    args: Arguments = Field(default={}, description="Additional keyword arguments of the optimizer")


class SchedulerConfig(Strict):
    """Learning-rate schedule."""

    name: str = Field(default="CosineWarmupScheduler", description="Component of kind `scheduler`")
    warmup_steps: Count | None = Field(default=None, description="Warm-up steps; overrides `warmup_ratio`")
    warmup_ratio: float = Field(
        default=0.05, ge=0, lt=1, description="Fraction of all steps used for warm-up, if the scheduler has one"
    )
    args: Arguments = Field(default={}, description="Additional keyword arguments of the scheduler")

    def warmup(self, total_steps: int) -> int:
        """Return the number of warm-up steps in a run of `total_steps`."""
        return self.warmup_steps if self.warmup_steps is not None else round(self.warmup_ratio * total_steps)


class LossConfig(Strict):
    """Loss function and its arguments."""

    name: str = Field(default="CrossEntropyLoss", description="Component of kind `loss`")
    args: Arguments = Field(default={}, description="Keyword arguments of the loss")


class SamplerConfig(Strict):
    """Sampling of the answers to `questions`."""

    name: str = Field(default="TorchSampler", description="Component of kind `sampler`")
    max_tokens: Positive = Field(default=48, description="Maximum answer length in tokens")
    temperature: float = Field(default=0.0, ge=0, description="Sampling temperature; 0: greedy")


class MeshConfig(Strict):
    """Distribution of the model over the processes that torchrun starts."""

    dp: Positive | None = Field(
        default=None, description="Number of data-parallel replicas; default: one per rank, or 1 if `fsdp` is set"
    )
    fsdp: Positive | None = Field(
        default=None, description="Number of ranks that each parameter is sharded over (FSDP2)"
    )


class Part(NamedTuple):
    """A component named in a configuration; `args` are its constructor arguments, if they are known."""

    kind: str
    name: str
    args: Arguments | None = None


class RunConfig(Strict):
    """The keys of every recipe. Subclasses add keys; the class variables describe the recipe."""

    recipe: ClassVar[str] = ""
    """Name of the recipe in `twinkle run`."""
    takes_streams: ClassVar[bool] = False
    """Whether `data` may be a stream."""
    takes_packs: ClassVar[bool] = False
    """Whether a data set may pack several rows into one."""
    loss_inputs: ClassVar[tuple[str, ...]] = ()
    """Names of the arguments that the training loop passes to the loss in addition to the batch."""
    takes_ranks: ClassVar[bool] = False
    """Whether several processes may train one model."""
    samples: ClassVar[bool] = False
    """Whether rows are prompts to sample from, instead of conversations with answers."""
    free: ClassVar[frozenset[str]] = frozenset(
        {
            "log_every", "save_every", "save_total_limit", "eval_every", "trackers", "micro_batch_size", "resume_from",
        }
    )  # fmt: skip
    """Keys that do not affect the training result; they may change when a run is resumed."""
    kept_in_checkpoints: ClassVar[frozenset[str]] = frozenset({"lora", "optimizer", "scheduler", "max_steps"})
    """Keys whose values a checkpoint contains (`max_steps` sets the length of the schedule) and overrides."""

    _resolved: dict[tuple[str, str], Any] = PrivateAttr(default_factory=dict)

    model: ModelConfig = Field(default_factory=ModelConfig, description="Base model and its precision")
    data: DataConfig = Field(default_factory=DataConfig, description="Data set and tokenization")
    lora: LoraConfig | None = Field(default_factory=LoraConfig, description="LoRA adapter; null: train all parameters")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="Optimizer")
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig, description="Learning-rate schedule")
    loss: LossConfig = Field(default_factory=LossConfig, description="Loss function")
    processor: str = Field(default="InputProcessor", description="Component of kind `processor`")
    metrics: list[str] = Field(default=[], description="Components of kind `metric`, in addition to those of the model")
    trackers: list[str | Arguments] = Field(
        default=["JsonlTracker", "TensorBoardTracker"],
        description="Components of kind `tracker`: names, or mappings with `type` and the tracker's arguments",
    )
    batch_size: Positive = Field(default=8, description="Rows per forward and backward pass, over all processes")
    micro_batch_size: Positive | None = Field(
        default=None, description="Rows per process in memory at once; does not affect the result"
    )
    max_steps: Positive | None = Field(
        default=None, description="Maximum number of optimizer steps, even if epochs remain"
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are clipped to this global norm")
    eval_every: Count = Field(default=50, description="Steps between evaluations; 0: only after the last step")
    save_every: Count = Field(
        default=0, description="Steps between checkpoints; 0: only after the best evaluation and at the end"
    )
    save_total_limit: Positive | None = Field(
        default=3, description="Number of recent checkpoints to keep; the best and the last are always kept"
    )
    log_every: Positive = Field(default=1, description="Steps between log lines if the output is not a terminal")
    seed: int = Field(
        default=42, ge=0, lt=2**32, description="Seed for row order, held-out rows and initial adapter weights"
    )
    on_nonfinite: Literal["raise", "skip"] = Field(
        default="raise", description="On a NaN or infinite loss: stop and save the batch, or skip the step"
    )
    resume_from: str | None = Field(
        default=None,
        description="Run folder to resume from its last checkpoint, or a checkpoint that a new run starts from",
    )

    @field_validator("trackers")
    @classmethod
    def _trackers_with_a_name(cls, value: list[str | Arguments]) -> list[str | Arguments]:
        for tracker in value:
            if isinstance(tracker, dict) and not isinstance(tracker.get("type"), str):
                raise ValueError(f"a tracker must have a `type`, got {tracker!r}; for example {{type: JsonlTracker}}")
        return value

    @property
    def run_folder(self) -> Path | None:
        """The run folder to resume, if `resume_from` is one; None if the run uses a new folder."""
        folder = Path(self.resume_from) if self.resume_from is not None else None
        return folder if folder is not None and (folder / "checkpoints").is_dir() else None

    @property
    def in_memory(self) -> dict[str, int]:
        """`micro_batch_size` as keyword arguments of a forward or backward pass."""
        return {"micro_batch_size": self.micro_batch_size} if self.micro_batch_size is not None else {}

    def component(self, kind: str, name: str) -> Any:
        """Return the component `name`. Each is resolved once, so that the run uses the component that was validated."""
        key = (kind, name)
        if key not in self._resolved:
            self._resolved[key] = registry().resolve(name, kind)
        return self._resolved[key]

    def build(self, kind: str, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Instantiate the component `name`, see `Registry.build`."""
        return registry().build(self.component(kind, name), kind, *args, **kwargs)

    def models(self) -> Iterator[str]:
        """Yield the id of every model that is loaded."""
        yield self.model.id

    def parts(self) -> Iterator[Part]:
        """Yield every component named in the configuration, in order of use."""
        yield Part("recipe", self.recipe)
        yield Part("dataset", self.data.type)
        if self.data.preprocessor is not None:
            yield Part("preprocessor", self.data.preprocessor, self.data.preprocessor_args)
        yield Part("template", self.data.template)
        yield Part("dataloader", self.data.loader)
        yield Part("model", self.model.type)
        yield Part("processor", self.processor)
        yield Part("loss", self.loss.name, self.loss.args)
        yield Part("optimizer", self.optimizer.name, self.optimizer.args)
        yield Part("scheduler", self.scheduler.name, self.scheduler.args)
        yield from (Part("metric", name) for name in self.metrics)
        for tracker in self.trackers:
            yield Part("tracker", tracker if isinstance(tracker, str) else tracker["type"])


__all__ = ["DataConfig", "SFTConfig", "parse_slice"]


class SFTConfig(RunConfig):
    """Supervised fine-tuning on conversations."""

    recipe = "sft"
    takes_streams = True
    takes_packs = True
    takes_ranks = True
    free = RunConfig.free | {"questions", "sampler", "mesh"}
    kept_in_checkpoints = RunConfig.kept_in_checkpoints | {"epochs", "gradient_accumulation_steps"}

    gradient_accumulation_steps: Positive = Field(default=1, description="Batches per optimizer step")
    epochs: Positive = Field(default=1, description="Passes over the data; not for a stream")
    max_steps: Positive | None = Field(
        default=None, description="Maximum number of optimizer steps, even if epochs remain; required for a stream"
    )
    questions: list[str] = Field(
        default=[], description="Prompts answered before and after training, shown side by side"
    )
    sampler: SamplerConfig = Field(default_factory=SamplerConfig, description="Sampling of the answers to `questions`")
    mesh: MeshConfig = Field(default_factory=MeshConfig, description="Distribution of the model over processes")

    @property
    def device_mesh(self) -> "DeviceMesh | None":
        """The device mesh, or None if neither `dp` nor `fsdp` is set.

        Raises:
            MeshError: the sizes do not form a valid mesh.
        """
        if self.mesh.dp is None and self.mesh.fsdp is None:
            return None
        from twinkle.mesh import DeviceMesh

        return DeviceMesh.from_sizes(dp_size=self.mesh.dp or 1, fsdp_size=self.mesh.fsdp)

    def parts(self) -> Iterator[Part]:
        """See `RunConfig.parts`; includes the sampler if there are `questions`."""
        yield from super().parts()
        if self.questions:
            yield Part("sampler", self.sampler.name)

    @model_validator(mode="after")
    def _divisible(self) -> "SFTConfig":
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            raise ValueError(
                f"micro_batch_size must be at most batch_size ({self.batch_size}), got {self.micro_batch_size}"
            )
        return self
