"""The configuration of the recipe `gkd`: each key with its type, default and meaning."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from twinkle_recipes.config import Arguments, LossConfig, ModelConfig, OptimizerConfig, Part, Positive, RunConfig
from twinkle_recipes.policy.config import DrawingConfig, PromptsConfig


class ConversationsConfig(PromptsConfig):
    """Which conversations: the student answers their prompts, or learns from the answers that they have."""

    id: str = Field(
        default="builtin://arithmetic", description="File, folder, `hf://org/name`, `ms://org/name` or builtin"
    )
    max_length: Positive = Field(default=1024, description="Longest row, in tokens")
    truncation: Literal["raise", "left", "delete"] = Field(
        default="raise", description="What happens to longer rows: an error, cut their beginning, leave them out"
    )


class TeacherConfig(ModelConfig):
    """Whose distributions the student learns."""

    id: str = Field(description="The teacher, with the tokens of the student: folder, `hf://org/name`, ...")
    topk: Positive | None = Field(
        default=None,
        description="Take its most probable tokens alone, which needs less memory; the rest counts as one event",
    )


class DistillationLossConfig(LossConfig):
    """What is minimised."""

    name: str = Field(default="GKDLoss", description="Component of kind `loss` that takes a teacher")
    args: Arguments = Field(
        default={"beta": 0.5}, description="Keyword arguments of the loss; beta 0: KL(teacher, student), 1: the reverse"
    )


class DistillationOptimizerConfig(OptimizerConfig):
    """How parameters are updated."""

    lr: float = Field(default=5e-5, gt=0, description="Peak learning rate")


class DistillationConfig(RunConfig):
    """Distillation: the student learns what a teacher thinks of each token, of given answers or of its own."""

    recipe = "gkd"
    kept_in_checkpoints = RunConfig.kept_in_checkpoints | {"epochs"}

    data: ConversationsConfig = Field(
        default_factory=ConversationsConfig, description="Which conversations, and how they become tokens"
    )
    teacher: TeacherConfig = Field(description="Whose distributions the student learns")
    on_policy: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of the steps in which the student samples the answers itself: 0 is off-policy, and with 1 "
        "rows need no answers",
    )
    sampling: DrawingConfig = Field(default_factory=DrawingConfig, description="How the student's answers are drawn")
    loss: DistillationLossConfig = Field(default_factory=DistillationLossConfig, description="What is minimised")
    optimizer: DistillationOptimizerConfig = Field(
        default_factory=DistillationOptimizerConfig, description="How parameters are updated"
    )
    epochs: Positive = Field(default=1, description="How often each row is seen")

    @property
    def samples(self) -> bool:
        """Whether all rows are prompts: see `RunConfig.samples`."""
        return self.on_policy == 1

    @property
    def takes_packs(self) -> bool:
        """Whether no row is asked for its prompt: see `RunConfig.takes_packs`."""
        return self.on_policy == 0

    @property
    def loss_inputs(self) -> tuple[str, ...]:
        """See `RunConfig.loss_inputs`."""
        whole = self.teacher.topk is None
        return ("teacher_logits",) if whole else ("teacher_topk_logprobs", "teacher_topk_indices")

    def models(self) -> Iterator[str]:
        """See `RunConfig.models`."""
        yield from super().models()
        yield self.teacher.id

    def parts(self) -> Iterator[Part]:
        """See `RunConfig.parts`; the sampler takes part where the student answers."""
        yield from super().parts()
        yield Part("model", self.teacher.type)
        if self.on_policy > 0:
            yield Part("sampler", self.sampling.name)
