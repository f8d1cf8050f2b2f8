"""Filters by the text of a conversation: duplicates, loops, broken characters, length."""

import collections
import contextlib
import functools
import hashlib
import itertools
import re
import unicodedata
from typing import Any

from twinkle.errors import ArgumentError
from twinkle_agentic.preprocessor.base import Row, RowFilter, of_role, text_of, with_texts

_SENTENCE = re.compile(r"[^.!?。！？\n]*[.!?。！？\n]+\s*|[^.!?。！？\n]+")
_INVISIBLE = re.compile(r"[\u200b\u2060\ufeff]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_WORD = re.compile(r"[^\W\d_]+")
_ANYWHERE = {
    "CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "HANGUL", "BOPOMOFO", "FULLWIDTH", "HALFWIDTH", "MODIFIER",
    "COMBINING", "MATHEMATICAL", "SCRIPT", "DOUBLE-STRUCK", "BLACK-LETTER", "MICRO", "FEMININE", "MASCULINE",
}  # fmt: skip
"""First words of the names of letters that mix with every alphabet."""
_RUN = re.compile(r"[\x80-\xff€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]{2,}")


class DedupFilter(RowFilter):
    """Drops conversations that begin like an earlier one: system message, first question and first answer.

    It remembers the conversations of all its calls in this process.

    Args:
        max_per_sig: how many of one beginning are kept.
        prefix_chars: characters of the system message and of the question that count.
        asst_chars: characters of the answer that count.
    """

    def __init__(self, max_per_sig: int = 1, prefix_chars: int = 200, asst_chars: int = 150) -> None:
        if min(max_per_sig, prefix_chars, asst_chars) < 1:
            raise ArgumentError("DedupFilter: max_per_sig, prefix_chars and asst_chars must be at least 1")
        self.max_per_sig, self.prefix_chars, self.asst_chars = max_per_sig, prefix_chars, asst_chars
        self._seen: dict[bytes, int] = {}

    def judge(self, row: Row) -> Row | str:
        """Return the row, or that it is a duplicate."""
        limits = (("system", self.prefix_chars), ("user", self.prefix_chars), ("assistant", self.asst_chars))
        parts = ["".join(text_of(m) for m in of_role(row, role)[:1])[:limit] for role, limit in limits]
        key = hashlib.blake2b(repr(parts).encode("utf-8", "replace"), digest_size=16).digest()
        self._seen[key] = self._seen.get(key, 0) + 1
        return row if self._seen[key] <= self.max_per_sig else "duplicate"


class DeadLoopFilter(RowFilter):
    """Drops conversations with an answer that goes in circles.

    An answer does so if a sentence of at least `min_chars` characters follows itself `max_repeats` times, or if the
    same tool calls do so in answers that follow each other.

    Args:
        max_repeats: repetitions that are too many.
        min_chars: shorter sentences may be repeated.
    """

    def __init__(self, max_repeats: int = 4, min_chars: int = 4) -> None:
        if max_repeats < 2 or min_chars < 1:
            raise ArgumentError("DeadLoopFilter: max_repeats must be at least 2, and min_chars at least 1")
        self.max_repeats, self.min_chars = max_repeats, min_chars

    def judge(self, row: Row) -> Row | str:
        """Return the row, or that it loops."""
        answers = of_role(row, "assistant")
        for answer in answers:
            text = f"{answer.get('reasoning_content') or ''}\n{text_of(answer)}"
            sentences = [found.strip() for found in _SENTENCE.findall(text)]
            if self._loops([one for one in sentences if len(one) >= self.min_chars]):
                return "repeated sentence"
        calls = [_calls(answer) for answer in answers]
        return "repeated tool calls" if self._loops([call or object() for call in calls]) else row

    def _loops(self, items: list[Any]) -> bool:
        run = 1
        for before, item in itertools.pairwise(items):
            run = run + 1 if item == before else 1
            if run >= self.max_repeats:
                return True
        return False


class FixUnicodeFilter(RowFilter):
    """Repairs text: UTF-8 that was read as Latin-1 or Windows-1252, invisible characters, and composed forms (NFC)."""

    def judge(self, row: Row) -> Row | str:
        """Return the row with repaired text."""
        return with_texts(row, repaired)


class RemoveRepeatSentencesFilter(RowFilter):
    """Removes sentences that repeat the one before them, in answers.

    Args:
        min_repeat_sentence_length: characters; shorter sentences stay.
    """

    def __init__(self, min_repeat_sentence_length: int = 2) -> None:
        if min_repeat_sentence_length < 1:
            raise ArgumentError("RemoveRepeatSentencesFilter: min_repeat_sentence_length must be at least 1")
        self.min_length = min_repeat_sentence_length

    def judge(self, row: Row) -> Row | str:
        """Return the row without the repetitions."""
        return with_texts(row, self._once, ("assistant",))

    def _once(self, text: str) -> str:
        kept: list[str] = []
        for sentence in _SENTENCE.findall(text):
            plain = sentence.strip()
            if not (kept and len(plain) >= self.min_length and plain == kept[-1].strip()):
                kept.append(sentence)
        return "".join(kept) if len(kept) else text


class SpecialCharsFilter(RowFilter):
    """Drops conversations whose answers are mostly characters that are neither letters, digits nor spaces.

    Args:
        max_ratio: the largest share of such characters.
        min_ratio: the smallest share.
    """

    def __init__(self, max_ratio: float = 0.5, min_ratio: float = 0.0) -> None:
        if not 0 <= min_ratio <= max_ratio <= 1:
            raise ArgumentError(
                f"SpecialCharsFilter: it must be 0 <= min_ratio <= max_ratio <= 1, got {min_ratio!r} and {max_ratio!r}"
            )
        self.max_ratio, self.min_ratio = max_ratio, min_ratio

    def judge(self, row: Row) -> Row | str:
        """Return the row, or that it has too many special characters."""
        text = "".join(map(text_of, of_role(row, "assistant")))
        special = sum(not (letter.isalnum() or letter.isspace()) for letter in text)
        share = special / len(text) if text else 0.0
        return row if self.min_ratio <= share <= self.max_ratio else "special characters"


class TokenSoupFilter(RowFilter):
    """Drops conversations with an answer of mixed-up tokens, as a model writes that has fallen apart.

    An answer is so if too many of its words mix letters of several alphabets, or if it has too many replacement
    characters (U+FFFD). Chinese, Japanese and Korean letters mix with every alphabet; a single Greek letter in a word,
    as in "μm", is a symbol.

    Args:
        max_mixed: the largest share of words that mix alphabets, 0 to 1.
        max_broken: the largest share of replacement characters, 0 to 1.
    """

    def __init__(self, max_mixed: float = 0.05, max_broken: float = 0.01) -> None:
        if not (0 <= max_mixed <= 1 and 0 <= max_broken <= 1):
            raise ArgumentError(
                f"TokenSoupFilter: max_mixed and max_broken must be between 0 and 1, got {max_mixed!r} and "
                f"{max_broken!r}"
            )
        self.max_mixed, self.max_broken = max_mixed, max_broken

    def judge(self, row: Row) -> Row | str:
        """Return the row, or that an answer is token soup."""
        for answer in of_role(row, "assistant"):
            text = f"{answer.get('reasoning_content') or ''}\n{text_of(answer)}"
            words = _WORD.findall(text)
            mixed = sum(map(_mixes_alphabets, words))
            if mixed > self.max_mixed * len(words) or text.count("\ufffd") > self.max_broken * len(text):
                return "token soup"
        return row


class TokenNumFilter(RowFilter):
    """Drops conversations whose texts have too few or too many tokens.

    Args:
        hf_tokenizer: a tokenizer, or a model id whose tokenizer is loaded on first use.
        min_num: fewest tokens.
        max_num: most tokens.
    """

    def __init__(self, hf_tokenizer: Any, min_num: int = 10, max_num: int = 8192) -> None:
        if not 0 <= min_num <= max_num:
            raise ArgumentError(f"TokenNumFilter: it must be 0 <= min_num <= max_num, got {min_num!r} and {max_num!r}")
        self.hf_tokenizer, self.min_num, self.max_num = hf_tokenizer, min_num, max_num
        self._loaded: Any = None if isinstance(hf_tokenizer, str) else hf_tokenizer

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None if isinstance(self.hf_tokenizer, str) else self.hf_tokenizer}

    def judge(self, row: Row) -> Row | str:
        """Return the row, or that it is too short or too long."""
        if self._loaded is None:
            from twinkle.template import Template

            self._loaded = Template(self.hf_tokenizer).tokenizer
        texts = [text for message in row["messages"] if (text := text_of(message))]
        count = sum(len(self._loaded(text, add_special_tokens=False)["input_ids"]) for text in texts)
        return row if self.min_num <= count <= self.max_num else "number of tokens"


