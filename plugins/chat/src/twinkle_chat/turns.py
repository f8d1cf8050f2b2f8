"""Finds each assistant turn in a rendered conversation: where the model's tokens start, and where the turn ends.

The conversation is rendered again with stand-ins for what its messages say, so that what is left is the chat template's
own text. All turns are replaced at once, so the work grows with the length of the conversation and not with its square;
if that is ambiguous (a turn quotes the chat template itself), one turn at a time.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.errors import EncodeError
from twinkle_chat.rendering import ChatRenderer, Span


@dataclass(frozen=True, slots=True)
class Marked:
    """A rendered conversation with placeholders, split at them.

    Attributes:
        pieces: the texts before, between and after the placeholders.
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
    """Return a prefix for placeholders that does not occur in a text."""
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
    """Render the conversation with placeholders for the text of some messages.

    A chat template may repeat the name of a call in the header of its result. Such a repetition is no part of the turn,
    so it is read as the name itself.

    Args:
        chat: the chat template.
        messages: the conversation.
        indices: the messages to locate.
        stem: prefix of the placeholders.
        whole_calls: use placeholders for all names and arguments, not only for the first name.
        others: further messages whose content is replaced by placeholders.
        prompt: end with the generation prompt.

    Returns:
        The texts and the marks; None if the chat template refuses the placeholders.
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


class Prompts:
    """Finds where the model's text begins in each turn: after the generation prompt, if the text has it there.

    What follows is the model's: the tag that opens its reasoning or a call, or the space before its first word.
    """

    def __init__(self, chat: ChatRenderer, messages: Sequence[dict[str, Any]], text: str) -> None:
        self._chat, self._messages, self._text = chat, messages, text
        self._leads: _Leads | None = None

    def start(self, index: int, first: int) -> int:
        """Return where turn `index` starts, whose own words begin at `first`."""
        if index == 0:
            return first
        if self._leads is None:
            self._leads = _Leads(self._chat, self._messages, stem_for(self._text))
        lead = self._leads.lead(index)
        if lead is None:
            return self.measured(index, first)
        length, prompted = lead
        start = first - length
        return start + len(prompted) if prompted.strip() and self._text.startswith(prompted, start) else start

    def measured(self, index: int, first: int) -> int:
        """Return the start of turn `index` by its own generation prompt, independent of other turns."""
        prompt = _prompt(self._chat, self._messages, index)
        before, plain = self._text[:first], self._chat.render(self._messages[:index]) if index else ""
        if not prompt:
            return first
        if not self._text.startswith(prompt):
            shared = _whole_tags(prompt, common_start(prompt, self._text))
            return min(shared, first) if shared > common_start(prompt, plain) else first
        if before[len(prompt) :].strip() and not _knows_prompts(self._chat, self._messages):
            return first  # what is between is the header, or the tag that opens a call
        return len(prompt)


def _prompt(chat: ChatRenderer, messages: Sequence[dict[str, Any]], index: int) -> str | None:
    """Render the prompt of turn `index`; None if the chat template requires more messages."""
    try:
        return chat.prompt(messages[:index]) if index else None
    except EncodeError:
        return None


def _knows_prompts(chat: ChatRenderer, messages: Sequence[dict[str, Any]]) -> bool:
    """Say whether this chat template writes a generation prompt at all; some add nothing behind tool results."""
    first = next((index for index, message in enumerate(messages) if index and message["role"] == "assistant"), 0)
    return first > 0 and _prompt(chat, messages, first) != chat.render(messages[:first])


class _Leads:
    """Finds how much of the template's text before the text of a turn belongs to the turn.

    The text between the words of the message before and those of the turn is compared with what the chat template
    writes behind the former in the generation prompt. The part that both have is the message's, the rest the turn's.
    The prompt is rendered once for each kind of messages that a turn follows.
    """

    def __init__(self, chat: ChatRenderer, messages: Sequence[dict[str, Any]], stem: str) -> None:
        self._chat, self._messages, self._stem = chat, messages, stem
        self._turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        self._others = [turn - 1 for turn in self._turns if turn and messages[turn - 1]["role"] != "assistant"]
        self._before = _pieces_before(render_marked(chat, messages, self._turns, stem, others=self._others))
        self._knows = _knows_prompts(chat, messages)
        self._prompts: dict[Any, tuple[tuple[int, str], str] | None] = {}
        self._spoken: dict[Any, str | None] = {}

    def lead(self, index: int) -> tuple[int, str] | None:
        """Return how many characters before the words of turn `index` are the turn's; None where they do not tell.

        The second value is what the generation prompt has behind the shared part: a thought that it opens, which the
        words of the turn may begin with.
        """
        piece = self._before.get(index)
        prompt = self._prompt(index)
        if piece is None or prompt is None or (piece[0][0] - index, piece[0][1]) != prompt[0]:
            return None
        shared = _whole_tags(piece[1], common_start(piece[1], prompt[1]))
        if self._knows or not piece[1][shared:].strip():
            return len(piece[1]) - shared, prompt[1][shared:]
        # This chat template knows no generation prompt. What an answer without calls has before it is the header.
        spoken = self._as_spoken(index)
        if spoken is not None and spoken[shared:].strip():
            shared = _whole_tags(piece[1], common_start(piece[1], spoken))
        return len(piece[1]) - shared, ""

    def _kind(self, index: int) -> Any:
        first = max(index - 2, 0)
        while first and self._messages[first]["role"] == "tool":
            first -= 1  # what a chat template writes behind results may depend on the turn that called
        return [(m["role"], bool(m.get("tool_calls")), bool(m["content"])) for m in self._messages[first:index]]

    def _prompt(self, index: int) -> tuple[tuple[int, str], str] | None:
        kind = str(self._kind(index))
        if kind not in self._prompts:
            turns = [turn for turn in self._turns if turn < index]
            others = [other for other in self._others if other < index]
            shown = render_marked(self._chat, self._messages[:index], turns, self._stem, others=others, prompt=True)
            ended = shown is not None and shown.marks
            self._prompts[kind] = (
                ((shown.marks[-1][0] - index, shown.marks[-1][1]), shown.pieces[-1]) if shown and ended else None
            )
        return self._prompts[kind]

    def _as_spoken(self, index: int) -> str | None:
        """Return what the chat template writes before turn `index` if the turn has text instead of calls."""
        kind = str(self._kind(index))
        if kind not in self._spoken:
            turn = {"role": "assistant", "content": "text"}
            messages = [*self._messages[:index], turn]
            turns = [turn for turn in self._turns if turn <= index]
            others = [other for other in self._others if other < index]
            piece = _pieces_before(render_marked(self._chat, messages, turns, self._stem, others=others)).get(index)
            self._spoken[kind] = None if piece is None else piece[1]
        return self._spoken[kind]


def _pieces_before(marked: Marked | None) -> dict[int, tuple[tuple[int, str], str]]:
    """Return for each turn the placeholder before its first one, and the text between the two."""
    before: dict[int, tuple[tuple[int, str], str]] = {}
    if marked is None:
        return before
    for number, (owner, field) in enumerate(marked.marks):
        if number and field != "o" and owner not in before:
            before[owner] = marked.marks[number - 1], marked.pieces[number]
    return before


def _whole_tags(text: str, place: int) -> int:
    """Return the end of the last whole tag before `place`: `<think>` and `<tool_call>` share nothing."""
    opened = max(text.rfind("<", 0, place), text.rfind("[", 0, place))
    return opened if opened >= 0 and not re.search(r"[>\]\s]", text[opened:place]) else place


class Closings:
    """Knows where a turn ends: what behind its words the chat template writes where no message follows, too.

    A rendering of the conversation up to the turn tells that, one for each kind of turn. Behind tool calls two more are
    needed: one with stand-ins for whole calls, so that what is left is the chat template's own; and one with stand-ins
    for what follows, too, so that results are not taken for a closing.
    """

    def __init__(
        self,
        chat: ChatRenderer,
        messages: Sequence[dict[str, Any]],
        indices: Sequence[int],
        stem: str,
        whole: Marked | None,
    ) -> None:
        self._chat, self._messages, self._indices, self._stem, self._whole = chat, messages, indices, stem, whole
        self._others = [
            other
            for index in indices
            if messages[index].get("tool_calls")
            for other in _heard_after(messages, index)
            if other not in indices
        ]
        self._short = None if whole is None else render_marked(chat, messages, indices, stem, True, self._others)
        self._last: dict[Any, str | None] = {}

    def of_words(self, index: int, after: str) -> int:
        """Return how much of `after`, the text behind a turn's words, is the special token that ends the turn.

        Only white space may be before it. Where several follow each other, those that the turn itself has.
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

    def of_calls(self, index: int, after: str) -> int:
        """Return how much of `after`, the text behind the name of a turn's first call, belongs to the turn.

        All of it, where the turn goes on behind its calls before anybody else speaks.
        """
        whole = self._whole.after_calls(index) if self._whole else None
        if whole is None:
            return 0
        tail = _common_end(after, whole[0])
        skipped = len(whole[0]) - len(tail)  # the stand-in's own quotes and brackets
        short = self._short.after_calls(index) if self._short else None
        following = (short or whole)[1]
        if following and following[0][0] == index:
            return len(after)
        scaffold = short[0][skipped:] if short else tail
        last = self._closing(index, calls=True)
        closing = None if last is None else scaffold[: common_start(scaffold, last[skipped:])]
        return len(after) - len(tail) + _call_end(self._chat.special_tokens, scaffold, closing)

    def _closing(self, index: int, calls: bool) -> str | None:
        """Return what follows a turn's words, or calls, where the conversation ends there; None if that is refused."""
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
            closing = self._ended(last, calls)
            if calls and closing and closing[1]:  # text follows the calls, but the model stops before the results
                closing = self._ended([*last[:-1], {**message, "content": ""}], calls)
            self._last[kind] = closing[0] if closing else None
        return self._last[kind]

    def _ended(self, messages: Sequence[dict[str, Any]], calls: bool) -> tuple[str, list[tuple[int, str]]] | None:
        index = len(messages) - 1
        turns = [turn for turn in self._indices if turn <= index]
        others = [other for other in self._others if other < index]
        marked = render_marked(self._chat, messages, turns, self._stem, whole_calls=calls, others=others)
        if marked is None or calls:
            return marked.after_calls(index) if marked else None
        return (marked.pieces[-1], []) if marked.marks and marked.marks[-1][0] == index else None


