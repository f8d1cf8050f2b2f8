"""Says which parts of a rendered conversation are trained, and marks their tokens.

A turn is what the model must produce after the generation prompt: its text and the token that ends the turn, neither
the header before nor the line break after. The work is done on text, so each conversation is tokenized once.
"""

import re
from collections.abc import Sequence
from typing import Any

from twinkle.data_format import IGNORE_INDEX
from twinkle.errors import EncodeError
from twinkle_chat.messages import is_trained
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
        found = find_turns(chat, messages, wanted, text, added)
    else:
        text, marked = chat.render_marked(messages)
        if wanted == turns and len(marked) != len(turns):
            return text, [[span] for span in marked]
        found = [[span] for span in _of_turns(marked, turns, wanted)]
        for index, [(start, end)] in zip(wanted, found, strict=True):
            _require_calls(messages[index], text[start:end], f"message {index - added} (assistant)")
    return text, [
        [_without_empty_thought(messages[index], text, *first), *rest]
        for index, (first, *rest) in zip(wanted, found, strict=True)
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
            found = "no message" if index not in range(len(own)) else f"a {own[index]['role']} message"
            raise EncodeError(
                f"user_data key_rounds names {index!r}, which is {found}; the assistant turns of this row are {turns}"
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
