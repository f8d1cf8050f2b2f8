"""The configuration of the recipe `dpo`: type, default and meaning of each key."""

from collections.abc import Iterator

from pydantic import Field

from twinkle_recipes.config import DataConfig, LossConfig, OptimizerConfig, Positive, RunConfig, Strict


class PairsConfig(DataConfig):
    """Preference pairs and tokenization."""

    id: str = Field(
        default="builtin://arithmetic-preferences",
        description="File, folder, `hf://org/name`, `ms://org/name` or builtin",
    )
    preprocessor: str | None = Field(
        default="PreferenceProcessor",
        description="Component of kind `preprocessor` that returns `positive` and `negative`; null: rows contain them",
    )


class PreferenceLossConfig(LossConfig):
    """Loss function and its arguments."""

    name: str = Field(
        default="DPOLoss", description="Component of kind `loss` over pairs: DPOLoss, SimPOLoss, CPOLoss or ORPOLoss"
    )


class PreferenceOptimizerConfig(OptimizerConfig):
    """Optimizer and its arguments."""

    lr: float = Field(default=5e-5, gt=0, description="Peak learning rate; to train all parameters, use about 1e-6")


class ReferenceConfig(Strict):
    """Reference model, for losses that take `ref_logps`."""

    id: str | None = Field(
        default=None,
        description="Id of the reference model; null: the model before training (with LoRA, the model without its "
        "adapter; otherwise a frozen copy)",
    )
    cache: bool = Field(
        default=False,
        description="Compute its log-probabilities once before the first step and store them in the run folder",
    )


class DPOConfig(RunConfig):
    """Preference training on pairs of a chosen and a rejected conversation."""

    recipe = "dpo"
    free = RunConfig.free
    kept_in_checkpoints = RunConfig.kept_in_checkpoints | {"epochs"}

    data: PairsConfig = Field(default_factory=PairsConfig, description="Preference pairs and tokenization")
    loss: PreferenceLossConfig = Field(default_factory=PreferenceLossConfig, description="Loss function")
    optimizer: PreferenceOptimizerConfig = Field(default_factory=PreferenceOptimizerConfig, description="Optimizer")
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig, description="Reference model")
    batch_size: Positive = Field(default=8, description="Pairs per optimizer step")
    micro_batch_size: int | None = Field(
        default=None, ge=2, description="Rows in memory at once, an even number; does not affect the result"
    )
    epochs: Positive = Field(default=1, description="Passes over the pairs")

    def models(self) -> Iterator[str]:
        """See `RunConfig.models`."""
        yield from super().models()
        if self.reference.id is not None:
            yield self.reference.id
