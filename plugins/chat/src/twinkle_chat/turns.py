"""Locates each assistant turn in a rendered conversation: the start of the model's tokens and the end of the turn.

The conversation is rendered again with placeholders for the text of its messages; the remaining text is the chat
template's own. All turns are replaced in one rendering, so the work is linear in the length of the conversation. If the
result is ambiguous (a turn quotes the chat template itself), one turn is replaced at a time.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.errors import EncodeError
from twinkle_chat.rendering import ChatRenderer, Span


@dataclass(frozen=True, slots=True)
class RenderedTemplate:
    """A conversation rendered with placeholders, and split at them.

    Attributes:
        pieces: the texts before, between and after the placeholders.
        marks: message and field of each placeholder: `r` is reasoning, `c` content, `n0` the name of the first call,
            `a0` its arguments, `o` the content of a message that is not to be located.
    """

    pieces: Sequence[str]
    marks: Sequence[tuple[int, str]]

    def after_calls(self, index: int) -> tuple[str, list[tuple[int, str]]] | None:
        """Return the text between the last placeholder of a turn's calls and the next one, and the marks after it."""
        positions = [place for place, mark in enumerate(self.marks) if mark[0] == index and mark[1][0] in "na"]
        if not positions:
            return None
        return self.pieces[positions[-1] + 1], list(self.marks[positions[-1] + 1 :])


def render_whole_calls(
    chat: ChatRenderer, messages: Sequence[dict[str, Any]], indices: Sequence[int], text: str
) -> RenderedTemplate | None:
    """Render with placeholders for text and whole calls of turns; None without calls, or if the template refuses."""
    if not any(messages[index].get("tool_calls") for index in indices):
        return None
    return render_with_placeholders(chat, messages, indices, stem_for(text), whole_calls=True)


def stem_for(text: str) -> str:
    """Return a prefix for placeholders that does not occur in a text."""
    stem = "TWINKLETURN"
    while stem in text:
        stem += "X"
    return stem


def render_with_placeholders(
    chat: ChatRenderer,
    messages: Sequence[dict[str, Any]],
    indices: Sequence[int],
    stem: str,
    whole_calls: bool = False,
    others: Collection[int] = (),
    prompt: bool = False,
) -> RenderedTemplate | None:
    """Render the conversation with placeholders for the text of some messages.

    A chat template may repeat the name of a call in the header of its result. The repetition is not part of the turn,
    so its placeholder is replaced by the name.

    Args:
        chat: the chat template.
        messages: the conversation.
        indices: the messages to locate.
        stem: prefix of the placeholders.
        whole_calls: use placeholders for all names and arguments, not only for the first name.
        others: further messages whose content is replaced by placeholders.
        prompt: end with the generation prompt.

    Returns:
        The texts and the marks, or None if the chat template refuses the placeholders.
    """
    marked: list[dict[str, Any]] = list(messages)
    for index in indices:
        marked[index] = _with_placeholders(messages[index], f"{stem}{index}", whole_calls)
    for index in others:
        marked[index] = {**messages[index], "content": f"{stem}{index}oE"}
    try:
        rendered = chat.prompt(marked) if prompt else chat.render(marked)
    except EncodeError:
        return None
    pieces, marks = [""], list[tuple[int, str]]()
    place = 0
    for match in re.finditer(stem + r"(\d+)([rcoan]\d*)E", rendered):
        pieces[-1] += rendered[place : match.start()]
        place = match.end()
        mark = int(match[1]), match[2]
        if match[2][0] == "n" and mark in marks:
            call = messages[mark[0]]["tool_calls"][int(match[2][1:])]
            pieces[-1] += call.get("function", call)["name"]
        else:
            marks.append(mark)
            pieces.append("")
    pieces[-1] += rendered[place:]
    return RenderedTemplate(pieces, marks)


