"""What the configurations of all recipes have in common: the parts of a run, each with type, default and meaning."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from twinkle_recipes.config.rows import DataConfig
from twinkle_recipes.config.strict import Arguments, Count, Positive, Strict, Text


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
