"""Finds what the assistant writes in a rendered conversation, and marks the tokens that are trained.

A turn is what the model must produce after the generation prompt: its text and the token that ends the turn, neither
the header before nor the line break after. The work is done on text, so each conversation is tokenized once.
"""

from collections.abc import Collection, Sequence
from typing import Any

from twinkle.errors import EncodeError
from twinkle.template.messages import is_trained
from twinkle.template.rendering import ChatRenderer, Span

IGNORE = -100


def assistant_spans(
    chat: ChatRenderer, messages: Sequence[dict[str, Any]], rounds: Any, added: int = 0
) -> tuple[str, list[Span]]:
    """Render a conversation and find its trained turns.

    Args:
        chat: the chat template.
        messages: the whole conversation, adapted to it.
        rounds: the index, or a list of the indices, of the messages to train; None is every assistant turn. Turns that
            say of themselves that they are not trained (`weight`, `loss`) are left out either way.
        added: how many messages were put before those of the row, whose indices `rounds` and errors name.

    Returns:
        The text, and the `(start, end)` characters of each trained turn, in order.

    Raises:
        EncodeError: a turn cannot be found in the text, `rounds` names no assistant turn, or another turn than the
            assistant's wants to be trained.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = _wanted(turns, rounds, messages, added)
    if not chat.marks_generation:
        text = chat.render(messages)
        return text, [turn_span(chat, messages, index, text) for index in wanted]
    text, spans = chat.render_marked(messages)
    if wanted == turns:
        return text, spans
    if len(spans) != len(turns):
        raise EncodeError(
            f"the chat template marks {len(spans)} generated parts for {len(turns)} assistant turns, so they cannot be "
            "told apart; drop key_rounds, weight and loss, or use one {% generation %} block a turn"
        )
    return text, [span for index, span in zip(turns, spans, strict=True) if index in wanted]


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


def turn_span(chat: ChatRenderer, messages: Sequence[dict[str, Any]], index: int, text: str) -> Span:
    """Find one turn: its start by the generation prompt, its end by a stand-in for what the turn says."""
    before, after = _surroundings(chat, messages, index, text)
    start = _start(chat, messages[:index], text, before)
    end = len(text) - len(after) + _end_token(chat.special_tokens, after, anywhere="tool_calls" in messages[index])
    if not 0 <= start <= end:
        raise EncodeError(_not_found(index))
    return start, end


def _start(chat: ChatRenderer, history: Sequence[dict[str, Any]], text: str, before: str) -> int:
    """Return where the model takes over: after the generation prompt, if the text has it there, else at the content.

    Args:
        chat: the chat template.
        history: the earlier turns.
        text: the whole conversation.
        before: the text before what the turn says. It may be longer than the generation prompt: the model writes the
            tag that opens its reasoning, or the space before its first word.
    """
    prompt = _try_prompt(chat, history)
    if not prompt or not text.startswith(prompt):
        return len(before)
    if before[len(prompt) :].strip() and prompt == chat.render(history):
        return len(before)  # this chat template knows no generation prompt, so what is between is the header
    return len(prompt)


def _surroundings(chat: ChatRenderer, messages: Sequence[dict[str, Any]], index: int, text: str) -> tuple[str, str]:
    """Return the text before and after what turn `index` says, found by rendering a stand-in in its place.

    Comparing prefixes of the conversation is not enough: some templates drop the reasoning of earlier turns, so that
    the text of a turn depends on what follows it.
    """
    mark = "TWINKLETURN"
    while mark in text:
        mark += "X"
    rendered = chat.render([*messages[:index], _stand_in(messages[index], mark), *messages[index + 1 :]])
    first, last = rendered.find(mark), rendered.rfind(mark)
    before, after = rendered[:first], rendered[last + len(mark) :]
    whole = len(before) + len(after) <= len(text)
    if first < 0 or not whole or not text.startswith(before) or not text.endswith(after):
        raise EncodeError(_not_found(index))
    return before, after


def _stand_in(message: dict[str, Any], mark: str) -> dict[str, Any]:
    changed = {**message, "content": mark}
    if "reasoning_content" in message:
        changed["reasoning_content"] = mark
    if message.get("tool_calls"):
        changed["tool_calls"] = [_marked_call(call, mark) for call in message["tool_calls"]]
    return changed


def _marked_call(call: Any, mark: str) -> Any:
    function = call.get("function", call)
    arguments = {mark: mark} if isinstance(function.get("arguments"), dict) else f'{{"{mark}": "{mark}"}}'
    marked = {**function, "name": mark, "arguments": arguments}
    return {**call, "function": marked} if "function" in call else marked


def _end_token(special: Collection[str], after: str, anywhere: bool) -> int:
    """Return how much of `after` still belongs to the turn: up to and with the first special token, if one ends it.

    Args:
        special: the text of each special token.
        after: the text that follows what the turn says.
        anywhere: the special token may follow other text (the closing of a tool call), not only white space.
    """
    gap = len(after) - len(after.lstrip())
    places = [(after.find(token), -len(token), token) for token in special]
    places = sorted(place for place in places if place[0] >= 0 and (anywhere or place[0] <= gap))
    return places[0][0] + len(places[0][2]) if places else 0


def _try_prompt(chat: ChatRenderer, messages: Sequence[dict[str, Any]]) -> str | None:
    """Render what the model is prompted with after `messages`; None where the chat template wants more of them."""
    try:
        return chat.render(messages, add_generation_prompt=True) if messages else None
    except EncodeError:
        return None


def _not_found(index: int) -> str:
    return (
        f"message {index} (assistant) cannot be found in what the chat template makes of the conversation, so its "
        "tokens cannot be told from the prompt's; mark them in the chat template with {% generation %}"
    )


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
    targets = [token if train else IGNORE for token, train in zip(tokens, trained, strict=True)]
    return [*targets[1:], IGNORE][: len(targets)]
