"""Tokens to text, incrementally: characters and stop strings are never cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNFINISHED = "\ufffd"  # decoded text of an incomplete character
_PATIENCE = 16  # most tokens to wait for the rest of a character; no character has as many bytes


class TextDecoder:
    """Decodes the tokens of one sequence; special tokens, and everything from a stop string on, are not part of it.

    The text of a token is the difference between decoding with and without it, after a few tokens of context, which
    keeps spaces that decoders drop at the start.

    Args:
        tokenizer: of the model.
        stops: strings that end the text.
        before: tokens whose text the sequence continues; they are context, and not part of the text.

    Attributes:
        stop: the stop string that ended the text, if one did.
    """

    def __init__(self, tokenizer: "Tokenizer", stops: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._before = list(before[-_CONTEXT:])
        self._tokens: list[int] = []
        self._tail = list(self._before)
        self._shown = len(self._decode(self._tail)) if self._tail else 0  # characters of the decoded tail
        self._waiting = 0  # tokens since the last complete character
        self._sent = self._held = ""
        self.stop: str | None = None

    def add(self, tokens: Sequence[int]) -> str:
        """Add tokens and return the text that is final: no stop string can begin in it."""
        self._tokens += tokens
        self._tail += tokens
        self._waiting += len(tokens)
        after = self._decode(self._tail)
        whole = after if self._waiting > _PATIENCE else after.rstrip(_UNFINISHED)
        if len(whole) <= self._shown:
            return ""
        text = self._held + whole[self._shown :]
        self._shown, self._waiting = len(whole), 0
        if whole == after:  # the next difference needs only the last tokens as context
            self._tail = self._tail[-_CONTEXT:]
            self._shown = len(self._decode(self._tail))
        certain = len(text) - max((_begun(text, string) for string in self._stops), default=0)
        self._held = text[certain:]
        self._sent += text[:certain]
        return text[:certain]

    def finish(self, tokens: Sequence[int], stopped: bool) -> str:
        """Add the last tokens and return the rest of the text.

        Args:
            tokens: the last tokens.
            stopped: whether a stop token or a stop string ended the sequence.
        """
        self._tokens += tokens
        whole = self._whole(self._tokens)
        found = [(start, string) for string in self._stops if (start := whole.find(string)) >= 0]
        if found:
            start, self.stop = min(found)
            whole = whole[:start]
        elif stopped:
            whole = self._whole(self._tokens[:-1])
        return whole[len(self._sent) :] if whole.startswith(self._sent) else ""

    def _whole(self, tokens: list[int]) -> str:
        if not self._before:
            return self._decode(tokens)
        return self._decode(self._before + tokens)[len(self._decode(self._before)) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


_CONTEXT = 6


def _begun(text: str, string: str) -> int:
    """Return how many characters at the end of `text` may belong to an occurrence of `string`."""
    if (at := text.find(string)) >= 0:
        return len(text) - at
    return next((n for n in range(min(len(string) - 1, len(text)), 0, -1) if text.endswith(string[:n])), 0)


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token as text and as bytes, which may be a part of a character."""

    text: str
    data: list[int]

    @property
    def name(self) -> str:
        r"""A name that no other token has: the text, or `bytes:\xe2\x82` for a part of a character, as OpenAI's."""
        if _UNFINISHED not in self.text or bytes(self.data) == self.text.encode():
            return self.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)


class TokenTexts:
    """Texts of single tokens, for log-probabilities.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}
        self._bytes = _byte_alphabet() if "ByteLevel" in type(tokenizer.decoder).__name__ else {}

    def decoder(self) -> TextDecoder:
        """Return a decoder of a sequence."""
        return TextDecoder(self._tokenizer)

    def whole(self, tokens: Sequence[int]) -> str:
        """Return the text of several tokens, without special tokens."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def __getitem__(self, token: int) -> TokenText:
        if token not in self._known:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            piece = self._tokenizer.id_to_token(token) or ""
            exact = [self._bytes[letter] for letter in piece] if all(letter in self._bytes for letter in piece) else []
            self._known[token] = TokenText(text, exact or list(text.encode()))
        return self._known[token]


def _byte_alphabet() -> dict[str, int]:
    """Return the bytes that the letters of byte-level vocabularies stand for (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}
