"""When a sequence ends: stop tokens, and stop strings found in text that grows token by token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_UNFINISHED = "\ufffd"  # what a decoder shows for bytes that do not make a character yet
_PATIENCE = 16  # tokens that may wait for a character to be finished; no character has so many bytes


@dataclass(frozen=True)
class StopRule:
    """What ends a sequence.

    Attributes:
        token_ids: each ends the sequence and is its last token.
        strings: each ends it where the text first contains it, special tokens included.
        tokenizer: decodes for `strings`; not needed without them.
    """

    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    tokenizer: Any = None

    def watch(self) -> "StopWatch":
        """Return a fresh watch over one sequence."""
        return StopWatch(self)

    def trim(self, tokens: Sequence[int]) -> str:
        """Return the text of a sequence without special tokens, its stop token, and all from its stop string on."""
        if tokens and tokens[-1] in self.token_ids:
            tokens = tokens[:-1]
        if self.strings:
            text = str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))
            if (start := _first(text, self.strings)) >= 0:
                return _without_special(text[:start], self.tokenizer)
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


class StopWatch:
    """Follows one sequence and says when it ends.

    Text is decoded a few tokens at a time: a token's text is the difference that it makes to the tokens before it,
    which keeps the spaces that decoders drop at the start and holds back bytes of an unfinished character.
    """

    def __init__(self, rule: StopRule) -> None:
        self._rule = rule
        self._tail: list[int] = []
        self._known = 0
        self._text = ""
        self._reach = max((len(string) for string in rule.strings), default=0)

    def ends(self, token: int) -> bool:
        """Take the next token and return whether the sequence ends with it."""
        if token in self._rule.token_ids:
            return True
        return bool(self._rule.strings) and self._string_ends(token)

    def _string_ends(self, token: int) -> bool:
        self._tail.append(token)
        decode = self._rule.tokenizer.decode
        before = decode(self._tail[: self._known], skip_special_tokens=False)
        after = decode(self._tail, skip_special_tokens=False)
        whole = after.rstrip(_UNFINISHED)
        found = _first(self._text + whole[len(before) :], self._rule.strings) >= 0
        finished = whole == after and len(after) > len(before)
        if finished or len(self._tail) - self._known > _PATIENCE:
            # Only so much text is kept as the longest stop string may still need.
            self._text = (self._text + after[len(before) :])[-self._reach :]
            self._tail = self._tail[self._known :]
            self._known = len(self._tail)
        return found


def _first(text: str, strings: Sequence[str]) -> int:
    """Return where the earliest of `strings` begins in `text`, or -1."""
    found = [at for string in strings if (at := text.find(string)) >= 0]
    return min(found, default=-1)


def _without_special(text: str, tokenizer: Any) -> str:
    for special in tokenizer.all_special_tokens:
        text = text.replace(special, "")
    return text


class TextStream:
    """Turns tokens into text piece by piece; the pieces together are what `StopRule.trim` says of all tokens."""

    def __init__(self, rule: StopRule) -> None:
        """Begin without text.

        Args:
            rule: what ends the text; it has a tokenizer.
        """
        self._rule = rule
        self._tail: list[int] = []
        self._known = 0
        self._sent = self._held = ""

    def add(self, token: int) -> str:
        """Take the next token and return the text that is certain now: no stop string can begin in it."""
        if token in self._rule.token_ids:
            return ""
        self._tail.append(token)
        before, after = self._decode(self._tail[: self._known]), self._decode(self._tail)
        finished = not after.endswith(_UNFINISHED) and len(after) > len(before)
        if not finished and len(self._tail) - self._known <= _PATIENCE:
            return ""
        self._tail = self._tail[self._known :]
        self._known = len(self._tail)
        text = self._held + after[len(before) :]
        certain = len(text) - max((_begun(text, string) for string in self._rule.strings), default=0)
        self._held = text[certain:]
        self._sent += text[:certain]
        return text[:certain]

    def finish(self, tokens: Sequence[int]) -> str:
        """Return the rest of the text of all tokens."""
        whole = self._rule.trim(tokens)
        return whole[len(self._sent) :] if whole.startswith(self._sent) else ""

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._rule.tokenizer.decode(list(tokens), skip_special_tokens=True))


def _begun(text: str, string: str) -> int:
    """Return how many characters at the end of `text` are the beginning of `string`, or hold all of it."""
    if (at := text.find(string)) >= 0:
        return len(text) - at
    return next((n for n in range(min(len(string) - 1, len(text)), 0, -1) if text.endswith(string[:n])), 0)
