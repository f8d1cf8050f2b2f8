"""Encodes one conversation: finds the trained tokens and their weights, and truncates the row.

`Template.encode` calls this after formatting. A turn is what the model must generate after the generation prompt: its
text and the token that ends the turn, without the header before and the line break after. Turns are located in the
rendered text, so each conversation is tokenized once.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from twinkle.data_format import IGNORE_INDEX
from twinkle.errors import ComponentTypeError, EncodeError, Unsupported
from twinkle.loss_scale import TurnWeight
from twinkle_chat.messages import is_trained, plain_messages
from twinkle_chat.rendering import ChatRenderer, Span
from twinkle_chat.turns import find_turns
from twinkle_chat.turns import turn_span as turn_span

_NO_THOUGHT = re.compile(r"\n*(?:<think>)?\n*</think>\n{0,2}|<\|channel>thought\n*<channel\|>")


def assistant_spans(
    chat: ChatRenderer, messages: Sequence[dict[str, Any]], rounds: Any, added: int = 0
) -> tuple[str, list[list[Span]]]:
    """Render a conversation and locate its trained turns.

    An empty thought that the chat template adds to a turn without reasoning is not trained: it would teach the model
    not to think. An empty thought in the row itself is trained.

    Args:
        chat: the chat template.
        messages: the whole conversation, adapted to it.
        rounds: the index, or a list of the indices, of the messages to train; None is every assistant turn. Turns that
            are excluded by their own `weight` or `loss` are never trained.
        added: number of messages before those of the row; `rounds` and errors use indices of the row.

    Returns:
        The text, and for each trained turn, in order, the `(start, end)` characters of its parts: one part, or
        several if the chat template writes tool results inside the turn.

    Raises:
        EncodeError: a turn or one of its tool calls cannot be found in the text, `rounds` names no assistant turn, or
            a turn of another role has a `weight` or `loss` that requests training.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    trained_turns = _trained_turns(turns, rounds, messages, added)
    if not chat.marks_generation:
        text = chat.render(messages)
        spans = find_turns(chat, messages, trained_turns, text, added)
    else:
        text, marked = chat.render_marked(messages)
        if trained_turns == turns and len(marked) != len(turns):
            return text, [[span] for span in marked]
        spans = [[span] for span in _spans_of_turns(marked, turns, trained_turns)]
        for index, [(start, end)] in zip(trained_turns, spans, strict=True):
            _require_calls(messages[index], text[start:end], f"message {index - added} (assistant)")
    return text, [
        [_without_empty_thought(messages[index], text, *first), *rest]
        for index, (first, *rest) in zip(trained_turns, spans, strict=True)
    ]


def _spans_of_turns(marked: Sequence[Span], turns: Sequence[int], trained_turns: Sequence[int]) -> list[Span]:
    if len(marked) != len(turns):
        raise EncodeError(
            f"the chat template marks {len(marked)} generated parts for {len(turns)} assistant turns, so they cannot "
            "be assigned to turns; drop key_rounds, weight and loss, or use one {% generation %} block per turn"
        )
    return [span for index, span in zip(turns, marked, strict=True) if index in trained_turns]


def _without_empty_thought(message: dict[str, Any], text: str, start: int, end: int) -> Span:
    is_explicit = "reasoning_content" in message and not message["reasoning_content"].strip()
    empty = None if is_explicit else _NO_THOUGHT.match(text, start, end)
    if empty is None or (message["content"] or "").strip().startswith(empty[0].strip()):
        return start, end
    return empty.end(), end


def _require_calls(message: dict[str, Any], shown: str, where: str) -> None:
    names = [call.get("function", call)["name"] for call in message.get("tool_calls") or ()]
    missing = next((name for name in names if name not in shown), None)
    if missing is not None:
        raise EncodeError(
            f"{where} calls the tool {missing!r}, which the chat template does not show; write the call into the "
            "content in the form that the model should generate, or use a chat template that supports tool_calls"
        )


def _trained_turns(turns: list[int], rounds: Any, messages: Sequence[dict[str, Any]], added: int) -> list[int]:
    selected = turns if rounds is None else selected_turns(rounds, messages[added:], added)
    for index, message in enumerate(messages):
        trained = is_trained(message, f"message {index - added}")
        if trained and index not in turns:
            raise EncodeError(
                f"message {index - added} ({message['role']}) requests training by weight or loss, but only assistant "
                "messages can be trained; drop the key"
            )
        if trained is False:
            selected = [turn for turn in selected if turn != index]
    return selected


