"""One conversation to marked tokens: which parts are trained, how much each counts, and truncation.

This is the middle part of `Template.encode`, between formatting and truncation. A turn is what the model must produce
after the generation prompt: its text and the token that ends the turn, neither the header before nor the line break
after. Turns are found in the text, so each conversation is tokenized once.
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
    """Render a conversation and find its trained turns.

    An empty thought that the chat template puts before a turn that has no reasoning is not trained: it says nothing
    about the answer, and learning it would teach the model not to think. One that the row itself has is trained.

    Args:
        chat: the chat template.
        messages: the whole conversation, adapted to it.
        rounds: the index, or a list of the indices, of the messages to train; None is every assistant turn. Turns that
            say of themselves that they are not trained (`weight`, `loss`) are left out either way.
        added: how many messages were put before those of the row, whose indices `rounds` and errors name.

    Returns:
        The text, and for each trained turn, in order, the `(start, end)` characters of its parts: one, or several where
        the chat template writes tool results inside the turn.

    Raises:
        EncodeError: a turn or one of its tool calls cannot be found in the text, `rounds` names no assistant turn, or
            another turn than the assistant's wants to be trained.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = _wanted(turns, rounds, messages, added)
    if not chat.marks_generation:
        text = chat.render(messages)
        spans = find_turns(chat, messages, wanted, text, added)
    else:
        text, marked = chat.render_marked(messages)
        if wanted == turns and len(marked) != len(turns):
            return text, [[span] for span in marked]
        spans = [[span] for span in _of_turns(marked, turns, wanted)]
        for index, [(start, end)] in zip(wanted, spans, strict=True):
            _require_calls(messages[index], text[start:end], f"message {index - added} (assistant)")
    return text, [
        [_without_empty_thought(messages[index], text, *first), *rest]
        for index, (first, *rest) in zip(wanted, spans, strict=True)
    ]


def _of_turns(marked: Sequence[Span], turns: Sequence[int], wanted: Sequence[int]) -> list[Span]:
    if len(marked) != len(turns):
        raise EncodeError(
            f"the chat template marks {len(marked)} generated parts for {len(turns)} assistant turns, so they cannot "
            "be told apart; drop key_rounds, weight and loss, or use one {% generation %} block a turn"
        )
    return [span for index, span in zip(turns, marked, strict=True) if index in wanted]


def _without_empty_thought(message: dict[str, Any], text: str, start: int, end: int) -> Span:
    own = "reasoning_content" in message and not message["reasoning_content"].strip()
    empty = None if own else _NO_THOUGHT.match(text, start, end)
    if empty is None or (message["content"] or "").strip().startswith(empty[0].strip()):
        return start, end
    return empty.end(), end


def _require_calls(message: dict[str, Any], shown: str, where: str) -> None:
    names = [call.get("function", call)["name"] for call in message.get("tool_calls") or ()]
    missing = next((name for name in names if name not in shown), None)
    if missing is not None:
        raise EncodeError(
            f"{where} calls the tool {missing!r}, which the chat template does not show; write the call into the "
            "content as the model is to write it, or use a chat template that knows tool_calls"
        )


def _wanted(turns: list[int], rounds: Any, messages: Sequence[dict[str, Any]], added: int) -> list[int]:
    chosen = turns if rounds is None else chosen_turns(rounds, messages[added:], added)
    for index, message in enumerate(messages):
        trained = is_trained(message, f"message {index - added}")
        if trained and index not in turns:
            raise EncodeError(
                f"message {index - added} ({message['role']}) asks to be trained by weight or loss, but only what the "
                "assistant writes is; drop the key"
            )
        if trained is False:
            chosen = [turn for turn in chosen if turn != index]
    return chosen


def chosen_turns(rounds: Any, own: Sequence[dict[str, Any]], added: int) -> list[int]:
    """Return the assistant turns that `rounds` names, checked, counted from `added`; `own` are the row's messages."""
    turns = [index for index, message in enumerate(own) if message["role"] == "assistant"]
    asked: list[Any] = list(rounds) if isinstance(rounds, list | tuple) else [rounds]
    for index in asked:
        if isinstance(index, bool) or not isinstance(index, int) or index not in turns:
            instead = "no message" if index not in range(len(own)) else f"a {own[index]['role']} message"
            raise EncodeError(
                f"user_data key_rounds names {index!r}, which is {instead}; the assistant turns of this row are {turns}"
            )
    return sorted({index + added for index in asked})