def _heard_after(messages: Sequence[dict[str, Any]], index: int) -> Iterator[int]:
    """Yield the messages between an assistant turn and the next."""
    for other in range(index + 1, len(messages)):
        if messages[other]["role"] == "assistant":
            return
        yield other


def _common_end(first: str, second: str) -> str:
    """Return the longest text that both end with."""
    shared = common_start(first[::-1], second[::-1])
    return first[len(first) - shared :]


def _call_end(special: Collection[str], after: str, closing: str | None) -> int:
    """Return how much of `after`, the text behind a turn's calls, belongs to the turn.

    Args:
        special: the text of each special token.
        after: what the chat template writes between the calls and the words of the next message.
        closing: the part of `after` that it writes as well where no message follows; None where this is not known.

    Returns:
        Up to the last special token of the closing, where nothing but white space follows. A closing without one ends
        with the first special token behind it, which opens the next message: there the model stops. Where there is none
        either, all of the closing.
    """
    tokens = _special(special, after)
    if closing is None:
        return tokens[0][1] if tokens else 0
    inside = [end for _, end in tokens if end <= len(closing)]
    if inside:
        return inside[-1]
    ended = closing.rstrip()
    behind = next((end for start, end in tokens if end > len(closing) and not after[len(ended) : start].strip()), 0)
    return behind or len(ended)


def _special(special: Collection[str], text: str) -> list[Span]:
    """Return the places of special tokens in a text; of two that begin at one place the longer."""
    if not special:
        return []
    pattern = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True))
    return [match.span() for match in re.finditer(pattern, text)]


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
    turns_found = []
    for index in wanted:
        place = known[index]
        parts = [(prompts.start(index, place.first), place.parts[0][1]), *place.parts[1:]]
        following = next((turn for turn in turns if turn > index), None)
        if following is not None and (
            after := known.get(following) or _place_if_found(chat, messages, following, text)
        ):
            parts[-1] = _before(prompts.start(following, after.first), parts[-1])
        turns_found.append(parts)
    return turns_found


def _before(following: int, part: Span) -> Span:
    """End the last part of a turn where the next turn starts: its first token is no token that ends this one."""
    start, end = part
    return (start, following) if start < following < end else part


def turn_span(chat: ChatRenderer, messages: Sequence[dict[str, Any]], index: int, text: str) -> Span:
    """Return the character range of message `index`, of any role, with the token that ends its turn.

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
    """Locate the text of some turns; None for a turn that is not found, or occurs more than once.

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
        if number and words.marks[number - 1][0] == owner:  # text of a turn after its calls
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
