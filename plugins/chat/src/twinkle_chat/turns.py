"""Finds each assistant turn in a rendered conversation, by rendering it again with stand-ins in the turns' places.

All turns are stood in for at once, so that the work grows with the length of the conversation and not with its square;
where that leaves a doubt (a turn quotes the chat template itself), one turn at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.errors import EncodeError
from twinkle_chat.closings import Closings
from twinkle_chat.rendering import ChatRenderer, Span
from twinkle_chat.standins import Marked, render_marked, render_whole_calls, stem_for
from twinkle_chat.starts import Prompts


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a turn is in the text.

    Attributes:
        parts: the characters of each part, in order. There are several where the chat template writes the results of
            tool calls inside the turn that made them (Gemma 4).
        first: where the turn's own words begin: its reasoning, its text or the name of its first call.
        before: the text between the words of the assistant turn before and `first`.
    """

    parts: Sequence[Span]
    first: int
    before: str


def find_turns(
    chat: ChatRenderer, messages: Sequence[dict[str, Any]], wanted: Sequence[int], text: str, added: int = 0
) -> list[list[Span]]:
    """Find some assistant turns in `text`, the rendered conversation.

    Args:
        chat: the chat template.
        messages: the whole conversation.
        wanted: the indices of the turns, in order.
        text: what the chat template makes of the messages.
        added: how many messages precede those of the row, whose indices errors name.

    Returns:
        The characters of each turn: from where the model takes over from the generation prompt to the end of the token
        that ends the turn. Most turns are one span; where the chat template writes tool results inside a turn, the
        spans before and after them.

    Raises:
        EncodeError: a turn cannot be found, or the chat template does not show one of its tool calls.
    """
    if not wanted:
        return []
    prompts = Prompts(chat, messages, text)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    whole = render_whole_calls(chat, messages, turns, text)
    if whole is not None:
        _require_calls(messages, wanted, whole, added)
    places = _places(chat, messages, turns, text, whole)
    if places is None:
        known = {index: _place(chat, messages, index, text, added) for index in wanted}
    else:
        known = dict(zip(turns, places, strict=True))
    found = []
    for index in wanted:
        place = known[index]
        parts = [(prompts.start(index, place.first), place.parts[0][1]), *place.parts[1:]]
        following = next((turn for turn in turns if turn > index), None)
        if following is not None and (
            after := known.get(following) or _place_if_found(chat, messages, following, text)
        ):
            parts[-1] = _before(prompts.start(following, after.first), parts[-1])
        found.append(parts)
    return found


def _before(following: int, part: Span) -> Span:
    """End the last part of a turn where the next turn starts: its first token is no token that ends this one."""
    start, end = part
    return (start, following) if start < following < end else part


def turn_span(chat: ChatRenderer, messages: Sequence[dict[str, Any]], index: int, text: str) -> Span:
    """Return the characters of what message `index`, of any role, says, with the token that ends its turn.

    Raises:
        EncodeError: it cannot be found in `text`, the rendered conversation.
    """
    place = _place(chat, messages, index, text)
    return place.parts[0][0], place.parts[-1][1]


def _place(chat: ChatRenderer, messages: Sequence[dict[str, Any]], index: int, text: str, added: int = 0) -> _Place:
    places = _places(chat, messages, [index], text, render_whole_calls(chat, messages, [index], text))
    if places is None and messages[index].get(
        "tool_calls"
    ):  # a chat template that shows no calls shows a turn's silence
        silent = {key: value for key, value in messages[index].items() if key != "tool_calls"}
        without = [*messages[:index], silent, *messages[index + 1 :]]
        places = _places(chat, without, [index], text, None) if chat.render(without) == text else None
    if places is None:
        role = messages[index]["role"]
        raise EncodeError(
            f"message {index - added} ({role}) cannot be found in what the chat template makes of the conversation, so "
            "its tokens cannot be told from the prompt's; mark them in the chat template with {% generation %}"
        )
    return places[0]


def _place_if_found(chat: ChatRenderer, messages: Sequence[dict[str, Any]], index: int, text: str) -> _Place | None:
    try:
        return _place(chat, messages, index, text)
    except EncodeError:
        return None


def _require_calls(messages: Sequence[dict[str, Any]], turns: Sequence[int], whole: Marked, added: int) -> None:
    """Refuse a turn with a tool call that the chat template does not show."""
    for index in turns:
        names = [call.get("function", call)["name"] for call in messages[index].get("tool_calls") or ()]
        shown = {field for owner, field in whole.marks if owner == index and field[0] == "n"}
        missing = next((name for number, name in enumerate(names) if f"n{number}" not in shown), None)
        if missing is not None:
            raise EncodeError(
                f"message {index - added} (assistant) calls the tool {missing!r}, which the chat template does not "
                f"show (it shows {len(shown)} of {len(names)} calls); make a message of each call, write the call into "
                "the content as the model is to write it, or use a chat template that knows tool_calls"
            )


def _places(
    chat: ChatRenderer, messages: Sequence[dict[str, Any]], indices: Sequence[int], text: str, whole: Marked | None
) -> list[_Place] | None:
    """Find what each of some turns says; None where a turn is not found, or could be in more than one place.

    Comparing prefixes of the conversation is not enough: some chat templates drop the reasoning of earlier turns, so
    that the text of a turn depends on what follows it.
    """
    words = _joined(render_marked(chat, messages, indices, stem_for(text)))
    if words is None or list(dict.fromkeys(owner for owner, _ in words.marks)) != list(indices):
        return None
    gaps = _align(text, words.pieces)
    if gaps is None or [owner for owner, _ in words.marks] != sorted(owner for owner, _ in words.marks):
        return None
    calling = [owner for owner, fields in words.marks if "n" in fields]
    if calling and whole is None:
        return None
    closings = Closings(chat, messages, indices, stem_for(text), whole)
    places: list[_Place] = []
    for number, (owner, fields) in enumerate(words.marks):
        (first, last), after = gaps[number], words.pieces[number + 1]
        last += closings.of_calls(owner, after) if "n" in fields else closings.of_words(owner, after)
        if number and words.marks[number - 1][0] == owner:  # what a turn says behind its calls
            place = places.pop()
            *parts, (start, end) = place.parts
            parts += [(start, last)] if end == first else [(start, end), (first, last)]
            places.append(_Place(parts, place.first, place.before))
        else:
            places.append(_Place([(first, last)], first, words.pieces[number]))
    return places


def _joined(marked: Marked | None) -> Marked | None:
    """Make one gap of the stand-ins of a turn that follow each other: what is between them is the turn's own.

    After the name of a call the rest of the calls follows, and then there may be results: text behind these is a gap of
    its own.
    """
    if marked is None:
        return None
    pieces, marks = [marked.pieces[0]], list[tuple[int, str]]()
    for (owner, field), piece in zip(marked.marks, marked.pieces[1:], strict=True):
        if marks and marks[-1][0] == owner and "n" not in marks[-1][1]:
            marks[-1] = owner, marks[-1][1] + field
            pieces[-1] = piece
        else:
            marks.append((owner, field))
            pieces.append(piece)
    return Marked(pieces, marks)


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
