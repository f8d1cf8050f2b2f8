"""Messages as services take them: encodable, not empty, and no longer than the service's limit."""

import json
from collections.abc import Callable


def clean(message: str) -> str:
    """Return a message that every service takes: no lone surrogates (file names have them), and not empty."""
    return str(message).encode("utf-8", "replace").decode("utf-8") or "(an empty message)"


def shortened(text: str, limit: int, size: Callable[[str], int]) -> str:
    """Return `text`, its middle replaced by a mark where its size is above `limit`.

    Of a failure the beginning says what and the end says where, so these are kept.

    Args:
        text: the text.
        limit: the greatest size, at least that of the mark.
        size: the size of a text; it grows with the text.
    """
    if size(text) <= limit:
        return text
    low, high = 0, len(text)  # letters kept: `low` fit, `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(_cut(text, middle)) <= limit else (low, middle)
    return _cut(text, low)


def bytes_of(text: str) -> int:
    """Return the size of a text in UTF-8."""
    return len(text.encode("utf-8"))


def json_bytes_of(text: str) -> int:
    """Return the size that a text has inside JSON as we send it, without its quotation marks."""
    return len(json.dumps(text, ensure_ascii=False).encode("utf-8")) - 2


def _cut(text: str, kept: int) -> str:
    tail = kept // 2
    return f"{text[: kept - tail]}\n[... {len(text) - kept} letters left out ...]\n{text[len(text) - tail :]}"
