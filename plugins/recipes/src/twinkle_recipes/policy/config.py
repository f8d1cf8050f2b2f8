"""The configurations of `grpo` and `rloo`: type, default and meaning of each key."""

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
    """Prompts to sample from. The ground truth for the rewards is in `user_data`."""

    id: str = Field(default="builtin://sums", description="File, folder, `hf://org/name`, `ms://org/name` or builtin")
    max_length: Positive = Field(default=1024, description="Maximum prompt length in tokens")
    truncation: Literal["raise", "left", "delete"] = Field(
        default="raise", description="Handling of longer prompts: raise an error, cut the beginning, or drop them"
    )


class DrawingConfig(Strict):
    """Sampling of answers."""

    name: str = Field(default="TorchSampler", description="Component of kind `sampler`")
    args: Arguments = Field(default={}, description="Additional keyword arguments of the sampler")
    weights: Literal["shared", "own"] = Field(
        default="shared", description="Sample from the trained module, or from a copy that is synced in each step"
    )
    merge_and_sync: bool = Field(
        default=True, description="With `weights: own`: send all weights with the adapter merged, or only the adapter"
    )
    max_tokens: Positive = Field(default=128, description="Maximum answer length in tokens")
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Sample from the smallest set of tokens with this cumulative probability"
    )
    top_k: Literal[-1] | Positive = Field(default=-1, description="Sample from the k most probable tokens; -1: all")
    stop: Text | list[Text] | None = Field(
        default=None,
        description="Strings that end an answer, in addition to the model's end token; removed from the answer",
    )


class SamplingConfig(DrawingConfig):
    """Sampling of answers."""

    temperature: float = Field(default=1.0, gt=0, description="Temperature of the logits, in sampling and in training")
    num_generations: Positive = Field(default=8, description="Answers per prompt (group size)")


class RewardConfig(Strict):
    """One reward and its weight."""

    name: str = Field(description="Component of kind `reward`")
    weight: float = Field(default=1.0, description="Weight in the total")
    args: Arguments = Field(default={}, description="Keyword arguments of the reward")

    @property
    def label(self) -> str:
        """Label of its metrics: the name without plugin, module or file."""
        return re.split(r"[#:/]", self.name)[-1]


class ScoringConfig(Strict):
    """Computation of the rewards."""

    name: str = Field(default="RewardGroup", description="Component of kind `reward` that combines the others")
    on_error: Literal["fail", "zero", "drop"] = Field(
        default="fail", description="If a reward raises, times out or returns NaN: stop, use 0, or drop the answer"
    )
    time_limit: float = Field(
        default=60.0, gt=0, description="Timeout of a reward in seconds, for all answers of a step"
    )
    isolate: list[str] = Field(
        default=[], description="Rewards that run in a separate process, which is killed after `time_limit`"
    )


class AdvantageConfig(Strict):
    """Advantage estimator and its arguments."""

    name: str = Field(default="GRPOAdvantage", description="Component of kind `advantage`")
    scale: Literal["group", "batch", "none"] = Field(
        default="group", description="Divide by the standard deviation of the group, of the batch, or not at all"
    )
    args: Arguments = Field(default={}, description="Keyword arguments of the advantage's constructor")


class PolicyLossConfig(LossConfig):
    """Loss function and its arguments."""

    name: str = Field(default="GRPOLoss", description="Component of kind `loss`")


class PolicyOptimizerConfig(OptimizerConfig):
    """Optimizer and its arguments."""

    lr: float = Field(default=2e-5, gt=0, description="Peak learning rate")


class PolicySchedulerConfig(SchedulerConfig):
    """Learning-rate schedule."""

    warmup_ratio: float = Field(
        default=0.0, ge=0, lt=1, description="Fraction of all steps used for warm-up, if the scheduler has one"
    )


