"""Renders a conversation with stand-ins for what its messages say, so that what is left is the chat template's own."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.errors import EncodeError
from twinkle_chat.rendering import ChatRenderer


@dataclass(frozen=True, slots=True)
class Marked:
    """A rendered conversation with stand-ins, cut at them.

    Attributes:
        pieces: the texts before, between and after the stand-ins.
        marks: message and field of each stand-in: `r` is reasoning, `c` content, `n0` the name of the first call, `a0`
            its arguments, `o` the content of a message that is not looked for.
    """

    pieces: Sequence[str]
    marks: Sequence[tuple[int, str]]

    def after_calls(self, index: int) -> tuple[str, list[tuple[int, str]]] | None:
        """Return the text between the last stand-in of a turn's calls and the next one, and the marks that follow."""
        places = [place for place, mark in enumerate(self.marks) if mark[0] == index and mark[1][0] in "na"]
        if not places:
            return None
        return self.pieces[places[-1] + 1], list(self.marks[places[-1] + 1 :])


def render_whole_calls(
    chat: ChatRenderer, messages: Sequence[dict[str, Any]], indices: Sequence[int], text: str
) -> Marked | None:
    """Render with stand-ins for all that some turns say and call; None where none calls, or these are refused."""
    if not any(messages[index].get("tool_calls") for index in indices):
        return None
    return render_marked(chat, messages, indices, stem_for(text), whole_calls=True)


def stem_for(text: str) -> str:
    """Return how stand-ins begin that are not in a text."""
    stem = "TWINKLETURN"
    while stem in text:
        stem += "X"
    return stem


def render_marked(
    chat: ChatRenderer,
    messages: Sequence[dict[str, Any]],
    indices: Sequence[int],
    stem: str,
    whole_calls: bool = False,
    others: Collection[int] = (),
    prompt: bool = False,
) -> Marked | None:
    """Render the conversation with stand-ins for what some messages say.

    A chat template may repeat the name of a call in the header of its result. Such a repetition is no part of the turn,
    so it is read as the name itself.

    Args:
        chat: the chat template.
        messages: the conversation.
        indices: the messages that are looked for.
        stem: how the stand-ins begin.
        whole_calls: stand in for all names and arguments, not for the first name alone.
        others: messages whose content is stood in for, too.
        prompt: end with the generation prompt.

    Returns:
        The texts and the marks; None where the chat template refuses the stand-ins.
    """
    marked: list[dict[str, Any]] = list(messages)
    for index in indices:
        marked[index] = _stand_in(messages[index], f"{stem}{index}", whole_calls)
    for index in others:
        marked[index] = {**messages[index], "content": f"{stem}{index}oE"}
    try:
        rendered = chat.prompt(marked) if prompt else chat.render(marked)
    except EncodeError:
        return None
    pieces, marks = [""], list[tuple[int, str]]()
    place = 0
    for found in re.finditer(stem + r"(\d+)([rcoan]\d*)E", rendered):
        pieces[-1] += rendered[place : found.start()]
        place = found.end()
        mark = int(found[1]), found[2]
        if found[2][0] == "n" and mark in marks:
            call = messages[mark[0]]["tool_calls"][int(found[2][1:])]
            pieces[-1] += call.get("function", call)["name"]
        else:
            marks.append(mark)
            pieces.append("")
    pieces[-1] += rendered[place:]
    return Marked(pieces, marks)


def _stand_in(message: dict[str, Any], mark: str, whole_calls: bool) -> dict[str, Any]:
    """Return a message that says `mark` instead of its own words; a turn that only calls tools keeps its silence.

    Of tool calls the name of the first is replaced, so that all that follows it stays as it is; with `whole_calls`
    everything, so that only the chat template's closing is left.
    """
    calls = message.get("tool_calls")
    changed = dict(message)
    if not calls or (message["content"] or "").strip():
        changed["content"] = f"{mark}cE"
    if message.get("reasoning_content"):
        changed["reasoning_content"] = f"{mark}rE"
    if calls:
        changed["tool_calls"] = [
            _marked_call(call, mark, number, whole_calls) if whole_calls or number == 0 else call
            for number, call in enumerate(calls)
        ]
    return changed


def _marked_call(call: Any, mark: str, number: int, whole: bool) -> Any:
    function = call.get("function", call)
    marked = {**function, "name": f"{mark}n{number}E"}
    if whole:
        value = f"{mark}a{number}E"
        marked["arguments"] = (
            {value: value} if isinstance(function.get("arguments"), dict) else f'{{"{value}": "{value}"}}'
        )
    return {**call, "function": marked} if "function" in call else marked


def common_start(first: str, second: str) -> int:
    """Return how many characters two texts share at their beginning."""
    if first.startswith(second):
        return len(second)
    return next(
        (place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other),
        min(len(first), len(second)),
    )
