"""The configuration of the recipe `embedding`: each key with its type, default and meaning."""

from pydantic import Field

from twinkle_recipes.config.parts import LossConfig, RunConfig
from twinkle_recipes.config.rows import DataConfig
from twinkle_recipes.config.strict import Arguments, Positive


class GroupsConfig(DataConfig):
    """Which rows, which of their columns are texts that belong together, and how those become tokens."""

    id: str = Field(
        default="builtin://arithmetic-paraphrases",
        description="File, folder, `hf://org/name`, `ms://org/name` or builtin",
    )
    preprocessor: str | None = Field(
        default=None, description="Component of kind `preprocessor`; none: rows hold the columns named here"
    )
    anchor_key: str = Field(default="anchor", description="Column of the texts that are compared with others")
    positive_key: str = Field(default="positive", description="Column of the text that each shall be near to")
    negative_key: str | None = Field(
        default="negative",
        description="Column of the text, or list of texts, that each shall be far from; null: other rows' texts alone",
    )


class EmbeddingLossConfig(LossConfig):
    """What is minimised."""

    name: str = Field(default="InfonceLoss", description="Component of kind `loss` over groups of embeddings")
    args: Arguments = Field(default={"temperature": 0.05}, description="Keyword arguments of the loss")


class EmbeddingConfig(RunConfig):
    """Embeddings: texts that belong together come close, others apart."""

    recipe = "embedding"
    kept_in_checkpoints = RunConfig.kept_in_checkpoints | {"epochs"}

    data: GroupsConfig = Field(default_factory=GroupsConfig, description="Which rows, and how they become tokens")
    loss: EmbeddingLossConfig = Field(default_factory=EmbeddingLossConfig, description="What is minimised")
    metrics: list[str] = Field(
        default=["EmbeddingMetric"], description="Components of kind `metric`, beside the model's own"
    )
    batch_size: Positive = Field(
        default=16, description="Groups of one optimizer step; each anchor is compared with the texts of all"
    )
    micro_batch_size: Positive | None = Field(
        default=None,
        description="Texts in memory at once, in whole groups; only with a loss that compares within groups",
    )
    epochs: Positive = Field(default=1, description="How often each group is seen")