def selected_turns(rounds: Any, row_messages: Sequence[dict[str, Any]], added: int) -> list[int]:
    """Return the indices of the assistant turns in `rounds`, checked and increased by `added`."""
    turns = [index for index, message in enumerate(row_messages) if message["role"] == "assistant"]
    indices: list[Any] = list(rounds) if isinstance(rounds, list | tuple) else [rounds]
    for index in indices:
        if isinstance(index, bool) or not isinstance(index, int) or index not in turns:
            actual = (
                "no message" if index not in range(len(row_messages)) else f"a {row_messages[index]['role']} message"
            )
            raise EncodeError(
                f"user_data key_rounds has {index!r}, which is {actual}; the assistant turns of this row are {turns}"
            )
    return sorted({index + added for index in indices})


def mark_tokens(
    offsets: Sequence[Span], spans: Sequence[Span], weights: Sequence[float] | None = None
) -> Sequence[float]:
    """Return for each token whether it is trained, or its weight.

    Args:
        offsets: the character range of each token, in order. Tokens of the same character have the same range; an empty
            range (a tokenizer that trims white space) stands for the characters between its neighbours.
        spans: the trained characters, in order and disjoint.
        weights: weight of each span; None marks trained tokens with True.

    Returns:
        True for each token with at least one trained character, also across the edge of a span. With `weights`, the
        weight of the first span that it overlaps, else 0.
    """
    marks: list[float] = []
    position, previous = 0, 0
    for start, end in offsets:
        if start >= end:
            start = min(previous, end)
        while position < len(spans) and spans[position][1] <= start:
            position += 1
        inside = position < len(spans) and spans[position][0] < end
        marks.append(inside if weights is None else weights[position] if inside else 0.0)
        previous = max(previous, end)
    return marks


def shift(tokens: Sequence[int], trained: Sequence[float]) -> list[int]:
    """Return labels: at each position the next token if that is trained, else -100; the last is always -100."""
    targets = [token if train else IGNORE_INDEX for token, train in zip(tokens, trained, strict=True)]
    return [*targets[1:], IGNORE_INDEX][: len(targets)]


_WEIGHT_KEYS = ("weight", "loss")


def turn_weights(scale: Any, trajectory: Mapping[str, Any], rounds: Any) -> list[TurnWeight]:
    """Return the weight of each message of a row: the weight by the loss scale times the message's own weight.

    Args:
        scale: a `LossScale`, or a function of the same form.
        trajectory: the row.
        rounds: as for `assistant_spans`; other turns get 0.

    Raises:
        ComponentTypeError: the loss scale does not return one weight per message.
        EncodeError: the row has no usable conversation, or a message requests training that its role or weight
            excludes.
    """
    messages = plain_messages(trajectory, any_weight=True)
    weights = scale([dict(message) for message in messages])
    name = getattr(scale, "__name__", type(scale).__name__)
    if isinstance(weights, str | Mapping) or not isinstance(weights, Sequence) or len(weights) != len(messages):
        returned = f"{len(weights)} weights" if isinstance(weights, list | tuple) else f"a {type(weights).__name__}"
        raise ComponentTypeError(
            f"the loss scale {name} returned {returned} for {len(messages)} messages; return one weight per message"
        )
    trained_turns = set(range(len(messages))) if rounds is None else set(selected_turns(rounds, messages, 0))
    return [
        _message_weight(weight if index in trained_turns else 0.0, message, index, name)
        for index, (weight, message) in enumerate(zip(weights, messages, strict=True))
    ]


def weighted_spans(
    chat: ChatRenderer, messages: Sequence[dict[str, Any]], weights: Sequence[TurnWeight], added: int
) -> tuple[str, list[Span], list[float]]:
    """Render a conversation and locate the parts that have a weight.

    Args:
        chat: the chat template.
        messages: the whole conversation, adapted to it.
        weights: one for each message of the row.
        added: number of messages before those of the row.

    Returns:
        The text; the `(start, end)` characters of spans, in order and disjoint; and the weight of each span.

    Raises:
        EncodeError: a turn, or all pieces of one, cannot be found in the text.
    """
    unweighted = [{key: value for key, value in message.items() if key not in _WEIGHT_KEYS} for message in messages]
    positive = [index for index, weight in enumerate(weights) if _largest(weight) > 0]
    turns = [index for index in positive if unweighted[index + added]["role"] == "assistant"]
    text, spans = assistant_spans(chat, unweighted, turns, added)
    pairs: list[tuple[Sequence[Span], tuple[int, TurnWeight]]] = list(
        zip(spans, _span_weights(turns, spans, weights), strict=True)
    )
    for index in positive:
        if index not in turns:
            pairs.append(([turn_span(chat, unweighted, index + added, text)], (index, weights[index])))
    parts = sorted(part for turn, (index, weight) in pairs for part in _weighted_pieces(text, turn, weight, index))
    return text, [(start, end) for start, end, _ in parts], [weight for _, _, weight in parts]


