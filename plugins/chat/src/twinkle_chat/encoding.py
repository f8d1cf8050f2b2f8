"""One conversation to marked tokens: the middle part of `Template.encode`, and the truncation that follows."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from twinkle.errors import EncodeError, Unsupported
from twinkle.loss_scale import TurnWeight
from twinkle_chat.labels import assistant_spans, mark_tokens, shift, weighted_spans
from twinkle_chat.messages import is_trained
from twinkle_chat.rendering import ChatRenderer

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


def conversation_tokens(
    chat: ChatRenderer,
    messages: Sequence[dict[str, Any]],
    rounds: Any,
    added: int = 0,
    weights: Sequence[TurnWeight] | None = None,
) -> Marked:
    """Return the tokens of a conversation and which of them are trained; the text is tokenized once.

    The arguments are those of `assistant_spans`; with `weights`, one for each message of the row, these alone say what
    is trained, and how much.

    Raises:
        EncodeError: the chat template refuses the conversation, or a turn cannot be found in its text.
        Unsupported: the tokenizer gives no offsets.
    """
    numbers: Sequence[float] | None = None
    if weights is None:
        text, turns = assistant_spans(chat, messages, rounds, added)
        spans = [span for turn in turns for span in turn]
    else:
        text, spans, numbers = weighted_spans(chat, messages, weights, added)
    if not chat.tokenizer.is_fast:
        raise Unsupported(
            f"the tokenizer {type(chat.tokenizer).__name__} cannot say which text its tokens stand for; "
            "labels need a fast tokenizer (tokenizer.json)"
        )
    encoded = chat.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], mark_tokens(encoded["offset_mapping"], spans, numbers)


def prompt_tokens(chat: ChatRenderer, messages: Sequence[dict[str, Any]]) -> Marked:
    """Return the tokens of a conversation with the header of the next assistant turn; nothing is trained.

    Raises:
        EncodeError: the last turn is already the assistant's.
    """
    if messages[-1]["role"] == "assistant":
        raise EncodeError(
            f"message {len(messages) - 1}, the last, is the assistant's, so there is nothing to generate; "
            "drop it, or encode with add_generation_prompt=False"
        )
    text = chat.render(messages, add_generation_prompt=True)
    tokens = chat.tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens, [False] * len(tokens)


def text_tokens(tokenizer: Any, trajectory: Mapping[str, Any], trained: bool) -> Marked:
    """Return the tokens of a single message's text, with the special tokens that the tokenizer puts around any text.

    Raises:
        EncodeError: there are several messages, or tools.
    """
    messages = trajectory["messages"]
    if len(messages) != 1 or trajectory.get("tools") or messages[0].get("tool_calls"):
        raise EncodeError(
            f"use_chat_template=False encodes the text of one message, and this row has {len(messages)} messages "
            "or tools; join them to one text, or use the chat template"
        )
    tokens = tokenizer(messages[0]["content"])["input_ids"]
    trained = trained and is_trained(messages[0], "message 0") is not False
    return tokens, [trained] * len(tokens)


def feature_of(row: Mapping[str, Any], part: Marked, weighted: bool = False) -> dict[str, Any]:
    """Return one encoded row: the model's inputs as lists, beside the keys of `row`, which ride along.

    Args:
        row: the conversation.
        part: its tokens.
        weighted: add `loss_scale`, the weight of each position's label; 0 where it is -100.
    """
    tokens, trained = part
    scale = {"loss_scale": [*map(float, trained[1:]), 0.0][: len(tokens)]} if weighted else {}
    return {
        **row,
        "input_ids": list(tokens),
        "labels": shift(tokens, trained),
        **scale,
        "attention_mask": [1] * len(tokens),
        "position_ids": list(range(len(tokens))),
        "length": len(tokens),
    }
