"""Language-independent quality filters: repetition, unusual characters, and the order of turns."""

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.filter import Filter
from twinkle_data.rows import flag
from twinkle_data.texts import checked_count, checked_roles, checked_share, conversations, said, texts

_ODD = frozenset({"So", "Cc", "Co", "Cs", "Cn"})


class RepetitionFilter(Filter):
    """Drops rows with repetitive text, such as output of models stuck in a loop.

    The repetition of a text of n characters is the share of its n - size + 1 runs of `size` characters that stood in it
    before: 0 for a text without repetition, near 1 for a loop. Texts shorter than `min_length` pass.

    Args:
        max_share: the largest repetition that stays.
        size: characters in a run.
        min_length: in characters.
        roles: whose messages are looked at; None is everybody's.
        column: look at the text of this column instead.
    """

    def __init__(
        self,
        max_share: float = 0.5,
        size: int = 10,
        min_length: int = 100,
        roles: str | Sequence[str] | None = ("assistant",),
        column: str | None = None,
    ) -> None:
        owner = type(self).__name__
        self.max_share = checked_share(max_share, "max_share", owner)
        self.size = checked_count(size, "size", owner, 1)
        self.min_length = checked_count(min_length, "min_length", owner)
        self.roles, self.column = checked_roles(roles, owner), column

    def __call__(self, row: Mapping[str, Any]) -> bool:
        """Return whether no text of the row is too repetitive.

        Raises:
            DataError: the row has no conversation, or lacks the column.
        """
        contents = texts(row, self.column, self.roles, type(self).__name__)
        return all(self.repetition(text) <= self.max_share for text in contents if len(text) >= self.min_length)

    def repetition(self, text: str) -> float:
        """Return the fraction of the text's n-grams that occur earlier in it."""
        runs = len(text) - self.size + 1
        if runs < 1:
            return 0.0
        return 1 - len({text[start : start + self.size] for start in range(runs)}) / runs


class CharacterFilter(Filter):
    """Drops rows with unusual characters: symbols instead of words, control characters, or broken encoding.

    Symbols are emoji, drawings and the like, control characters and unassigned ones (Unicode's categories So, Cc, Co,
    Cs and Cn), not the signs of formulas and prices. U+FFFD, which decoders put where bytes made no sense, is broken
    encoding.

    Args:
        max_symbols: the largest share of symbols in a text that stays.
        allow_broken: let broken encoding pass.
        roles: whose messages are looked at; None is everybody's.
        column: look at the text of this column instead.
    """

    def __init__(
        self,
        max_symbols: float = 0.3,
        allow_broken: bool = False,
        roles: str | Sequence[str] | None = None,
        column: str | None = None,
    ) -> None:
        owner = type(self).__name__
        self.max_symbols = checked_share(max_symbols, "max_symbols", owner)
        self.allow_broken = flag(allow_broken, "allow_broken", owner)
        self.roles, self.column = checked_roles(roles, owner), column

    def __call__(self, row: Mapping[str, Any]) -> bool:
        """Return whether every text of the row consists of words.

        Raises:
            DataError: the row has no conversation, or lacks the column.
        """
        return all(self._good(text) for text in texts(row, self.column, self.roles, type(self).__name__))

    def _good(self, text: str) -> bool:
        if not self.allow_broken and "\N{REPLACEMENT CHARACTER}" in text:
            return False
        odd = sum(unicodedata.category(letter) in _ODD and not letter.isspace() for letter in text)
        return odd <= self.max_symbols * len(text)


class ConversationFilter(Filter):
    """Keeps well-formed conversations: no empty turns, and roles in a valid order.

    The order: a system message only at the beginning, then the user; the assistant answers the user or a tool; a tool
    answers the assistant's call; and the assistant has the last word. Both sides of a preference pair must be so.

    Args:
        allow_empty: let turns pass that say nothing, neither text nor reasoning nor a tool call.
        any_order: let turns come in any order.
        min_rounds: the fewest turns of the assistant.
        max_rounds: the most; None is no limit.
    """

    def __init__(
        self, allow_empty: bool = False, any_order: bool = False, min_rounds: int = 1, max_rounds: int | None = None
    ) -> None:
        owner = type(self).__name__
        self.allow_empty = flag(allow_empty, "allow_empty", owner)
        self.any_order = flag(any_order, "any_order", owner)
        self.min_rounds = checked_count(min_rounds, "min_rounds", owner)
        self.max_rounds = None if max_rounds is None else checked_count(max_rounds, "max_rounds", owner, 1)

    def __call__(self, row: Mapping[str, Any]) -> bool:
        """Return whether all conversations of the row are well-formed.

        Raises:
            DataError: the row has none.
        """
        return all(self._good(messages) for messages in conversations(row, type(self).__name__))

    def _good(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        rounds = sum(message.get("role") == "assistant" for message in messages)
        return (
            rounds >= self.min_rounds
            and (self.max_rounds is None or rounds <= self.max_rounds)
            and (self.allow_empty or not any(map(_is_empty, messages)))
            and (self.any_order or _in_order(messages))
        )


_BEFORE = {
    "system": (None,),
    "user": (None, "system", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


def _in_order(messages: Sequence[Mapping[str, Any]]) -> bool:
    before = None
    for message in messages:
        role = message.get("role")
        if before not in _BEFORE.get(role or "", ()):
            return False
        before = role
    return before == "assistant"


def _is_empty(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else []
    shows = any(isinstance(part, Mapping) and part.get("type") not in (None, "text") for part in parts)
    return not (said(message).strip() or shows or message.get("reasoning_content") or message.get("tool_calls"))
