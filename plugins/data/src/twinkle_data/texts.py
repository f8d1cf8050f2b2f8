"""The texts of a row, for filters: its conversations and their messages, or one of its columns."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from twinkle.data_format import ROLES
from twinkle.errors import ArgumentError, DataError
from twinkle_data.rows import shown

_SIDES = ("positive", "negative", "chosen", "rejected")


def conversations(row: Mapping[str, Any], owner: str) -> list[list[Mapping[str, Any]]]:
    """Return the conversations of a row: its `messages`, or both of a preference pair.

    Raises:
        DataError: the column is missing, or is not a list of messages.
    """
    if row.get("messages") is not None:
        talks = {"messages": row["messages"]}
    else:
        sides = {name: row[name] for name in _SIDES if row.get(name) is not None}
        talks = {name: side.get("messages") if isinstance(side, Mapping) else side for name, side in sides.items()}
    if not talks:
        raise DataError(
            f"{owner} finds no conversation in a row (it has: {', '.join(map(str, row)) or 'nothing'}); name a column "
            "of text, or let a preprocessor make messages first (in a recipe: data.preprocessor)"
        )
    for name, messages in talks.items():
        if not isinstance(messages, list | tuple) or not all(isinstance(message, Mapping) for message in messages):
            raise DataError(f"{owner}: {name!r} of a row is {shown(messages)}; it is a list of messages")
    return list(talks.values())


def said(message: Mapping[str, Any]) -> str:
    """Return the text of one message: its content, or the text parts of it."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content)
    return content if isinstance(content, str) else ""


def texts(row: Mapping[str, Any], column: str | None, roles: Sequence[str] | None, owner: str) -> Iterator[str]:
    """Yield the text in `column`, or, if that is None, the text of each message with one of `roles`.

    Raises:
        DataError: there is no such column, it holds no text, or the row has no conversation.
    """
    if column is not None:
        yield column_text(row, column, owner)
        return
    for messages in conversations(row, owner):
        yield from (said(message) for message in messages if roles is None or message.get("role") in roles)


def column_text(row: Mapping[str, Any], column: str, owner: str) -> str:
    """Return the text in a column; None counts as empty.

    Raises:
        DataError: there is no such column, or it holds something else.
    """
    if column not in row:
        from twinkle_registry import nearest

        close = nearest(column, row, 1)
        hint = f" (nearest: {close[0]!r})" if close else ""
        raise DataError(f"{owner}: a row has no column {column!r}{hint}; it has: {', '.join(map(str, row))}")
    value = row[column]
    if value is not None and not isinstance(value, str):
        raise DataError(f"{owner}: column {column!r} of a row is {shown(value)}; it must be text")
    return value or ""


def checked_roles(roles: Sequence[str] | None, owner: str) -> tuple[str, ...] | None:
    """Return the argument `roles` as a tuple; None is all of them.

    Raises:
        ArgumentError: a role is unknown.
    """
    if roles is None:
        return None
    names = (roles,) if isinstance(roles, str) else tuple(roles)
    for role in names:
        if role not in ROLES:
            raise ArgumentError(f"{owner}: roles has {role!r}; a role is one of {', '.join(ROLES)}")
    return names


def checked_share(value: Any, name: str, owner: str) -> float:
    """Return an argument that is a fraction, 0 to 1.

    Raises:
        ArgumentError: it is something else.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    raise ArgumentError(f"{owner}: {name} is {shown(value)}; it is a share between 0 and 1")


def checked_count(value: Any, name: str, owner: str, least: int = 0) -> int:
    """Return an argument that is an integer >= `least`.

    Raises:
        ArgumentError: it is something else.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    raise ArgumentError(f"{owner}: {name} is {shown(value)}; it is a whole number from {least}")