def mark_tokens(
    offsets: Sequence[Span], spans: Sequence[Span], weights: Sequence[float] | None = None
) -> Sequence[float]:
    """Say for each token whether it is trained, or how much.

    Args:
        offsets: the characters of each token, in order. Tokens of one character share it; an empty range (a tokenizer
            that trims white space off its offsets) stands for what lies between its neighbours.
        spans: the trained characters, in order and disjoint.
        weights: one for each span; by default they are just trained.

    Returns:
        True for each token that holds a trained character, also one that reaches over the edge of a span. With
        `weights` the weight of the first span of which it holds a character, else 0.
    """
    marks: list[float] = []
    place, previous = 0, 0
    for start, end in offsets:
        if start >= end:
            start = min(previous, end)
        while place < len(spans) and spans[place][1] <= start:
            place += 1
        inside = place < len(spans) and spans[place][0] < end
        marks.append(inside if weights is None else weights[place] if inside else 0.0)
        previous = max(previous, end)
    return marks


def shift(tokens: Sequence[int], trained: Sequence[float]) -> list[int]:
    """Return labels: at each position the next token where that is trained, else -100; the last is always -100."""
    targets = [token if train else IGNORE_INDEX for token, train in zip(tokens, trained, strict=True)]
    return [*targets[1:], IGNORE_INDEX][: len(targets)]


_OWN_WORDS = ("weight", "loss")


def turn_weights(scale: Any, trajectory: Mapping[str, Any], rounds: Any) -> list[TurnWeight]:
    """Return the weight of each message of a row: that of the loss scale times that of the message itself.

    Args:
        scale: a `LossScale`, or a function of the same form.
        trajectory: the row.
        rounds: as for `assistant_spans`; turns that it does not name get 0.

    Raises:
        ComponentTypeError: the loss scale returns something else than one weight a message.
        EncodeError: the row has no usable conversation, or a message asks for a training that it does not get.
    """
    messages = plain_messages(trajectory, any_weight=True)
    weights = scale([dict(message) for message in messages])
    name = getattr(scale, "__name__", type(scale).__name__)
    if isinstance(weights, str | Mapping) or not isinstance(weights, Sequence) or len(weights) != len(messages):
        returned = f"{len(weights)} weights" if isinstance(weights, list | tuple) else f"a {type(weights).__name__}"
        raise ComponentTypeError(
            f"the loss scale {name} returned {returned} for {len(messages)} messages; return one each"
        )
    wanted = set(range(len(messages))) if rounds is None else set(chosen_turns(rounds, messages, 0))
    return [
        _own(weight if index in wanted else 0.0, message, index, name)
        for index, (weight, message) in enumerate(zip(weights, messages, strict=True))
    ]


def weighted_spans(
    chat: ChatRenderer, messages: Sequence[dict[str, Any]], weights: Sequence[TurnWeight], added: int
) -> tuple[str, list[Span], list[float]]:
    """Render a conversation and find the parts of it that have a weight.

    Args:
        chat: the chat template.
        messages: the whole conversation, adapted to it.
        weights: one for each message of the row.
        added: number of messages before those of the row.

    Returns:
        The text; `(start, end)` characters, in order and disjoint; and the weight of each of these spans.

    Raises:
        EncodeError: a turn, or all pieces of one, cannot be found in the text.
    """
    silent = [{key: value for key, value in message.items() if key not in _OWN_WORDS} for message in messages]
    positive = [index for index, weight in enumerate(weights) if _largest(weight) > 0]
    turns = [index for index in positive if silent[index + added]["role"] == "assistant"]
    text, spans = assistant_spans(chat, silent, turns, added)
    pairs: list[tuple[Sequence[Span], tuple[int, TurnWeight]]] = list(
        zip(spans, _shared(turns, spans, weights), strict=True)
    )
    for index in positive:
        if index not in turns:
            pairs.append(([turn_span(chat, silent, index + added, text)], (index, weights[index])))
    parts = sorted(part for turn, (index, weight) in pairs for part in _cut(text, turn, weight, index))
    return text, [(start, end) for start, end, _ in parts], [weight for _, _, weight in parts]