@functools.lru_cache(maxsize=65536)
def _alphabet(letter: str) -> str | None:
    """Return the alphabet of a letter; None for one that stands beside every alphabet."""
    if letter.isascii():
        return "LATIN"
    script = unicodedata.name(letter, "").partition(" ")[0] if letter.isalpha() else ""
    return None if script in _ANYWHERE or not script else script


def _mixes_alphabets(word: str) -> bool:
    if word.isascii():
        return False
    counts = collections.Counter(alphabet for letter in word if (alphabet := _alphabet(letter)))
    if counts["GREEK"] == 1:
        del counts["GREEK"]
    return sum(count > 0 for count in counts.values()) > 1


def repaired(text: str) -> str:
    """Return a text without the damage of a wrong decoding, in composed form."""
    text = _RUN.sub(_decoded, text)
    return unicodedata.normalize("NFC", _INVISIBLE.sub("", text.encode("utf-8", "replace").decode()))


def _calls(message: Any) -> tuple[str, ...]:
    return tuple(repr(call.get("function")) for call in message.get("tool_calls") or ())


def _decoded(run: re.Match[str]) -> str:
    """Return characters that are UTF-8 in another encoding, decoded; others as they are."""
    for encoding in ("cp1252", "latin-1"):
        with contextlib.suppress(UnicodeError):
            return run[0].encode(encoding).decode("utf-8")
    return run[0]
