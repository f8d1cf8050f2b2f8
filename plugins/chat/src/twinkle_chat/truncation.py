"""What becomes of rows that are longer than the model should see."""

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from twinkle.errors import EncodeError

Strategy: TypeAlias = Literal["raise", "left", "right", "split", "delete"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
Marked: TypeAlias = tuple[Sequence[int], Sequence[float]]
"""Token ids, and for each whether it is trained: false and true, or a weight."""


def fit(
    tokens: Sequence[int], trained: Sequence[float], max_length: int | None, strategy: Strategy, prompt: bool = False
) -> list[Marked]:
    """Cut a row so that each part has at most `max_length` tokens.

    Args:
        tokens: token ids `[T]`.
        trained: whether each token is trained, or its weight, `[T]`.
        max_length: in tokens; None is no limit.
        strategy: `left` and `right` say which end is cut off; `split` makes several parts, `delete` one empty part.
        prompt: the row is to be continued, so that its end has to stay; only the error asks.

    Returns:
        The parts, in order; more than one with `split` only. Labels are shifted after the cut, so that no part is
        trained on a token that it does not hold.

    Raises:
        EncodeError: the row is too long and the strategy is `raise`.
    """
    length = len(tokens)
    if max_length is None or length <= max_length:
        return [(tokens, trained)]
    if strategy == "raise":
        choices = (
            "'delete' or 'left'" if prompt else "'delete', 'left', 'right' or 'split' (of a recipe: see its --help)"
        )
        raise EncodeError(
            f"the row has {length} tokens and max_length is {max_length}; raise max_length, or say what becomes of "
            f"longer rows, in a script by truncation_strategy, in a recipe by data.truncation: {choices}"
        )
    if strategy == "delete":
        return [((), ())]
    if strategy == "left":
        return [(tokens[-max_length:], trained[-max_length:])]
    if strategy == "right":
        return [(tokens[:max_length], trained[:max_length])]
    starts = range(0, length, max_length)
    return [(tokens[start : start + max_length], trained[start : start + max_length]) for start in starts]