def _with_placeholders(message: dict[str, Any], mark: str, whole_calls: bool) -> dict[str, Any]:
    """Return a message with placeholders for its text; a turn that only calls tools gets no content.

    Of the tool calls, only the name of the first is replaced, so that the text after it is unchanged. With
    `whole_calls` all names and arguments are replaced, so that only the chat template's own text remains.
    """
    calls = message.get("tool_calls")
    changed = dict(message)
    if not calls or (message["content"] or "").strip():
        changed["content"] = f"{mark}cE"
    if message.get("reasoning_content"):
        changed["reasoning_content"] = f"{mark}rE"
    if calls:
        changed["tool_calls"] = [
            _call_with_placeholders(call, mark, number, whole_calls) if whole_calls or number == 0 else call
            for number, call in enumerate(calls)
        ]
    return changed


def _call_with_placeholders(call: Any, mark: str, number: int, whole_call: bool) -> Any:
    function = call.get("function", call)
    marked = {**function, "name": f"{mark}n{number}E"}
    if whole_call:
        value = f"{mark}a{number}E"
        marked["arguments"] = (
            {value: value} if isinstance(function.get("arguments"), dict) else f'{{"{value}": "{value}"}}'
        )
    return {**call, "function": marked} if "function" in call else marked


def common_start(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts."""
    if first.startswith(second):
        return len(second)
    return next(
        (place for place, (left, right) in enumerate(zip(first, second, strict=False)) if left != right),
        min(len(first), len(second)),
    )


class TurnStarts:
    """Locates the start of the model's text in each turn: the end of the generation prompt, if the turn begins with it.

    All text after it is the model's: a tag that opens reasoning or a call, or a space before the first word.
    """

    def __init__(self, chat: ChatRenderer, messages: Sequence[dict[str, Any]], text: str) -> None:
        self._chat, self._messages, self._text = chat, messages, text
        self._prefixes: _TurnPrefixes | None = None

    def start(self, index: int, first: int) -> int:
        """Return the start of turn `index`, whose message text begins at `first`."""
        if index == 0:
            return first
        if self._prefixes is None:
            self._prefixes = _TurnPrefixes(self._chat, self._messages, stem_for(self._text))
        prefix = self._prefixes.prefix(index)
        if prefix is None:
            return self.start_by_prompt(index, first)
        length, prompted = prefix
        start = first - length
        return start + len(prompted) if prompted.strip() and self._text.startswith(prompted, start) else start

    def start_by_prompt(self, index: int, first: int) -> int:
        """Return the start of turn `index` by its own generation prompt, independent of other turns."""
        prompt = _prompt(self._chat, self._messages, index)
        before, plain = self._text[:first], self._chat.render(self._messages[:index]) if index else ""
        if not prompt:
            return first
        if not self._text.startswith(prompt):
            shared = _tag_boundary(prompt, common_start(prompt, self._text))
            return min(shared, first) if shared > common_start(prompt, plain) else first
        if before[len(prompt) :].strip() and not _has_generation_prompt(self._chat, self._messages):
            return first  # the text in between is the header, or the tag that opens a call
        return len(prompt)


def _prompt(chat: ChatRenderer, messages: Sequence[dict[str, Any]], index: int) -> str | None:
    """Render the generation prompt of turn `index`; None if the chat template requires more messages."""
    try:
        return chat.prompt(messages[:index]) if index else None
    except EncodeError:
        return None


def _has_generation_prompt(chat: ChatRenderer, messages: Sequence[dict[str, Any]]) -> bool:
    """Return whether this chat template writes a generation prompt at all; some write none after tool results."""
    first = next((index for index, message in enumerate(messages) if index and message["role"] == "assistant"), 0)
    return first > 0 and _prompt(chat, messages, first) != chat.render(messages[:first])


class _TurnPrefixes:
    """Determines how much of the template's text before a turn's message text belongs to the turn.

    The template's text between the previous message and the turn is compared with its text between the same message and
    the end of the generation prompt. The common prefix belongs to the previous message, the rest to the turn. The
    prompt is rendered once for each combination of preceding messages (see `_kind`).
    """

    def __init__(self, chat: ChatRenderer, messages: Sequence[dict[str, Any]], stem: str) -> None:
        self._chat, self._messages, self._stem = chat, messages, stem
        self._turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        self._others = [turn - 1 for turn in self._turns if turn and messages[turn - 1]["role"] != "assistant"]
        self._before = _pieces_before(render_with_placeholders(chat, messages, self._turns, stem, others=self._others))
        self._has_prompt = _has_generation_prompt(chat, messages)
        self._prompts: dict[Any, tuple[tuple[int, str], str] | None] = {}
        self._before_plain: dict[Any, str | None] = {}

    def prefix(self, index: int) -> tuple[int, str] | None:
        """Return the number of characters before the text of turn `index` that belong to it; None if unknown.

        The second value is the rest of the generation prompt after the common prefix, such as an opened thought, with
        which the text of the turn may begin.
        """
        piece = self._before.get(index)
        prompt = self._prompt(index)
        if piece is None or prompt is None or (piece[0][0] - index, piece[0][1]) != prompt[0]:
            return None
        shared = _tag_boundary(piece[1], common_start(piece[1], prompt[1]))
        if self._has_prompt or not piece[1][shared:].strip():
            return len(piece[1]) - shared, prompt[1][shared:]
        # Without a generation prompt, the text before an answer without calls is the header.
        before_plain = self._before_plain_turn(index)
        if before_plain is not None and before_plain[shared:].strip():
            shared = _tag_boundary(piece[1], common_start(piece[1], before_plain))
        return len(piece[1]) - shared, ""

    def _kind(self, index: int) -> Any:
        first = max(index - 2, 0)
        while first and self._messages[first]["role"] == "tool":
            first -= 1  # text after tool results may depend on the turn that called
        return [(m["role"], bool(m.get("tool_calls")), bool(m["content"])) for m in self._messages[first:index]]

    def _prompt(self, index: int) -> tuple[tuple[int, str], str] | None:
        kind = str(self._kind(index))
        if kind not in self._prompts:
            turns = [turn for turn in self._turns if turn < index]
            others = [other for other in self._others if other < index]
            rendered = render_with_placeholders(
                self._chat, self._messages[:index], turns, self._stem, others=others, prompt=True
            )
            self._prompts[kind] = (
                ((rendered.marks[-1][0] - index, rendered.marks[-1][1]), rendered.pieces[-1])
                if rendered and rendered.marks
                else None
            )
        return self._prompts[kind]

    def _before_plain_turn(self, index: int) -> str | None:
        """Return the template's text before turn `index`, rendered with text instead of calls."""
        kind = str(self._kind(index))
        if kind not in self._before_plain:
            turn = {"role": "assistant", "content": "text"}
            messages = [*self._messages[:index], turn]
            turns = [turn for turn in self._turns if turn <= index]
            others = [other for other in self._others if other < index]
            piece = _pieces_before(
                render_with_placeholders(self._chat, messages, turns, self._stem, others=others)
            ).get(index)
            self._before_plain[kind] = None if piece is None else piece[1]
        return self._before_plain[kind]


def _pieces_before(marked: RenderedTemplate | None) -> dict[int, tuple[tuple[int, str], str]]:
    """Return for each turn the placeholder before its first one, and the text between these two."""
    before: dict[int, tuple[tuple[int, str], str]] = {}
    if marked is None:
        return before
    for number, (owner, field) in enumerate(marked.marks):
        if number and field != "o" and owner not in before:
            before[owner] = marked.marks[number - 1], marked.pieces[number]
    return before


def _tag_boundary(text: str, place: int) -> int:
    """Move `place` back to the start of the tag around it: `<think>` and `<tool_call>` must not share a prefix."""
    opened = max(text.rfind("<", 0, place), text.rfind("[", 0, place))
    return opened if opened >= 0 and not re.search(r"[>\]\s]", text[opened:place]) else place


class TurnEnds:
    """Locates the end of each turn: text after its message text that the template also writes if no message follows.

    This takes one rendering of the conversation up to the turn for each kind of turn. Turns with tool calls need two
    more: one with placeholders for whole calls, so that only the template's own text remains, and one with placeholders
    for the following messages too, so that results are not mistaken for the end of the turn.
    """

    def __init__(
        self,
        chat: ChatRenderer,
        messages: Sequence[dict[str, Any]],
        indices: Sequence[int],
        stem: str,
        rendered_calls: RenderedTemplate | None,
    ) -> None:
        self._chat, self._messages, self._indices, self._stem, self._rendered_calls = (
            chat,
            messages,
            indices,
            stem,
            rendered_calls,
        )
        self._others = [
            other
            for index in indices
            if messages[index].get("tool_calls")
            for other in _messages_until_next_turn(messages, index)
            if other not in indices
        ]
        self._rendered_all = (
            None
            if rendered_calls is None
            else render_with_placeholders(chat, messages, indices, stem, True, self._others)
        )
        self._last: dict[Any, str | None] = {}

    def ending_after_text(self, index: int, after: str) -> int:
        """Return the length of the special token that ends the turn, at the start of `after`, the text after it.

        Only white space may precede the token. Of several adjacent tokens, those that belong to the turn are included.
        """
        tokens = _special(self._chat.special_tokens, after)
        if not tokens or after[: tokens[0][0]].strip():
            return 0
        run = [tokens[0][1]]
        for start, end in tokens[1:]:
            if start != run[-1]:
                break
            run.append(end)
        if len(run) == 1 or self._messages[index]["role"] != "assistant":
            return run[0]
        last = self._closing(index, calls=False)
        limit = 0 if last is None else common_start(after, last)
        return max([run[0], *(end for end in run if end <= limit)])

    def ending_after_calls(self, index: int, after: str) -> int:
        """Return how many characters of `after`, the text after the name of the first call, belong to the turn.

        This is all of it if the turn has more text after its calls and before the next message.
        """
        rendered_calls = self._rendered_calls.after_calls(index) if self._rendered_calls else None
        if rendered_calls is None:
            return 0
        tail = _common_end(after, rendered_calls[0])
        skipped = len(rendered_calls[0]) - len(tail)  # quotes and brackets around the placeholder
        rendered_all = self._rendered_all.after_calls(index) if self._rendered_all else None
        following = (rendered_all or rendered_calls)[1]
        if following and following[0][0] == index:
            return len(after)
        scaffold = rendered_all[0][skipped:] if rendered_all else tail
        last = self._closing(index, calls=True)
        closing = None if last is None else scaffold[: common_start(scaffold, last[skipped:])]
        return len(after) - len(tail) + _calls_end(self._chat.special_tokens, scaffold, closing)

    def _closing(self, index: int, calls: bool) -> str | None:
        """Return the text after a turn's text, or calls, if the conversation ends there; None if it is refused."""
        message = self._messages[index]
        kind = (
            calls,
            len(message.get("tool_calls") or ()),
            bool(message["content"]),
            bool(message.get("reasoning_content")),
            *(m["role"] for m in self._messages[max(index - 1, 0) : index + 2]),
            index + 1 == len(self._messages),
        )
        if kind not in self._last:
            last = list(self._messages[: index + 1])
            closing = self._render_closing(last, calls)
            if calls and closing and closing[1]:  # text follows the calls, but the model stops before the results
                closing = self._render_closing([*last[:-1], {**message, "content": ""}], calls)
            self._last[kind] = closing[0] if closing else None
        return self._last[kind]

    def _render_closing(
        self, messages: Sequence[dict[str, Any]], calls: bool
    ) -> tuple[str, list[tuple[int, str]]] | None:
        index = len(messages) - 1
        turns = [turn for turn in self._indices if turn <= index]
        others = [other for other in self._others if other < index]
        marked = render_with_placeholders(self._chat, messages, turns, self._stem, whole_calls=calls, others=others)
        if marked is None or calls:
            return marked.after_calls(index) if marked else None
        return (marked.pieces[-1], []) if marked.marks and marked.marks[-1][0] == index else None


def _messages_until_next_turn(messages: Sequence[dict[str, Any]], index: int) -> Iterator[int]:
    """Yield the indices of the messages between an assistant turn and the next one."""
    for other in range(index + 1, len(messages)):
        if messages[other]["role"] == "assistant":
            return
        yield other


def _common_end(first: str, second: str) -> str:
    """Return the longest common suffix."""
    shared = common_start(first[::-1], second[::-1])
    return first[len(first) - shared :]


def _calls_end(special: Collection[str], after: str, closing: str | None) -> int:
    """Return the length of the part of `after`, the text after a turn's calls, that belongs to the turn.

    Args:
        special: the text of each special token.
        after: the template's text between the calls and the text of the next message.
        closing: the part of `after` that the template also writes if no message follows; None if unknown.

    Returns:
        The length up to the last special token of the closing. If the closing has no special token, the length up to
        the first one after it, which opens the next message and at which the model stops; only white space may be in
        between. Otherwise the length of the closing.
    """
    tokens = _special(special, after)
    if closing is None:
        return tokens[0][1] if tokens else 0
    inside = [end for _, end in tokens if end <= len(closing)]
    if inside:
        return inside[-1]
    stripped = closing.rstrip()
    behind = next((end for start, end in tokens if end > len(closing) and not after[len(stripped) : start].strip()), 0)
    return behind or len(stripped)


def _special(special: Collection[str], text: str) -> list[Span]:
    """Return the spans of special tokens in a text; of two that begin at the same position, the longer one."""
    if not special:
        return []
    pattern = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True))
    return [match.span() for match in re.finditer(pattern, text)]


