"""The configuration of the recipe `gkd`: type, default and meaning of each key."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from twinkle_recipes.config import Arguments, LossConfig, ModelConfig, OptimizerConfig, Part, Positive, RunConfig
from twinkle_recipes.policy.config import DrawingConfig, PromptsConfig


class ConversationsConfig(PromptsConfig):
    """Conversations: the student answers their prompts, or learns from the answers they contain."""

    id: str = Field(
        default="builtin://arithmetic", description="File, folder, `hf://org/name`, `ms://org/name` or builtin"
    )
    max_length: Positive = Field(default=1024, description="Maximum row length in tokens")
    truncation: Literal["raise", "left", "delete"] = Field(
        default="raise", description="Handling of longer rows: raise an error, cut the beginning, or drop them"
    )


class TeacherConfig(ModelConfig):
    """Teacher model, whose distributions the student learns."""

    id: str = Field(description="Teacher model with the student's vocabulary: folder, `hf://org/name`, ...")
    topk: Positive | None = Field(
        default=None,
        description="Use only the k most probable tokens of the teacher, to save memory; the rest is one event",
    )


class DistillationLossConfig(LossConfig):
    """Loss function and its arguments."""

    name: str = Field(default="GKDLoss", description="Component of kind `loss` that takes teacher outputs")
    args: Arguments = Field(
        default={"beta": 0.5}, description="Keyword arguments of the loss; beta 0: KL(teacher, student), 1: the reverse"
    )


class DistillationOptimizerConfig(OptimizerConfig):
    """Optimizer and its arguments."""

    lr: float = Field(default=5e-5, gt=0, description="Peak learning rate")


class DistillationConfig(RunConfig):
    """Distillation: the student learns the teacher's token distributions, on given or on its own answers."""

    recipe = "gkd"
    kept_in_checkpoints = RunConfig.kept_in_checkpoints | {"epochs"}

    data: ConversationsConfig = Field(default_factory=ConversationsConfig, description="Conversations and tokenization")
    teacher: TeacherConfig = Field(description="Teacher model")
    on_policy: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Fraction of the steps in which the student samples the answers; 0: off-policy; 1: rows do not "
        "need answers",
    )
    sampling: DrawingConfig = Field(default_factory=DrawingConfig, description="Sampling of the student's answers")
    loss: DistillationLossConfig = Field(default_factory=DistillationLossConfig, description="Loss function")
    optimizer: DistillationOptimizerConfig = Field(default_factory=DistillationOptimizerConfig, description="Optimizer")
    epochs: Positive = Field(default=1, description="Passes over the data")

    @property
    def samples(self) -> bool:
        """Whether all rows are prompts: see `RunConfig.samples`."""
        return self.on_policy == 1

    @property
    def takes_packs(self) -> bool:
        """Whether prompts of rows are not needed, see `RunConfig.takes_packs`."""
        return self.on_policy == 0

    @property
    def loss_inputs(self) -> tuple[str, ...]:
        """See `RunConfig.loss_inputs`."""
        full_distributions = self.teacher.topk is None
        return ("teacher_logits",) if full_distributions else ("teacher_topk_logprobs", "teacher_topk_indices")

    def models(self) -> Iterator[str]:
        """See `RunConfig.models`."""
        yield from super().models()
        yield self.teacher.id

    def parts(self) -> Iterator[Part]:
        """See `RunConfig.parts`; includes the sampler if the student samples answers."""
        yield from super().parts()
        yield Part("model", self.teacher.type)
        if self.on_policy > 0:
            yield Part("sampler", self.sampling.name)