class GRPOConfig(RunConfig):
    """Reinforcement learning from programmatic rewards with group-relative advantages."""

    recipe = "grpo"
    samples = True
    free = RunConfig.free | {"completions_every", "completions_shown"}

    data: PromptsConfig = Field(default_factory=PromptsConfig, description="Prompts and tokenization")
    optimizer: PolicyOptimizerConfig = Field(default_factory=PolicyOptimizerConfig, description="Optimizer")
    scheduler: PolicySchedulerConfig = Field(
        default_factory=PolicySchedulerConfig, description="Learning-rate schedule"
    )
    loss: PolicyLossConfig = Field(default_factory=PolicyLossConfig, description="Loss function")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig, description="Sampling of answers")
    rewards: list[RewardConfig] = Field(
        default=[RewardConfig(name="ExactMatchReward")],
        min_length=1,
        description="Rewards, each with name, weight and args",
    )
    scoring: ScoringConfig = Field(default_factory=ScoringConfig, description="Computation of the rewards")
    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig, description="Advantage estimator")
    batch_size: Positive = Field(default=8, description="Prompts per step, each with `num_generations` answers")
    mini_batch_size: Positive | None = Field(
        default=None, description="Answers per update; default: all answers of a step"
    )
    num_iterations: Positive = Field(default=1, description="Passes over the answers of a step")
    max_steps: Positive = Field(default=100, description="Number of steps (sample, score, train)")
    old_logps: Literal["sampler", "trainer"] = Field(
        default="sampler",
        description="Source of the old log-probabilities in the ratio: the sampler, or the trainer, which recomputes "
        "them before the first update; the loss then receives both and can apply importance weights (`tis_cap`)",
    )
    reference: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Compute reference log-probabilities for the KL term; auto: if `loss.args.beta` is above 0. With "
        "`lora` the reference is the model without its adapter (or with that of `lora.init_from`), else a frozen copy",
    )
    eval_every: Count = Field(
        default=10, description="Steps between greedy evaluations; 0: only before and after training"
    )
    save_every: Count = Field(
        default=10, description="Steps between checkpoints; 0: only after the best evaluation and at the end"
    )
    completions_every: Count = Field(default=10, description="Steps between tables of sample answers; 0: none")
    completions_shown: Positive = Field(default=4, description="Answers per table")

    @model_validator(mode="after")
    def _comparable(self) -> Self:
        if self.sampling.num_generations == 1 and self.advantage.name.rpartition("/")[2] == "GRPOAdvantage":
            raise ValueError(
                "sampling.num_generations must be at least 2 with GRPOAdvantage, which compares the answers to a "
                "prompt with each other, got 1; increase it, or compare with the whole batch: "
                "advantage {name: ReinforcePlusPlusAdvantage, scale: batch, args: {baseline: false}}"
            )
        return self

    @property
    def asks_reference(self) -> bool:
        """Whether log-probabilities of the reference model are needed."""
        return self.reference == "always" or (self.reference == "auto" and self._beta > 0)

    @property
    def _beta(self) -> float:
        beta = self.loss.args.get("beta")
        return beta if isinstance(beta, int | float) else 0  # the loss rejects any other type

    @property
    def answers(self) -> int:
        """Number of answers per step."""
        return self.batch_size * self.sampling.num_generations

    @property
    def updates(self) -> int:
        """Number of optimizer updates per step."""
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
            raise ValueError(
                "loss.args.beta requires a reference model, but reference is `never`; remove one of the two"
            )
        if self.loss.args.get("tis_cap") is not None and self.old_logps == "sampler":
            raise ValueError(
                "loss.args.tis_cap requires old_logps: trainer, because it compares the trainer with the sampler"
            )
        if self.mini_batch_size is not None and self.mini_batch_size > self.answers:
            raise ValueError(
                f"mini_batch_size must be at most {self.answers}, the number of answers per step (batch_size "
                f"{self.batch_size} x num_generations {self.sampling.num_generations}), got {self.mini_batch_size}"
            )
        if len({reward.label for reward in self.rewards}) < len(self.rewards):
            raise ValueError(
                "the names of rewards must be unique; to use one reward twice, write a reward that combines both"
            )
        return self


class RLOOAdvantageConfig(AdvantageConfig):
    """Advantage estimator and its arguments."""

    name: str = Field(default="RLOOAdvantage", description="Component of kind `advantage`")
    scale: Literal["group", "batch", "none"] = Field(
        default="none", description="Divide by the standard deviation of the group, of the batch, or not at all"
    )


class ReinforceLossConfig(PolicyLossConfig):
    """Loss function and its arguments."""

    name: str = Field(default="ReinforceLoss", description="Component of kind `loss`")


class RLOOConfig(GRPOConfig):
    """REINFORCE with the mean reward of the other answers to the prompt as baseline (arXiv:2402.14740)."""

    recipe = "rloo"

    loss: ReinforceLossConfig = Field(default_factory=ReinforceLossConfig, description="Loss function")
    advantage: RLOOAdvantageConfig = Field(default_factory=RLOOAdvantageConfig, description="Advantage estimator")

    @model_validator(mode="after")
    def _others(self) -> "RLOOConfig":
        if self.sampling.num_generations < 2:
            raise ValueError(
                "sampling.num_generations must be at least 2, because RLOO compares the answers to a prompt, got 1"
            )
        return self
