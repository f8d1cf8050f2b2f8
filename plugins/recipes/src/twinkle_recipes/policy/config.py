"""The configurations of `grpo` and `rloo`: each key with its type, default and meaning."""

import re
from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, model_validator

from twinkle_recipes.config import (
    Arguments,
    Count,
    DataConfig,
    LossConfig,
    OptimizerConfig,
    Part,
    Positive,
    RunConfig,
    SchedulerConfig,
    Strict,
    Text,
)


class PromptsConfig(DataConfig):
    """Which prompts are answered; the truth that rewards read rides along in `user_data`."""

    id: str = Field(default="builtin://sums", description="File, folder, `hf://org/name`, `ms://org/name` or builtin")
    max_length: Positive = Field(default=1024, description="Longest prompt, in tokens")
    truncation: Literal["raise", "left", "delete"] = Field(
        default="raise", description="What happens to longer prompts: an error, cut their beginning, leave them out"
    )


class DrawingConfig(Strict):
    """How answers are drawn."""

    name: str = Field(default="TorchSampler", description="Component of kind `sampler`")
    args: Arguments = Field(default={}, description="Further keyword arguments of the sampler")
    weights: Literal["shared", "own"] = Field(
        default="shared", description="Sample from the module that is trained, or from a copy that each step is synced"
    )
    merge_and_sync: bool = Field(
        default=True, description="Of own weights: send everything with the adapter merged in, or the adapter alone"
    )
    max_tokens: Positive = Field(default=128, description="Longest answer, in tokens")
    temperature: float = Field(default=1.0, gt=0, description="Divides the logits that answers are drawn by")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Draw among the fewest tokens of this probability")
    top_k: Literal[-1] | Positive = Field(default=-1, description="Draw among the k most probable tokens; -1: all")
    stop: Text | list[Text] | None = Field(
        default=None, description="Texts that end an answer, beside the model's own end; the answer is without them"
    )


class SamplingConfig(DrawingConfig):
    """How answers are drawn."""

    temperature: float = Field(default=1.0, gt=0, description="Divides the logits, in sampling and in training")
    num_generations: Positive = Field(default=8, description="Answers to a prompt: its group")


class RewardConfig(Strict):
    """One reward of several."""

    name: str = Field(description="Component of kind `reward`")
    weight: float = Field(default=1.0, description="Its share in the total")
    args: Arguments = Field(default={}, description="Keyword arguments of the reward")

    @property
    def label(self) -> str:
        """What its numbers are called: the name without plugin, module or file."""
        return re.split(r"[#:/]", self.name)[-1]


class ScoringConfig(Strict):
    """How answers are rewarded."""

    name: str = Field(default="RewardGroup", description="Component of kind `reward` that asks the others")
    on_error: Literal["fail", "zero", "drop"] = Field(
        default="fail", description="A reward that raises, is late or gives NaN: stop, count 0, or leave the answer out"
    )
    time_limit: float = Field(default=60.0, gt=0, description="Seconds that a reward has for all answers of a step")
    isolate: list[str] = Field(
        default=[], description="Rewards that run in a process of their own, which is killed when the time is over"
    )


class AdvantageConfig(Strict):
    """How rewards become advantages."""

    name: str = Field(default="GRPOAdvantage", description="Component of kind `advantage`")
    scale: Literal["group", "batch", "none"] = Field(
        default="group", description="Divide by the standard deviation of the group, of the batch, or not"
    )
    args: Arguments = Field(default={}, description="Keyword arguments of the advantage's constructor")


class PolicyLossConfig(LossConfig):
    """What is minimised."""

    name: str = Field(default="GRPOLoss", description="Component of kind `loss`")


class PolicyOptimizerConfig(OptimizerConfig):
    """How parameters are updated."""

    lr: float = Field(default=2e-5, gt=0, description="Peak learning rate")


class PolicySchedulerConfig(SchedulerConfig):
    """How the learning rate changes."""

    warmup_ratio: float = Field(
        default=0.0, ge=0, lt=1, description="Part of all steps until the peak, of a scheduler that warms up"
    )