def _message_weight(weight: Any, message: Mapping[str, Any], index: int, name: str) -> TurnWeight:
    """Return the weight of one message, checked and multiplied by the message's own weight."""
    trained = is_trained(message, f"message {index}", any_weight=True)
    times = 0.0 if trained is False else float(message.get("weight", 1.0))
    checked: TurnWeight
    if isinstance(weight, str) or not isinstance(weight, Sequence):
        checked = _checked_weight(weight, index, name) * times
    else:
        checked = [_checked_piece(piece, index, name, times) for piece in weight]
    if trained and message["role"] != "assistant" and _largest(checked) == 0:
        raise EncodeError(
            f"message {index} ({message['role']}) requests training by weight or loss, but {name} gives it weight 0; "
            "drop the key, or choose a loss scale that weights this role"
        )
    return checked


def _checked_piece(piece: Any, index: int, name: str, times: float) -> tuple[str, float]:
    if isinstance(piece, list | tuple) and len(piece) == 2 and isinstance(piece[0], str):
        return piece[0], _checked_weight(piece[1], index, name) * times
    raise ComponentTypeError(
        f"the loss scale {name} returned {piece!r} for a piece of message {index}; a piece must be (text, weight)"
    )


def _checked_weight(weight: Any, index: int, name: str) -> float:
    if isinstance(weight, int | float) and not isinstance(weight, bool) and math.isfinite(weight) and weight >= 0:
        return float(weight)
    raise ComponentTypeError(
        f"the loss scale {name} returned {weight!r} for message {index}; a weight must be a finite number >= 0 or "
        "pieces [(text, weight), ...]"
    )


def _largest(weight: TurnWeight) -> float:
    return weight if isinstance(weight, int | float) else max((number for _, number in weight), default=0.0)


def _span_weights(
    turns: Sequence[int], spans: Sequence[Sequence[Span]], weights: Sequence[TurnWeight]
) -> list[tuple[int, TurnWeight]]:
    """Return turn and weight for each entry of `spans`; unless there is one per turn, all weights must be equal."""
    weighted: list[tuple[int, TurnWeight]] = [(index, weights[index]) for index in turns]
    if len(spans) == len(turns):
        return weighted
    if len({weight for _, weight in weighted if isinstance(weight, int | float)}) == 1 and all(
        isinstance(weight, int | float) for _, weight in weighted
    ):
        return weighted[:1] * len(spans)
    raise EncodeError(
        f"the chat template marks {len(spans)} generated parts for {len(turns)} assistant turns, so they cannot be "
        "weighted one by one; use one {% generation %} block per turn, or a loss scale with equal weights"
    )


def _weighted_pieces(text: str, spans: Sequence[Span], weight: TurnWeight, index: int) -> list[tuple[int, int, float]]:
    """Return a turn's spans with its weight, or split into pieces; each piece begins at the end of the previous one."""
    if isinstance(weight, int | float):
        return [(start, end, weight) for start, end in spans]
    start, end = spans[0][0], spans[-1][1]
    turn = text[start:end]
    ends = _piece_ends(turn, weight)
    if not ends:
        raise EncodeError(
            f"message {index}: none of the pieces of the loss scale occurs in the rendered turn; return pieces of its "
            "content or its reasoning, or one weight for the whole turn"
        )
    ends[-1] = (len(turn), ends[-1][1])
    positions = [start, *(start + position for position, _ in ends)]
    cut = zip(positions[:-1], positions[1:], (number for _, number in ends), strict=True)
    inside = [(max(first, a), min(last, b), number) for first, last, number in cut for a, b in spans]
    return [(first, last, number) for first, last, number in inside if first < last]


