"""Texts in groups `[anchor, positive, negatives ...]`: the configuration of `embedding`, and how rows are encoded."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from twinkle.errors import ConfigError, EncodeError
from twinkle_recipes.config import Arguments, DataConfig, LossConfig, Positive, RunConfig


class GroupsConfig(DataConfig):
    """Data set, columns of the texts, and tokenization."""

    id: str = Field(
        default="builtin://arithmetic-paraphrases",
        description="File, folder, `hf://org/name`, `ms://org/name` or builtin",
    )
    preprocessor: str | None = Field(
        default=None, description="Component of kind `preprocessor`; null: rows contain the columns named below"
    )
    anchor_key: str = Field(default="anchor", description="Column of the anchor texts")
    positive_key: str = Field(default="positive", description="Column of the text that should be close to the anchor")
    negative_key: str | None = Field(
        default="negative",
        description="Column of the text or list of texts that should be far from the anchor; null: use other rows",
    )


class EmbeddingLossConfig(LossConfig):
    """The loss."""

    name: str = Field(default="InfonceLoss", description="Component of kind `loss` over groups of embeddings")
    args: Arguments = Field(default={"temperature": 0.05}, description="Keyword arguments of the loss")


class EmbeddingConfig(RunConfig):
    """Text embeddings: similar texts get similar vectors."""

    recipe = "embedding"
    kept_in_checkpoints = RunConfig.kept_in_checkpoints | {"epochs"}

    data: GroupsConfig = Field(default_factory=GroupsConfig, description="Data set and tokenization")
    loss: EmbeddingLossConfig = Field(default_factory=EmbeddingLossConfig, description="Loss function")
    metrics: list[str] = Field(
        default=["EmbeddingMetric"], description="Components of kind `metric`, in addition to those of the model"
    )
    batch_size: Positive = Field(
        default=16, description="Groups per optimizer step; each anchor is compared with the texts of all groups"
    )
    micro_batch_size: Positive | None = Field(
        default=None,
        description="Texts in memory at once, in whole groups; only for a loss that compares within groups",
    )
    epochs: Positive = Field(default=1, description="Passes over the groups")


GROUP = "group"


def flat(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the rows of groups in one list; the label 1 marks the first row of a group."""
    return [row for group in groups for row in group[GROUP]]


def encode_groups(dataset: Any, config: EmbeddingConfig) -> None:
    """Replace the columns of text by the column `group`, whose cells are lists of encoded rows.

    Each text is a user's message. A group with a text that `data.truncation` deletes is dropped.

    Raises:
        ConfigError: the data set encodes its rows itself.
        EncodeError: a text is missing, empty, not a string, or too long; names row and column.
    """
    from twinkle.dataset import LazyDataset

    data = config.data
    if isinstance(dataset, LazyDataset):
        raise ConfigError(
            f"data.type {data.type} encodes rows when they are read, but the recipe embedding encodes groups of texts "
            "in advance; use Dataset"
        )
    lengths = {"max_length": data.max_length, "truncation_strategy": data.truncation}
    template: Any = config.build("template", data.template, model_id=config.model.id, **lengths, **data.template_args)

    def grouped(columns: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
        groups = []
        for place, index in enumerate(indices):
            row = {name: values[place] for name, values in columns.items()}
            encoded = [_encoded(template, text, name, index) for name, text in _texts(row, config, index)]
            if all(ids for ids in encoded):
                groups.append([{"input_ids": ids, "labels": int(not part)} for part, ids in enumerate(encoded)])
        return {GROUP: groups}

    dataset.map(grouped, with_indices=True, remove_columns=dataset.column_names)


def _texts(row: Mapping[str, Any], config: EmbeddingConfig, index: int) -> list[tuple[str, Any]]:
    """Return the texts of a row with their columns, the anchor first."""
    data = config.data
    keys = [key for key in (data.anchor_key, data.positive_key, data.negative_key) if key is not None]
    if missing := [key for key in keys if row.get(key) is None]:
        raise EncodeError(
            f"row {index}: there is no column {missing[0]!r} (it has {', '.join(sorted(row))}); set the columns with "
            "data.anchor_key, data.positive_key and data.negative_key (null: rows have no negatives)"
        )
    cells = [(key, row[key]) for key in keys]
    return [(key, text) for key, cell in cells for text in (cell if isinstance(cell, list) else [cell])]


def _encoded(template: Any, text: Any, name: str, index: int) -> list[int]:
    if not isinstance(text, str) or not text.strip():
        raise EncodeError(f"row {index}: {name!r} must be a non-empty string, got {text!r:.40}")
    try:
        row = template.encode({"messages": [{"role": "user", "content": text}]})
    except EncodeError as error:
        raise EncodeError(f"row {index}: {name!r}: {error}") from error
    if isinstance(row, list):
        raise EncodeError(
            f"row {index}: {name!r} would be split, but a group needs whole texts; set truncation to delete"
        )
    return list(row["input_ids"])
