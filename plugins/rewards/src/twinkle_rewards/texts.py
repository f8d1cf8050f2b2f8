"""Finding answers in text, in time linear in its length: boxes, tags, numbers."""

import re
from collections import deque
from decimal import Decimal
from itertools import islice

_NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|[-+]?\.[0-9]+")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BOX = "\\boxed{"
_SPACES = str.maketrans({"\u2212": "-", "$": " "})
_LATEX = re.compile(r"\\[$!,;: ]|\{,\}")
_SIGNED = re.compile(r"(?<![\w)}\]])([-+\u2212])\\?[$€£¥₹]\s?(?=[.0-9])")


def boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`; None if it is missing or not closed."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    end = closing(text, start + len(_BOX))
    return None if end is None else text[start + len(_BOX) : end].strip()


def closing(text: str, start: int) -> int | None:
    """Return where the brace closes that was opened just before `start`; None if it does not."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        if brace[0] in "{}":
            depth += 1 if brace[0] == "{" else -1
            if not depth:
                return brace.start()
    return None


def tagged(text: str, tag: str) -> str | None:
    """Return the content of the last `<tag>...</tag>`; None if it is missing."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return None if start < 0 else text[start + len(tag) + 2 : end].strip()


def marked(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` or the line after the last `####`, whichever comes later."""
    line, box = text.rfind("####"), text.rfind(_BOX)
    if line > box:
        return text[line + 4 :].partition("\n")[0].strip()
    return boxed(text)


def number(text: str) -> Decimal | None:
    """Return the number that a text is, in ASCII digits; None if it is something else.

    Thousands may be grouped by commas. `$`, LaTeX's spaces and a full stop at the end are passed over.
    """
    plain = _plain(text).strip().removesuffix(".")
    return _value(plain) if _NUMBER.fullmatch(plain) else None


def only_number(text: str) -> Decimal | None:
    """Return the number in a text that has exactly one, such as `42 apples` or `- 42`; None with none or several."""
    plain = _plain(text)
    found = list(islice(_NUMBER.finditer(plain), 2))
    if len(found) != 1:
        return None
    value, before = _value(found[0][0]), plain[: found[0].start()].rstrip()
    return -value if before.endswith("-") and not _ends_a_term(before[:-1]) else value


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text."""
    found = deque(_NUMBER.finditer(_plain(text)), maxlen=1)
    return _value(found[0][0]) if found else None


def normal(text: str) -> str:
    """Return a text as texts are compared: without case, doubled spaces and a full stop at the end."""
    return " ".join(text.casefold().split()).removesuffix(".").rstrip()


def same(one: str, other: str) -> bool:
    """Return whether two short answers are the same number, or the same text, ignoring case, spaces and a full stop."""
    value = number(other)
    return normal(one) == normal(other) or (value is not None and number(one) == value)


def _plain(text: str) -> str:
    signed = _SIGNED.sub(r"\1", text)
    return _LATEX.sub(lambda found: "," if found[0] == "{,}" else "", signed).translate(_SPACES)


def _ends_a_term(text: str) -> bool:
    """Return whether a minus after this text is a subtraction (or a dash after a word) and not a sign."""
    last = text.rstrip()[-1:]
    return last.isalnum() or last in tuple(")]}%")


def _value(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))