class GRPOConfig(RunConfig):
    """Reinforcement learning from rewards that a program computes, with advantages within groups of answers."""

    recipe = "grpo"
    samples = True
    free = RunConfig.free | {"completions_every", "completions_shown"}

    data: PromptsConfig = Field(default_factory=PromptsConfig, description="Which prompts, and how they become tokens")
    optimizer: PolicyOptimizerConfig = Field(
        default_factory=PolicyOptimizerConfig, description="How parameters are updated"
    )
    scheduler: PolicySchedulerConfig = Field(
        default_factory=PolicySchedulerConfig, description="How the learning rate changes"
    )
    loss: PolicyLossConfig = Field(default_factory=PolicyLossConfig, description="What is minimised")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig, description="How answers are drawn")
    rewards: list[RewardConfig] = Field(
        default=[RewardConfig(name="ExactMatchReward")],
        min_length=1,
        description="Rewards, each with name, weight and args",
    )
    scoring: ScoringConfig = Field(default_factory=ScoringConfig, description="How answers are rewarded")
    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig, description="How rewards become advantages")
    batch_size: Positive = Field(default=8, description="Prompts of a step, each with `num_generations` answers")
    mini_batch_size: Positive | None = Field(default=None, description="Answers of an update; by default all of a step")
    num_iterations: Positive = Field(default=1, description="How often the answers of a step are trained on")
    max_steps: Positive = Field(default=100, description="Steps: sample, score, train")
    old_logps: Literal["sampler", "trainer"] = Field(
        default="sampler",
        description="Whose log-probabilities the ratio is taken to: the sampler's, or the trainer's own, computed anew "
        "before the first update; then the loss sees both, and may weight by them (`tis_cap`)",
    )
    reference: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Ask the untrained model too, for the KL term; auto: if `loss.args.beta` is above 0. With `lora` "
        "it is the model without its adapter (or with that of `lora.init_from`), else a frozen copy",
    )
    eval_every: Count = Field(default=10, description="Steps between greedy evaluations; 0: only first and last")
    save_every: Count = Field(default=10, description="Steps between checkpoints; 0: only the best and at the end")
    completions_every: Count = Field(default=10, description="Steps between tables of answers; 0: none")
    completions_shown: Positive = Field(default=4, description="Answers in such a table")

    @model_validator(mode="after")
    def _comparable(self) -> Self:
        if self.sampling.num_generations == 1 and self.advantage.name.rpartition("/")[2] == "GRPOAdvantage":
            raise ValueError(
                "sampling.num_generations is 1, but GRPOAdvantage compares the answers to one prompt with each "
                "other; give at least 2, or compare with the whole batch: "
                "advantage {name: ReinforcePlusPlusAdvantage, scale: batch, args: {baseline: false}}"
            )
        return self

    @property
    def asks_reference(self) -> bool:
        """Whether log-probabilities of the untrained model are needed."""
        return self.reference == "always" or (self.reference == "auto" and self._beta > 0)

    @property
    def _beta(self) -> float:
        beta = self.loss.args.get("beta")
        return beta if isinstance(beta, int | float) else 0  # the loss itself refuses anything else

    @property
    def answers(self) -> int:
        """Answers of a step."""
        return self.batch_size * self.sampling.num_generations

    @property
    def updates(self) -> int:
        """Optimizer updates of a step."""
        return self.num_iterations * -(-self.answers // (self.mini_batch_size or self.answers))

    @property
    def loss_inputs(self) -> tuple[str, ...]:
        """See `RunConfig.loss_inputs`."""
        rollout = ("rollout_logps",) if self.old_logps == "trainer" else ()
        return ("old_logps", "advantages", *rollout, *(("ref_logps",) if self.asks_reference else ()))

    def parts(self) -> Iterator[Part]:
        """See `RunConfig.parts`."""
        yield from super().parts()
        yield Part("sampler", self.sampling.name)
        yield from (Part("reward", reward.name, reward.args) for reward in self.rewards)
        yield Part("reward", self.scoring.name)
        yield Part("advantage", self.advantage.name, self.advantage.args)

    @model_validator(mode="after")
    def _possible(self) -> "GRPOConfig":
        if self.reference == "never" and self._beta > 0:
            raise ValueError("loss.args.beta needs a reference, and reference is never; leave one of them out")
        if self.loss.args.get("tis_cap") is not None and self.old_logps == "sampler":
            raise ValueError(
                "loss.args.tis_cap weights tokens by how far trainer and sampler disagree; give old_logps: trainer too"
            )
        if self.mini_batch_size is not None and self.mini_batch_size > self.answers:
            raise ValueError(
                f"mini_batch_size {self.mini_batch_size} is larger than the {self.answers} answers of a step "
                f"(batch_size {self.batch_size} x num_generations {self.sampling.num_generations})"
            )
        if len({reward.label for reward in self.rewards}) < len(self.rewards):
            raise ValueError("two rewards have one name; write a reward of your own that combines them")
        return self


class RLOOAdvantageConfig(AdvantageConfig):
    """How rewards become advantages."""

    name: str = Field(default="RLOOAdvantage", description="Component of kind `advantage`")
    scale: Literal["group", "batch", "none"] = Field(
        default="none", description="Divide by the standard deviation of the group, of the batch, or not"
    )


class ReinforceLossConfig(PolicyLossConfig):
    """What is minimised."""

    name: str = Field(default="ReinforceLoss", description="Component of kind `loss`")


class RLOOConfig(GRPOConfig):
    """REINFORCE with the mean reward of the other answers to the prompt as baseline (arXiv:2402.14740)."""

    recipe = "rloo"

    loss: ReinforceLossConfig = Field(default_factory=ReinforceLossConfig, description="What is minimised")
    advantage: RLOOAdvantageConfig = Field(
        default_factory=RLOOAdvantageConfig, description="How rewards become advantages"
    )

    @model_validator(mode="after")
    def _others(self) -> "RLOOConfig":
        if self.sampling.num_generations < 2:
            raise ValueError(
                "sampling.num_generations is 1: RLOO compares an answer with the others to its prompt; give at least 2"
            )
        return self
