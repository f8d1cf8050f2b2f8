"""The keys that the configurations of all recipes have in common, and those of `sft`: type, default and meaning."""

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
    """A pydantic model without unknown keys. Assignments are checked like constructor arguments.

    Where there is a key `name` or `id`, a text alone stands for a mapping with that key.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys_only(cls, values: Any) -> Any:
        if isinstance(values, str) and (key := next((key for key in ("name", "id") if key in cls.model_fields), "")):
            return {key: values}
        if not isinstance(values, dict):
            return values
        known = list(cls.model_fields)
        for key in values:
            if key not in known:
                close = nearest(str(key), known, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
                raise ConfigError(f"unknown key {key!r}; {hint}")
        return values


SELF_COGNITION = "builtin://self-cognition"
NAMES = ("SelfCognitionProcessor", {"model_name": "Glow", "model_author": "the Twinkle founders"})


class DataConfig(Strict):
    """Which rows, how they become conversations, and how those become tokens."""

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
        description="Component of kind `preprocessor`; none: rows hold `messages` (by default one that fills in the "
        "names of `builtin://self-cognition`)",
    )
    preprocessor_args: Arguments = Field(default={}, description="Keyword arguments of the preprocessor")
    args: Arguments = Field(
        default={}, description="Further keyword arguments of the data set, such as `size` of `builtin://arithmetic`"
    )
    template: str = Field(default="Template", description="Component of kind `template`")
    template_args: Arguments = Field(
        default={}, description="Further keyword arguments of the template, such as `loss_scale`"
    )
    max_length: Positive = Field(default=2048, description="Longest row, in tokens")
    truncation: Literal["raise", "left", "right", "split", "delete"] = Field(
        default="right", description="What happens to longer rows"
    )
    padding_free: bool = Field(
        default=False, description="Rows of a pass one after the other instead of filled up to one length"
    )
    shuffle: bool = Field(
        default=True, description="Another order of the rows in each epoch, the same for the same seed"
    )
    shuffle_buffer: Positive | None = Field(
        default=None, description="Of a stream: from how many rows the next is drawn; by default 1000"
    )
    eval_fraction: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Part of the rows that is never trained on but evaluated; 0: none (a stream needs 0)",
    )
    eval_id: str | None = Field(
        default=None, description="Another data set to evaluate on, instead of a part of this one"
    )
    eval_split: str | None = Field(default=None, description="Its split; alone: that split of the data set `id`")
    eval_args: Arguments = Field(default={}, description="Its keyword arguments, beside and instead of those in `args`")

    @model_validator(mode="before")
    @classmethod
    def _names_filled_in(cls, values: Any) -> Any:
        """Give our own data set, whose rows have gaps for names, what fills them."""
        default = cls.model_fields["id"].default
        if not isinstance(values, dict) or values.get("id", default) != SELF_COGNITION:
            return values
        if values.get("preprocessor", NAMES[0]) != NAMES[0]:
            return values
        given = values.get("preprocessor_args") or {}
        return {**values, "preprocessor": NAMES[0], "preprocessor_args": {**NAMES[1], **given}}

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
    """Return what a `slice` key means: a count, `start:stop` or `start:stop:step`; None is everything.

    Raises:
        ValueError: it is none of these.
    """
    if value is None or isinstance(value, int):
        return slice(value)
    try:
        parts = [int(part) if part.strip() else None for part in value.split(":")]
        if len(parts) > 3 or (len(parts) == 3 and parts[2] == 0):
            raise ValueError
    except ValueError as error:
        raise ValueError(f"slice {value!r}: write a count, `start:stop` or `start:stop:step`") from error
    return slice(*parts)


class ModelConfig(Strict):
    """Which model, and in which precision."""

    id: str = Field(
        default="builtin://smollm2-135m-instruct", description="Folder, `hf://org/name`, `ms://org/name` or builtin"
    )
    type: str = Field(default="TransformersModel", description="Component of kind `model`")
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = Field(
        default="auto", description="Precision of the forward pass; auto: bf16 where the hardware has it, else no"
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="Precision of the frozen and trained weights; by default the model class decides"
    )
    gradient_checkpointing: Literal["auto"] | bool = Field(
        default="auto", description="Recompute activations: less memory, more time; auto: where they would not fit"
    )
    args: Arguments = Field(default={}, description="Further keyword arguments of the model class")


class LoraConfig(Strict):
    """Low-rank adapters (arXiv:2106.09685)."""

    rank: Positive = Field(default=16, description="Rank of the update")
    alpha: float = Field(default=32.0, gt=0, description="The update is scaled by alpha / rank")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout before the update")
    target_modules: str | list[str] = Field(
        default="all-linear", description="Which modules: `all-linear`, names, or a regex"
    )
    init_from: Text | None = Field(
        default=None,
        description="Folder of a trained adapter to go on with, which has its own rank, alpha, dropout and modules",
    )

    @model_validator(mode="after")
    def _nothing_beside_a_trained_one(self) -> Self:
        others = self.model_dump(exclude={"init_from"})
        if self.init_from is not None and others != LoraConfig().model_dump(exclude={"init_from"}):
            given = ", ".join(key for key, value in others.items() if value != LoraConfig.model_fields[key].default)
            raise ValueError(f"the adapter in {self.init_from} has its own {given}; leave that out")
        return self


class OptimizerConfig(Strict):
    """How parameters are updated."""

    name: str = Field(default="AdamW", description="Component of kind `optimizer`")
    lr: float = Field(default=2e-4, gt=0, description="Peak learning rate")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay")
    args: Arguments = Field(default={}, description="Further keyword arguments of the optimizer")


class SchedulerConfig(Strict):
    """How the learning rate changes."""

    name: str = Field(default="CosineWarmupScheduler", description="Component of kind `scheduler`")
    warmup_steps: Count | None = Field(default=None, description="Steps until the peak; instead of `warmup_ratio`")
    warmup_ratio: float = Field(
        default=0.05, ge=0, lt=1, description="Part of all steps until the peak, of a scheduler that warms up"
    )
    args: Arguments = Field(default={}, description="Further keyword arguments of the scheduler")

    def warmup(self, total_steps: int) -> int:
        """Return the number of warm-up steps in a run of `total_steps`."""
        return self.warmup_steps if self.warmup_steps is not None else round(self.warmup_ratio * total_steps)


class LossConfig(Strict):
    """What is minimised."""

    name: str = Field(default="CrossEntropyLoss", description="Component of kind `loss`")
    args: Arguments = Field(default={}, description="Keyword arguments of the loss")


class SamplerConfig(Strict):
    """How the questions are answered."""

    name: str = Field(default="TorchSampler", description="Component of kind `sampler`")
    max_tokens: Positive = Field(default=48, description="Longest answer, in tokens")
    temperature: float = Field(default=0.0, ge=0, description="0: the most probable token each time")


class MeshConfig(Strict):
    """How the processes that torchrun starts share the model."""

    dp: Positive | None = Field(
        default=None, description="Groups of ranks that hold the whole model; by default all ranks, one a group"
    )
    fsdp: Positive | None = Field(default=None, description="Ranks that hold a part of each parameter (FSDP2)")


class Part(NamedTuple):
    """A component that a configuration names; `args`, where they are known, are those of its constructor."""

    kind: str
    name: str
    args: Arguments | None = None


class RunConfig(Strict):
    """The keys of every recipe. A recipe's own configuration adds keys; the class variables say what it is."""

    recipe: ClassVar[str] = ""
    """Its name, as `twinkle run` knows it."""
    takes_streams: ClassVar[bool] = False
    """Whether `data` may be a stream."""
    takes_packs: ClassVar[bool] = False
    """Whether a data set may put several rows into one."""
    loss_inputs: ClassVar[tuple[str, ...]] = ()
    """What the loop gives the loss, by name, beside the batch."""
    takes_ranks: ClassVar[bool] = False
    """Whether several processes may train one model."""
    samples: ClassVar[bool] = False
    """Whether rows are prompts that are sampled from, and not conversations with answers."""
    free: ClassVar[frozenset[str]] = frozenset(
        {
            "log_every", "save_every", "save_total_limit", "eval_every", "trackers", "micro_batch_size", "resume_from",
        }
    )  # fmt: skip
    """Keys that change no number of the training; they may differ even within one run."""
    kept_in_checkpoints: ClassVar[frozenset[str]] = frozenset({"lora", "optimizer", "scheduler", "max_steps"})
    """Keys whose values a checkpoint holds (the schedule's length is that of max_steps): it would win."""

    _resolved: dict[tuple[str, str], Any] = PrivateAttr(default_factory=dict)

    model: ModelConfig = Field(default_factory=ModelConfig, description="Which model, and in which precision")
    data: DataConfig = Field(default_factory=DataConfig, description="Which rows, and how they become tokens")
    lora: LoraConfig | None = Field(default_factory=LoraConfig, description="Adapter; null: train all parameters")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="How parameters are updated")
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig, description="How the learning rate changes")
    loss: LossConfig = Field(default_factory=LossConfig, description="What is minimised")
    processor: str = Field(default="InputProcessor", description="Component of kind `processor`")
    metrics: list[str] = Field(default=[], description="Components of kind `metric`, beside the model's own")
    trackers: list[str | Arguments] = Field(
        default=["JsonlTracker", "TensorBoardTracker"],
        description="Components of kind `tracker`: names, or mappings with `type` and the tracker's arguments",
    )
    batch_size: Positive = Field(default=8, description="Rows of one forward and backward pass, over all processes")
    micro_batch_size: Positive | None = Field(
        default=None, description="Rows in memory at once, of each process; the result is the same"
    )
    max_steps: Positive | None = Field(default=None, description="Optimizer steps at most, even if epochs are left")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are scaled down to this global norm")
    eval_every: Count = Field(default=50, description="Steps between evaluations; 0: only after the last step")
    save_every: Count = Field(
        default=0, description="Steps between checkpoints; 0: only at the best evaluation and at the end"
    )
    save_total_limit: Positive | None = Field(
        default=3, description="Checkpoints kept, the newest; best and last always stay"
    )
    log_every: Positive = Field(default=1, description="Steps between lines where the output is not a terminal")
    seed: int = Field(
        default=42, ge=0, lt=2**32, description="Of the order of rows, the held-out rows and new adapter weights"
    )
    on_nonfinite: Literal["raise", "skip"] = Field(
        default="raise", description="NaN or infinite loss: stop and keep the batch, or leave the step out"
    )
    resume_from: str | None = Field(
        default=None,
        description="Run folder to go on in, from its last checkpoint; or a checkpoint to start afresh from",
    )

    @field_validator("trackers")
    @classmethod
    def _trackers_with_a_name(cls, value: list[str | Arguments]) -> list[str | Arguments]:
        for tracker in value:
            if isinstance(tracker, dict) and not isinstance(tracker.get("type"), str):
                raise ValueError(f"the tracker {tracker!r} has no `type`; write for example {{type: JsonlTracker}}")
        return value

    @property
    def run_folder(self) -> Path | None:
        """The run folder to go on in, where `resume_from` is one; else None, and the run gets a fresh folder."""
        folder = Path(self.resume_from) if self.resume_from is not None else None
        return folder if folder is not None and (folder / "checkpoints").is_dir() else None

    @property
    def in_memory(self) -> dict[str, int]:
        """How many rows a pass may hold in memory, as keyword arguments."""
        return {"micro_batch_size": self.micro_batch_size} if self.micro_batch_size is not None else {}

    def component(self, kind: str, name: str) -> Any:
        """Return the component that a key names; each is resolved once, so the run uses what was checked before."""
        key = (kind, name)
        if key not in self._resolved:
            self._resolved[key] = registry().resolve(name, kind)
        return self._resolved[key]

    def build(self, kind: str, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Instantiate the component that a key names, see `Registry.build`."""
        return registry().build(self.component(kind, name), kind, *args, **kwargs)

    def models(self) -> Iterator[str]:
        """Yield the id of every model that is loaded."""
        yield self.model.id

    def parts(self) -> Iterator[Part]:
        """Yield every component that the configuration names, in the order of use."""
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

    gradient_accumulation_steps: Positive = Field(default=1, description="Batches of one optimizer step")
    epochs: Positive = Field(default=1, description="How often each row is seen; not for a stream")
    max_steps: Positive | None = Field(
        default=None, description="Optimizer steps at most, even if epochs are left; of a stream: exactly"
    )
    questions: list[str] = Field(default=[], description="Asked before and after training, shown side by side")
    sampler: SamplerConfig = Field(default_factory=SamplerConfig, description="How the questions are answered")
    mesh: MeshConfig = Field(default_factory=MeshConfig, description="How several processes share the model")

    @property
    def device_mesh(self) -> "DeviceMesh | None":
        """The mesh of the processes, or None where nothing is said of it.

        Raises:
            MeshError: there is no such mesh.
        """
        if self.mesh.dp is None and self.mesh.fsdp is None:
            return None
        from twinkle.mesh import DeviceMesh

        return DeviceMesh.from_sizes(dp_size=self.mesh.dp or 1, fsdp_size=self.mesh.fsdp)

    def parts(self) -> Iterator[Part]:
        """See `RunConfig.parts`; the sampler takes part where questions are asked."""
        yield from super().parts()
        if self.questions:
            yield Part("sampler", self.sampler.name)

    @model_validator(mode="after")
    def _divisible(self) -> "SFTConfig":
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            raise ValueError(
                f"micro_batch_size {self.micro_batch_size} is larger than batch_size {self.batch_size}; "
                "micro-batches are parts of a batch"
            )
        return self