def _own(weight: Any, message: Mapping[str, Any], index: int, name: str) -> TurnWeight:
    """Return the weight of one message, checked and multiplied by its own."""
    trained = is_trained(message, f"message {index}", any_weight=True)
    times = 0.0 if trained is False else float(message.get("weight", 1.0))
    checked: TurnWeight
    if isinstance(weight, str) or not isinstance(weight, Sequence):
        checked = _number(weight, index, name) * times
    else:
        checked = [_piece(piece, index, name, times) for piece in weight]
    if trained and message["role"] != "assistant" and _largest(checked) == 0:
        raise EncodeError(
            f"message {index} ({message['role']}) asks to be trained by weight or loss, but {name} gives it none; "
            "drop the key, or choose a loss scale that weights this role"
        )
    return checked


def _piece(piece: Any, index: int, name: str, times: float) -> tuple[str, float]:
    if isinstance(piece, list | tuple) and len(piece) == 2 and isinstance(piece[0], str):
        return piece[0], _number(piece[1], index, name) * times
    raise ComponentTypeError(
        f"the loss scale {name} returned {piece!r} for a piece of message {index}; give (text, weight)"
    )


def _number(weight: Any, index: int, name: str) -> float:
    if isinstance(weight, int | float) and not isinstance(weight, bool) and math.isfinite(weight) and weight >= 0:
        return float(weight)
    raise ComponentTypeError(
        f"the loss scale {name} returned {weight!r} for message {index}; a weight is a finite number from 0, or pieces "
        "[(text, weight), ...]"
    )


def _largest(weight: TurnWeight) -> float:
    return weight if isinstance(weight, int | float) else max((number for _, number in weight), default=0.0)


def _shared(
    turns: Sequence[int], spans: Sequence[Sequence[Span]], weights: Sequence[TurnWeight]
) -> list[tuple[int, TurnWeight]]:
    """Return turn and weight of each turn's spans; where it marks more or fewer, all must weigh alike."""
    weighted: list[tuple[int, TurnWeight]] = [(index, weights[index]) for index in turns]
    if len(spans) == len(turns):
        return weighted
    if len({weight for _, weight in weighted if isinstance(weight, int | float)}) == 1 and all(
        isinstance(weight, int | float) for _, weight in weighted
    ):
        return weighted[:1] * len(spans)
    raise EncodeError(
        f"the chat template marks {len(spans)} generated parts for {len(turns)} assistant turns, so they cannot be "
        "weighted one by one; use one {% generation %} block a turn, or a loss scale that weights all alike"
    )


def _cut(text: str, spans: Sequence[Span], weight: TurnWeight, index: int) -> list[tuple[int, int, float]]:
    """Return a turn's spans with its weight, or cut into pieces, each from the end of the one before."""
    if isinstance(weight, int | float):
        return [(start, end, weight) for start, end in spans]
    start, end = spans[0][0], spans[-1][1]
    turn = text[start:end]
    ends = _ends(turn, weight)
    if not ends:
        raise EncodeError(
            f"message {index}: none of the pieces that the loss scale weights stands in what the chat template writes "
            "of it; give pieces of its content or its reasoning, or one weight for the whole turn"
        )
    ends[-1] = (len(turn), ends[-1][1])
    places = [start, *(start + place for place, _ in ends)]
    cut = zip(places[:-1], places[1:], (number for _, number in ends), strict=True)
    inside = [(max(first, a), min(last, b), number) for first, last, number in cut for a, b in spans]
    return [(first, last, number) for first, last, number in inside if first < last]


def _ends(turn: str, pieces: Sequence[tuple[str, float]]) -> list[tuple[int, float]]:
    """Return where each piece ends in the text of a turn, with its weight.

    Where they do not all stand there one after the other, they are looked for from the end: what a chat template leaves
    out stands at the beginning of a turn, and must not be found in what follows it.
    """
    ends, place = [], 0
    for piece, number in pieces:
        if turn.startswith(piece, place):
            place += len(piece)
        elif (at := turn.find(piece.strip(), place)) >= 0:
            place = at + len(piece.strip())
        else:
            return _ends_backwards(turn, pieces)
        ends.append((place, number))
    return ends


def _ends_backwards(turn: str, pieces: Sequence[tuple[str, float]]) -> list[tuple[int, float]]:
    ends, limit, seen = [], len(turn), False
    for piece, number in reversed(pieces):
        at = turn.rfind(piece.strip(), 0, limit)
        if at >= 0:
            ends.append((at + len(piece.strip()), number))
            limit, seen = at, seen or bool(piece.strip())
    return ends[::-1] if seen else []


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
