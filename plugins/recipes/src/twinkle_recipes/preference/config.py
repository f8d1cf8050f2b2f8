"""The configuration of the recipe `dpo`: each key with its type, default and meaning."""

from collections.abc import Iterator

from pydantic import Field

from twinkle_recipes.config import DataConfig, LossConfig, OptimizerConfig, Positive, RunConfig, Strict


class PairsConfig(DataConfig):
    """Which rows, how they become pairs of conversations, and how those become tokens."""

    id: str = Field(
        default="builtin://arithmetic-preferences",
        description="File, folder, `hf://org/name`, `ms://org/name` or builtin",
    )
    preprocessor: str | None = Field(
        default="PreferenceProcessor",
        description="Component of kind `preprocessor` that makes `positive` and `negative`; none: rows hold them",
    )


class PreferenceLossConfig(LossConfig):
    """What is minimised."""

    name: str = Field(
        default="DPOLoss", description="Component of kind `loss` over pairs; SimPOLoss, CPOLoss and ORPOLoss likewise"
    )


class PreferenceOptimizerConfig(OptimizerConfig):
    """How parameters are updated."""

    lr: float = Field(default=5e-5, gt=0, description="Peak learning rate; for all parameters rather 1e-6")


class ReferenceConfig(Strict):
    """What the policy shall stay near to, for losses that take `ref_logps`."""

    id: str | None = Field(
        default=None,
        description="Another model as the reference; none: the model before training (with LoRA its adapter switched "
        "off, else a frozen copy)",
    )
    cache: bool = Field(
        default=False,
        description="Compute it for all rows once, before the first step, into `reference/` of the run",
    )


class DPOConfig(RunConfig):
    """Preference training on pairs of a chosen and a rejected conversation."""

    recipe = "dpo"
    free = RunConfig.free
    kept_in_checkpoints = RunConfig.kept_in_checkpoints | {"epochs"}

    data: PairsConfig = Field(default_factory=PairsConfig, description="Which rows, and how they become tokens")
    loss: PreferenceLossConfig = Field(default_factory=PreferenceLossConfig, description="What is minimised")
    optimizer: PreferenceOptimizerConfig = Field(
        default_factory=PreferenceOptimizerConfig, description="How parameters are updated"
    )
    reference: ReferenceConfig = Field(
        default_factory=ReferenceConfig, description="What the policy shall stay near to"
    )
    batch_size: Positive = Field(default=8, description="Pairs of one optimizer step")
    micro_batch_size: int | None = Field(
        default=None, ge=2, description="Rows in memory at once, in whole pairs; the result is the same"
    )
    epochs: Positive = Field(default=1, description="How often each pair is seen")

    def models(self) -> Iterator[str]:
        """See `RunConfig.models`."""
        yield from super().models()
        if self.reference.id is not None:
            yield self.reference.id
