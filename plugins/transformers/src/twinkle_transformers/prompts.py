"""Checks the prompts of a sampling call: tokens, vocabulary, room in the context, and the tokens that end a text."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.errors import DataError, Unsupported

_DEFAULT_ROOM = 2048
_MEDIA = ("pixel_values", "pixel_values_videos", "images", "videos", "audios")


def as_list(inputs: Any) -> list[Any]:
    """Return one row or several as a list of rows.

    Raises:
        DataError: something in it is not a dict.
    """
    rows = [inputs] if isinstance(inputs, Mapping) else list(inputs)
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"row {number} is a {type(row).__name__}; give a trajectory or an encoded row, both dicts")
    return rows


def token_ids(feature: Mapping[str, Any], row: int, vocabulary: int) -> list[int]:
    """Return the real tokens of an encoded row, without padding.

    Args:
        feature: `input_ids` `[T]` and perhaps `attention_mask` `[T]`.
        row: its number, for errors.
        vocabulary: size of the model's embedding.

    Raises:
        DataError: there are none, or one is outside the vocabulary, or the row is a batch.
        Unsupported: it holds images, video or audio.
    """
    if media := [key for key in _MEDIA if feature.get(key) is not None]:
        raise Unsupported(f"row {row} holds {', '.join(media)}; TorchSampler reads text only, vLLMSampler the rest")
    ids = _plain(feature["input_ids"])
    if ids and not all(isinstance(token, int) for token in ids):
        raise DataError(
            f"row {row}: input_ids must be one sequence of integers, not a batch; give one row for each prompt"
        )
    mask = feature.get("attention_mask")
    if mask is not None:
        real = _plain(mask)
        if len(real) != len(ids):
            raise DataError(f"row {row}: attention_mask has {len(real)} values for {len(ids)} tokens")
        ids = [token for token, keep in zip(ids, real, strict=True) if keep]
    if not ids:
        raise DataError(f"row {row} has no tokens; a prompt needs at least one")
    if wrong := [token for token in ids if not 0 <= token < vocabulary]:
        raise DataError(
            f"row {row}: token {wrong[0]} is outside the model's vocabulary of {vocabulary}; was it encoded with "
            "another model's tokenizer?"
        )
    return ids


def rooms(prompts: Sequence[Sequence[int]], max_tokens: int | None, context: int | None) -> list[int]:
    """Return how many tokens each prompt may be given: `max_tokens` (None: 2048), or what the context leaves.

    Raises:
        DataError: a prompt is longer than the context, or fills it although tokens are asked for.
    """
    wanted = _DEFAULT_ROOM if max_tokens is None else max_tokens
    if context is None:
        return [wanted] * len(prompts)
    for row, ids in enumerate(prompts):
        if len(ids) > context or (wanted and len(ids) == context):
            raise DataError(
                f"row {row} has {len(ids)} tokens, the model's context {context}; shorten the prompt (max_length= of "
                "the template)"
            )
    return [min(wanted, context - len(ids)) for ids in prompts]


def context_of(config: Any) -> int | None:
    """Return how many positions a model was made for, or None where its configuration does not say."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the ids that end a text: those of the generation configuration, and the tokenizer's."""
    found: set[int] = set()
    for owner in (getattr(model, "generation_config", None), tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(found)


def _plain(values: Any) -> list[Any]:
    return values.tolist() if hasattr(values, "tolist") else list(values)
