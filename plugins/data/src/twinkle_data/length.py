"""Keeps the rows whose length is within limits, in tokens or in characters."""

import copy
from collections.abc import Mapping
from typing import Any, Literal

from twinkle.errors import ArgumentError
from twinkle.filter import Filter
from twinkle_data.texts import checked_count, column_text, texts

_OWNER = "LengthFilter"


class LengthFilter(Filter):
    """Keeps rows of `min_length` to `max_length` tokens or characters, both included.

    Tokens are those of the encoded row: its `input_ids`, or what the template makes of its messages (all of them, so
    that the length is the one that training sees). With `column` they are the tokens of that text alone. Characters are
    those of what all messages say, or of the column. Of a preference pair the longer side counts for `max_length` and
    the shorter one for `min_length`.

    Args:
        max_length: the longest that stays; None is no limit.
        min_length: the shortest that stays.
        unit: `tokens` or `characters`.
        column: measure the text in this column instead.
        model_id: the model whose tokenizer counts, for rows that are not encoded yet.
        template: a template to count with instead, in any form of component argument (a name or class needs
            `model_id`). Its own `max_length` does not matter: rows are measured whole.
    """

    def __init__(
        self,
        max_length: int | None = None,
        min_length: int = 0,
        unit: Literal["tokens", "characters"] = "tokens",
        column: str | None = None,
        model_id: str = "",
        template: Any = None,
    ) -> None:
        self.max_length = None if max_length is None else checked_count(max_length, "max_length", _OWNER)
        self.min_length = checked_count(min_length, "min_length", _OWNER)
        if self.max_length is not None and self.max_length < self.min_length:
            raise ArgumentError(
                f"{_OWNER}: max_length {max_length} is below min_length {min_length}: no row would stay"
            )
        if self.max_length is None and self.min_length == 0:
            raise ArgumentError(f"{_OWNER} needs max_length or min_length; without them every row stays")
        if unit not in ("tokens", "characters"):
            raise ArgumentError(f"{_OWNER}: unit is {unit!r}; it is 'tokens' or 'characters'")
        if unit == "characters" and (model_id or template is not None):
            raise ArgumentError(f"{_OWNER}: characters are counted without a model; drop model_id and template")
        self.unit, self.column = unit, column
        self.template = _template(template, model_id)

    def __call__(self, row: Mapping[str, Any]) -> bool:
        """Return whether the row's length is within the limits.

        Raises:
            ArgumentError: tokens are to be counted and there is nothing to count them with.
            DataError: the row has no conversation, or lacks the column.
            EncodeError: the template cannot encode the row.
        """
        lengths = self._characters(row) if self.unit == "characters" else self._tokens(row)
        return min(lengths) >= self.min_length and (self.max_length is None or max(lengths) <= self.max_length)

    def _characters(self, row: Mapping[str, Any]) -> list[int]:
        sides = _sides(row) if self.column is None else [row]
        return [sum(map(len, texts(side, self.column, None, _OWNER))) for side in sides]

    def _tokens(self, row: Mapping[str, Any]) -> list[int]:
        if self.column is not None:
            tokenizer = self._needed().tokenizer
            return [len(tokenizer(column_text(row, self.column, _OWNER), add_special_tokens=False)["input_ids"])]
        return [
            len(side["input_ids"] if "input_ids" in side else self._needed().encode(side)["input_ids"])
            for side in _sides(row)
        ]

    def _needed(self) -> Any:
        if self.template is None:
            raise ArgumentError(
                f"{_OWNER} counts tokens, and the rows are not encoded: give model_id= or template=, filter after "
                "encode(), or count unit='characters'"
            )
        return self.template


def _sides(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a preference pair's sides, or the row itself."""
    for names in (("positive", "negative"), ("chosen", "rejected")):
        if "messages" not in row and "input_ids" not in row and all(isinstance(row.get(n), Mapping) for n in names):
            return [row[name] for name in names]
    return [row]


def _template(template: Any, model_id: str) -> Any:
    if template is None and not model_id:
        return None
    from twinkle._registry import registry

    if template is None or isinstance(template, str | type):
        return registry().build(template or "Template", "template", model_id=model_id, max_length=None)
    if model_id:
        raise ArgumentError(
            f"{_OWNER}: template is an instance already, so model_id would be ignored; give one of them"
        )
    template_copy = copy.copy(registry().build(template, "template"))
    template_copy.max_length, template_copy.truncation_strategy = None, "raise"
    return template_copy
