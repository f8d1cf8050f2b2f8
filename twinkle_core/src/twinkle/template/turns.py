"""Finds each assistant turn in a rendered conversation, by rendering it again with stand-ins in the turns' places.

All turns are stood in for at once, so that the work grows with the length of the conversation and not with its square;
where that leaves a doubt (a turn quotes the chat template itself), one turn at a time.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.errors import EncodeError
from twinkle.template.rendering import ChatRenderer, Span


@dataclass(frozen=True, slots=True)
class _Place:
    """What a turn says: the characters `first` to `last`, and the text around it up to the neighbouring turns."""

    first: int
    last: int
    before: str
    after: str


def find_turns(chat: ChatRenderer, messages: Sequence[dict[str, Any]], wanted: Sequence[int], text: str) -> list[Span]:
    """Find some assistant turns in `text`, the rendered conversation.

    Args:
        chat: the chat template.
        messages: the whole conversation.
        wanted: the indices of the turns, in order.
        text: what the chat template makes of the messages.

    Returns:
        The characters of each: from where the model takes over from the generation prompt to the end of the token that
        ends the turn.

    Raises:
        EncodeError: one cannot be found.
    """
    chosen = set(wanted)
    if not chosen:
        return []
    prompts = _Prompts(chat, messages, text)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    places, start = _places(chat, messages, turns, text), prompts.start
    if places is None:
        turns, start = list(wanted), prompts.measured
        places = [_place(chat, messages, index, text) for index in turns]
    return [
        (start(index, place), _end(chat, messages[index], place))
        for index, place in zip(turns, places, strict=True)
        if index in chosen
    ]


def turn_span(chat: ChatRenderer, messages: Sequence[dict[str, Any]], index: int, text: str) -> Span:
    """Return the characters of what message `index`, of any role, says, with the token that ends its turn.

    Raises:
        EncodeError: it cannot be found in `text`, the rendered conversation.
    """
    place = _place(chat, messages, index, text)
    return place.first, _end(chat, messages[index], place)


def _place(chat: ChatRenderer, messages: Sequence[dict[str, Any]], index: int, text: str) -> _Place:
    places = _places(chat, messages, [index], text)
    if places is None:
        role = messages[index]["role"]
        raise EncodeError(
            f"message {index} ({role}) cannot be found in what the chat template makes of the conversation, so its "
            "tokens cannot be told from the prompt's; mark them in the chat template with {% generation %}"
        )
    return places[0]


def _end(chat: ChatRenderer, message: dict[str, Any], place: _Place) -> int:
    return place.last + _end_token(chat.special_tokens, place.after, anywhere=bool(message.get("tool_calls")))


def _places(
    chat: ChatRenderer, messages: Sequence[dict[str, Any]], indices: Sequence[int], text: str
) -> list[_Place] | None:
    """Find what each of some turns says; None where a turn is not found, or could be in more than one place.

    Comparing prefixes of the conversation is not enough: some chat templates drop the reasoning of earlier turns, so
    that the text of a turn depends on what follows it.
    """
    stem = "TWINKLETURN"
    while stem in text:
        stem += "X"
    around = _around(chat, messages, indices, stem, whole_calls=False)
    gaps = _align(text, around) if around else None
    if gaps is None or around is None:
        return None
    after: list[tuple[int, str]] | None = [(0, piece) for piece in around[1:]]
    if any(messages[index].get("tool_calls") for index in indices):
        after = _closings(chat, messages, indices, stem, around[1:])
    if after is None:
        return None
    return [
        _Place(first, last + called, before, closing)
        for (first, last), before, (called, closing) in zip(gaps, around[:-1], after, strict=True)
    ]


def _closings(
    chat: ChatRenderer, messages: Sequence[dict[str, Any]], indices: Sequence[int], stem: str, after: Sequence[str]
) -> list[tuple[int, str]] | None:
    """Split the texts behind the names of the first calls into the rest of the calls and what the chat template adds.

    Returns:
        For each turn the length of the rest, and the text behind it up to what the next message says. None where
        stand-ins for whole calls do not show.
    """
    pieces = _around(chat, messages, indices, stem, whole_calls=True)
    if pieces is None:
        return None
    closings = [_common_end(*pair) for pair in zip(after, pieces[1:], strict=True)]
    every = sorted({*indices, *(index + 1 for index in indices if index + 1 < len(messages))})
    short = _around(chat, messages, every, stem, whole_calls=True)
    limits = {} if short is None else {index: len(piece) for index, piece in zip(every, short[1:], strict=True)}
    return [
        (len(full) - len(closing), closing[: limits.get(index)])
        for index, full, closing in zip(indices, after, closings, strict=True)
    ]


def _around(
    chat: ChatRenderer, messages: Sequence[dict[str, Any]], indices: Sequence[int], stem: str, whole_calls: bool
) -> list[str] | None:
    """Render the conversation with stand-ins, and return the texts before, between and after them.

    None where a turn does not show, or the turns do not come in order.
    """
    marked: list[dict[str, Any]] = list(messages)
    for index in indices:
        marked[index] = _stand_in(messages[index], f"{stem}{index}E", whole_calls)
    rendered = chat.render(marked)
    pieces, seen = list[str](), list[int]()
    place = 0
    for found in re.finditer(stem + r"(\d+)E", rendered):
        index = int(found[1])
        if not seen or seen[-1] != index:
            pieces.append(rendered[place : found.start()])
            seen.append(index)
        place = found.end()
    return [*pieces, rendered[place:]] if seen == list(indices) else None


def _stand_in(message: dict[str, Any], mark: str, whole_calls: bool) -> dict[str, Any]:
    """Return a message that says `mark` instead of its own words.

    Of tool calls the name of the first is replaced, so that all that follows it stays as it is; with `whole_calls`
    everything, so that only the chat template's closing is left.
    """
    changed = {**message, "content": mark}
    if message.get("reasoning_content"):
        changed["reasoning_content"] = mark
    calls = message.get("tool_calls")
    if calls:
        changed["tool_calls"] = [
            _marked_call(call, mark, whole_calls) if whole_calls or number == 0 else call
            for number, call in enumerate(calls)
        ]
    return changed


def _marked_call(call: Any, mark: str, whole: bool) -> Any:
    function = call.get("function", call)
    marked = {**function, "name": mark}
    if whole:
        marked["arguments"] = {mark: mark} if isinstance(function.get("arguments"), dict) else f'{{"{mark}": "{mark}"}}'
    return {**call, "function": marked} if "function" in call else marked


def _align(text: str, around: Sequence[str]) -> list[Span] | None:
    """Return the gaps that the texts of `around` leave in `text`; None where there is no way, or more than one.

    The leftmost way and the rightmost are compared: where they agree, there is no other.
    """
    head, *between, tail = around
    left, right = len(head), len(text) - len(tail)
    if left > right or not text.startswith(head) or not text.endswith(tail) or not all(between):
        return None
    starts, place = [], left
    for piece in between:
        starts.append(text.find(piece, place))
        place = starts[-1] + len(piece)
        if starts[-1] < 0 or place > right:
            return None
    place = right
    for piece, start in zip(reversed(between), reversed(starts), strict=True):
        if text.rfind(piece, left, place) != start:
            return None
        place = start
    firsts = [left, *(start + len(piece) for start, piece in zip(starts, between, strict=True))]
    return list(zip(firsts, [*starts, right], strict=True))


def _common_end(first: str, second: str) -> str:
    """Return the longest text that both end with."""
    shared = _common_start(first[::-1], second[::-1])
    return first[len(first) - shared :]


def _common_start(first: str, second: str) -> int:
    """Return how many characters two texts share at their beginning."""
    if first.startswith(second):
        return len(second)
    return next(
        (place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), len(first)
    )


def _end_token(special: Collection[str], after: str, anywhere: bool) -> int:
    """Return how much of `after` still belongs to the turn: up to and with the first special token, if one ends it.

    Args:
        special: the text of each special token.
        after: the text that follows what the turn says.
        anywhere: the special token may follow other text (the closing of a tool call), not only white space.
    """
    gap = len(after) - len(after.lstrip())
    window = after if anywhere else after[: gap + max(map(len, special), default=0)]
    places = [(window.find(token), -len(token), token) for token in special]
    places = sorted(place for place in places if place[0] >= 0 and (anywhere or place[0] <= gap))
    return places[0][0] + len(places[0][2]) if places else 0


class _Prompts:
    """Knows where the model takes over in each turn: after the generation prompt, if the text has it there.

    The generation prompt is rendered once for each role that a turn follows, and looked for before the other turns.
    """

    def __init__(self, chat: ChatRenderer, messages: Sequence[dict[str, Any]], text: str) -> None:
        self._chat, self._messages, self._text = chat, messages, text
        self._headers: dict[str, str] = {}
        self._leads: dict[str, str] = {}

    def start(self, index: int, place: _Place) -> int:
        """Return where turn `index` starts; `place.before` must reach back to the assistant turn before it.

        What follows the generation prompt is the model's: the tag that opens its reasoning, or the space before its
        first word.
        """
        if index == 0:
            return place.first
        role = self._messages[index - 1]["role"]
        if role not in self._headers:
            self._headers[role] = self._header(index)
        header = self._headers[role]
        if header.strip() and not any(header.split()[0] in words for words in self._heard(index)):
            # The header may reach into the turn: a thought that the prompt closes at once, and the row has empty.
            found = self._text.rfind(header, place.first - len(place.before), place.first + len(header) - 1)
            return place.first if found < 0 else found + len(header)
        lead = self._leads.get(role)
        if lead is not None and not header and place.before.endswith(lead):
            return place.first - len(lead)
        start = self.measured(index, place)
        self._leads.setdefault(role, self._text[start : place.first])
        return start

    def measured(self, index: int, place: _Place) -> int:
        """Return where turn `index` starts by its own generation prompt, whatever the other turns have."""
        prompt, before = self._prompt(index), self._text[: place.first]
        if not prompt or not self._text.startswith(prompt):
            return place.first
        if before[len(prompt) :].strip() and prompt == self._rendered(index):
            return place.first  # this chat template knows no generation prompt, so what is between is the header
        return len(prompt)

    def _heard(self, index: int) -> Iterator[str]:
        """Yield what the messages between the assistant turn before and this one say."""
        for message in reversed(self._messages[:index]):
            if message["role"] == "assistant":
                return
            yield message["content"]

    def _header(self, index: int) -> str:
        prompt, plain = self._prompt(index), self._rendered(index)
        return prompt[_common_start(prompt, plain) :] if prompt else ""

    def _prompt(self, index: int) -> str | None:
        """Render what the model is prompted with; None where the chat template wants more messages."""
        try:
            return self._chat.prompt(self._messages[:index]) if index else None
        except EncodeError:
            return None

    def _rendered(self, index: int) -> str:
        return self._chat.render(self._messages[:index])