@dataclass(frozen=True, slots=True)
class _TurnPosition:
    """Position of a turn in the text.

    Attributes:
        parts: the characters of each part, in order. There are several if the chat template writes the results of tool
            calls inside the calling turn (Gemma 4).
        first: start of the message's own text: its reasoning, its content or the name of its first call.
        before: the text between the previous assistant turn's own text and `first`.
    """

    parts: Sequence[Span]
    first: int
    before: str


def find_turns(
    chat: ChatRenderer, messages: Sequence[dict[str, Any]], selected: Sequence[int], text: str, added: int = 0
) -> list[list[Span]]:
    """Locate assistant turns in `text`, the rendered conversation.

    Args:
        chat: the chat template.
        messages: the whole conversation.
        selected: the indices of the turns, in order.
        text: the rendered messages.
        added: number of messages before those of the row; errors use indices of the row.

    Returns:
        The characters of each turn: from the end of the generation prompt to the end of the token that ends the turn.
        Most turns have one span; if the chat template writes tool results inside a turn, it has the spans before and
        after them.

    Raises:
        EncodeError: a turn cannot be found, or the chat template does not show one of its tool calls.
    """
    if not selected:
        return []
    prompts = TurnStarts(chat, messages, text)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    rendered_calls = render_whole_calls(chat, messages, turns, text)
    if rendered_calls is not None:
        _require_calls(messages, selected, rendered_calls, added)
    positions = _locate_all(chat, messages, turns, text, rendered_calls)
    if positions is None:
        located = {index: _locate(chat, messages, index, text, added) for index in selected}
    else:
        located = dict(zip(turns, positions, strict=True))
    spans = []
    for index in selected:
        place = located[index]
        parts = [(prompts.start(index, place.first), place.parts[0][1]), *place.parts[1:]]
        following = next((turn for turn in turns if turn > index), None)
        if following is not None and (
            after := located.get(following) or _locate_or_none(chat, messages, following, text)
        ):
            parts[-1] = _before(prompts.start(following, after.first), parts[-1])
        spans.append(parts)
    return spans