def _piece_ends(turn: str, pieces: Sequence[tuple[str, float]]) -> list[tuple[int, float]]:
    """Return the end of each piece in the text of a turn, with its weight.

    If the pieces do not follow each other in the text, they are searched from the end: a chat template omits text at
    the beginning of a turn (reasoning), and an omitted piece must not match the text after it.
    """
    ends, position = [], 0
    for piece, number in pieces:
        if turn.startswith(piece, position):
            position += len(piece)
        elif (match_start := turn.find(piece.strip(), position)) >= 0:
            position = match_start + len(piece.strip())
        else:
            return _piece_ends_backwards(turn, pieces)
        ends.append((position, number))
    return ends


def _piece_ends_backwards(turn: str, pieces: Sequence[tuple[str, float]]) -> list[tuple[int, float]]:
    ends, limit, matched = [], len(turn), False
    for piece, number in reversed(pieces):
        match_start = turn.rfind(piece.strip(), 0, limit)
        if match_start >= 0:
            ends.append((match_start + len(piece.strip()), number))
            limit, matched = match_start, matched or bool(piece.strip())
    return ends[::-1] if matched else []


Strategy: TypeAlias = Literal["raise", "left", "right", "split", "delete"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
MarkedTokens: TypeAlias = tuple[Sequence[int], Sequence[float]]
"""Token ids, and for each token whether it is trained, as a bool or a weight."""


def truncate(
    tokens: Sequence[int], trained: Sequence[float], max_length: int | None, strategy: Strategy, prompt: bool = False
) -> list[MarkedTokens]:
    """Truncate a row so that each part has at most `max_length` tokens.

    Args:
        tokens: token ids `[T]`.
        trained: whether each token is trained, or its weight, `[T]`.
        max_length: in tokens; None is no limit.
        strategy: `left` and `right` drop tokens at that end; `split` returns several parts, `delete` one empty part.
        prompt: the row is a prompt, whose end must be kept; used for the error text only.

    Returns:
        The parts, in order; more than one with `split` only. Labels are shifted after truncation, so that no part
        is trained on a token that it does not contain.

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
            f"the row has {length} tokens and max_length is {max_length}; increase max_length, or set how to truncate "
            f"longer rows (truncation_strategy in a script, data.truncation in a recipe): {choices}"
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
) -> MarkedTokens:
    """Return the tokens of a conversation and which of them are trained; the text is tokenized once.

    The arguments are those of `assistant_spans`; with `weights`, one for each message of the row, `rounds` is ignored.

    Raises:
        EncodeError: the chat template refuses the conversation, or a turn cannot be found in its text.
        Unsupported: the tokenizer does not return offsets.
    """
    numbers: Sequence[float] | None = None
    if weights is None:
        text, turns = assistant_spans(chat, messages, rounds, added)
        spans = [span for turn in turns for span in turn]
    else:
        text, spans, numbers = weighted_spans(chat, messages, weights, added)
    if not chat.tokenizer.is_fast:
        raise Unsupported(
            f"the tokenizer {type(chat.tokenizer).__name__} does not return character offsets; "
            "labels require a fast tokenizer (tokenizer.json)"
        )
    encoded = chat.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], mark_tokens(encoded["offset_mapping"], spans, numbers)


def prompt_tokens(chat: ChatRenderer, messages: Sequence[dict[str, Any]]) -> MarkedTokens:
    """Return the tokens of a conversation with the generation prompt; nothing is trained.

    Raises:
        EncodeError: the last turn is already the assistant's.
    """
    if messages[-1]["role"] == "assistant":
        raise EncodeError(
            f"message {len(messages) - 1}, the last one, is already an assistant message; "
            "drop it, or encode with add_generation_prompt=False"
        )
    text = chat.render(messages, add_generation_prompt=True)
    tokens = chat.tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens, [False] * len(tokens)


def text_tokens(tokenizer: Any, trajectory: Mapping[str, Any], trained: bool) -> MarkedTokens:
    """Return the tokens of a single message's text, with the special tokens that the tokenizer adds to any text.

    Raises:
        EncodeError: there are several messages, or tools.
    """
    messages = trajectory["messages"]
    if len(messages) != 1 or trajectory.get("tools") or messages[0].get("tool_calls"):
        raise EncodeError(
            f"use_chat_template=False encodes a single message, but this row has {len(messages)} messages "
            "or tools; join them to one message, or use the chat template"
        )
    tokens = tokenizer(messages[0]["content"])["input_ids"]
    trained = trained and is_trained(messages[0], "message 0") is not False
    return tokens, [trained] * len(tokens)


def feature_of(row: Mapping[str, Any], part: MarkedTokens, weighted: bool = False) -> dict[str, Any]:
    """Return one encoded row: the model's inputs as lists, and the other keys of `row`.

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
