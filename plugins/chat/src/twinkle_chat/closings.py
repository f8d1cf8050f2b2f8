"""Finds where a turn ends: with its last words, its tool calls, and the tokens that the chat template puts behind."""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from twinkle_chat.rendering import ChatRenderer, Span
from twinkle_chat.standins import Marked, common_start, render_marked


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
            found = self._ended(last, calls)
            if calls and found and found[1]:  # text follows the calls, but the model stops before the results
                found = self._ended([*last[:-1], {**message, "content": ""}], calls)
            self._last[kind] = found[0] if found else None
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
    return [found.span() for found in re.finditer(pattern, text)]