def _before(following: int, part: Span) -> Span:
    """End the last part of a turn at the start of the next turn, whose first token does not belong to this one."""
    start, end = part
    return (start, following) if start < following < end else part


def turn_span(chat: ChatRenderer, messages: Sequence[dict[str, Any]], index: int, text: str) -> Span:
    """Return the character range of message `index`, of any role, with the token that ends its turn.

    Raises:
        EncodeError: it cannot be found in `text`, the rendered conversation.
    """
    place = _locate(chat, messages, index, text)
    return place.parts[0][0], place.parts[-1][1]


def _locate(
    chat: ChatRenderer, messages: Sequence[dict[str, Any]], index: int, text: str, added: int = 0
) -> _TurnPosition:
    positions = _locate_all(chat, messages, [index], text, render_whole_calls(chat, messages, [index], text))
    if positions is None and messages[index].get(
        "tool_calls"
    ):  # a template that ignores calls renders the turn as if it had none
        silent = {key: value for key, value in messages[index].items() if key != "tool_calls"}
        without = [*messages[:index], silent, *messages[index + 1 :]]
        positions = _locate_all(chat, without, [index], text, None) if chat.render(without) == text else None
    if positions is None:
        role = messages[index]["role"]
        raise EncodeError(
            f"message {index - added} ({role}) cannot be located in the rendered conversation, so its tokens cannot be "
            "separated from the prompt's; mark them in the chat template with {% generation %}"
        )
    return positions[0]


