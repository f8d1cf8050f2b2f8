"""Which rows a run reads, and how they become tokens: the keys under `data`."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from twinkle_recipes.config.strict import Arguments, Positive, Strict

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
