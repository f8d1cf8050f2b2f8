"""Removes duplicate rows, keeping the first."""

import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from twinkle.errors import ArgumentError, Unsupported
from twinkle.filter import Filter
from twinkle_data.texts import checked_roles, column_text, conversations, said

_OWNER = "DeduplicationFilter"
_MARKS = re.compile(r"(?<!\d)[.,;:!?\"'。、“”‘’„«»「」『』]+(?!\d)")


class DeduplicationFilter(Filter):
    """Drops rows that repeat an earlier one. It stores 16 bytes per row, not the text.

    Args:
        match: `exact` compares texts as they are. `normalized` compares them after Unicode's NFKC, without case, with
            one space for any white space, and without the marks of sentences (`. , ; : ! ?` and quotes) except beside a
            digit: `Hello,  World!` equals `hello world`, and 1.5 is not 15.
        column: compare the texts of this column; by default those of all messages, with their roles.
        roles: compare only the messages of these roles: `"user"` drops questions that were asked before.

    It looks at all rows in one process: `num_proc` above 1 is refused.
    """

    def __init__(
        self,
        match: Literal["exact", "normalized"] = "exact",
        column: str | None = None,
        roles: str | Sequence[str] | None = None,
    ) -> None:
        if match not in ("exact", "normalized"):
            raise ArgumentError(f"{_OWNER}: match is {match!r}; it is 'exact' or 'normalized'")
        if column is not None and roles is not None:
            raise ArgumentError(f"{_OWNER}: a column has no roles; give column or roles")
        self.match, self.column = match, column
        self.roles = checked_roles(roles, _OWNER)
        self._seen: set[bytes] = set()
        self._process = os.getpid()

    def reset(self) -> None:
        """Clear the rows seen so far."""
        self._seen.clear()

    def __call__(self, row: Mapping[str, Any]) -> bool:
        """Return whether the row is new.

        Raises:
            DataError: the row has no conversation, or lacks the column.
            Unsupported: this is another process than the one that looked at the rows before.
        """
        if os.getpid() != self._process:
            raise Unsupported(
                f"{_OWNER} compares each row with all before it, so several processes would let repetitions pass; "
                "leave num_proc out, and filter before a loader's workers read"
            )
        digest = hashlib.blake2b("".join(self._fields(row)).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        new = digest not in self._seen
        self._seen.add(digest)
        return new

    def _fields(self, row: Mapping[str, Any]) -> list[str]:
        """Return the bytes to compare; length prefixes make the concatenation of texts unambiguous."""
        if self.column is not None:
            return [self._normal(column_text(row, self.column, _OWNER))]
        fields = []
        for messages in conversations(row, _OWNER):
            selected = [m for m in messages if self.roles is None or m.get("role") in self.roles]
            fields.append(f"{len(selected)}:")
            for message in selected:
                text = self._normal(said(message))
                calls = json.dumps(message.get("tool_calls"), sort_keys=True, default=str)
                fields.append(f"{message.get('role')}:{len(text)}:{text}:{calls}")
        return fields

    def _normal(self, text: str) -> str:
        if self.match == "exact":
            return text
        return " ".join(_MARKS.sub(" ", unicodedata.normalize("NFKC", text).casefold()).split())