def _locate_or_none(
    chat: ChatRenderer, messages: Sequence[dict[str, Any]], index: int, text: str
) -> _TurnPosition | None:
    try:
        return _locate(chat, messages, index, text)
    except EncodeError:
        return None


def _require_calls(
    messages: Sequence[dict[str, Any]], turns: Sequence[int], rendered_calls: RenderedTemplate, added: int
) -> None:
    """Refuse a turn with a tool call that the chat template does not show."""
    for index in turns:
        names = [call.get("function", call)["name"] for call in messages[index].get("tool_calls") or ()]
        shown = {field for owner, field in rendered_calls.marks if owner == index and field[0] == "n"}
        missing = next((name for number, name in enumerate(names) if f"n{number}" not in shown), None)
        if missing is not None:
            raise EncodeError(
                f"message {index - added} (assistant) calls the tool {missing!r}, which the chat template does not "
                f"show (it shows {len(shown)} of {len(names)} calls); split the calls into separate messages, write "
                "them into the content in the form that the model should generate, or use a chat template that "
                "supports tool_calls"
            )


def _locate_all(
    chat: ChatRenderer,
    messages: Sequence[dict[str, Any]],
    indices: Sequence[int],
    text: str,
    rendered_calls: RenderedTemplate | None,
) -> list[_TurnPosition] | None:
    """Locate the text of several turns; None if one of them is not found, or is ambiguous.

    Comparing prefixes of the conversation is not enough: some chat templates drop the reasoning of earlier turns, so
    that the text of a turn depends on what follows it.
    """
    words = _merged(render_with_placeholders(chat, messages, indices, stem_for(text)))
    if words is None or list(dict.fromkeys(owner for owner, _ in words.marks)) != list(indices):
        return None
    gaps = _align(text, words.pieces)
    if gaps is None or [owner for owner, _ in words.marks] != sorted(owner for owner, _ in words.marks):
        return None
    calling = [owner for owner, fields in words.marks if "n" in fields]
    if calling and rendered_calls is None:
        return None
    closings = TurnEnds(chat, messages, indices, stem_for(text), rendered_calls)
    positions: list[_TurnPosition] = []
    for number, (owner, fields) in enumerate(words.marks):
        (first, last), after = gaps[number], words.pieces[number + 1]
        last += closings.ending_after_calls(owner, after) if "n" in fields else closings.ending_after_text(owner, after)
        if number and words.marks[number - 1][0] == owner:  # text of a turn after its calls
            place = positions.pop()
            *parts, (start, end) = place.parts
            parts += [(start, last)] if end == first else [(start, end), (first, last)]
            positions.append(_TurnPosition(parts, place.first, place.before))
        else:
            positions.append(_TurnPosition([(first, last)], first, words.pieces[number]))
    return positions


def _merged(marked: RenderedTemplate | None) -> RenderedTemplate | None:
    """Merge adjacent placeholders of the same turn into one gap; the text between them belongs to the turn.

    A call ends a gap: after the calls there may be results, and text of the turn after these is a separate gap.
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
    return RenderedTemplate(pieces, marks)


def _align(text: str, around: Sequence[str]) -> list[Span] | None:
    """Return the gaps between the texts of `around` in `text`; None if they do not match, or match in several ways.

    The match is unique if the leftmost and the rightmost match are the same.
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
