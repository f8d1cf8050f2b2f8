"""Conversion between dataclasses and rows, and pages of lists."""

from dataclasses import fields
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Row, Select, Table, func, select

from twinkle_server.store.records import Page

R = TypeVar("R")


def values(table: Table, record: object) -> dict[str, Any]:
    """Return the columns of a table that are fields of a dataclass."""
    return {column.name: getattr(record, column.name) for column in table.c if hasattr(record, column.name)}


def record(cls: type[R], row: Row[Any]) -> R:
    """Make a dataclass from a row; columns without a field are ignored, and NULL becomes the field's default."""
    columns = row._mapping
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    return cls(**{name: columns[name] for name in names if columns.get(name) is not None})


def page(
    connection: Connection, cls: type[R], table: Table, where: list[ColumnElement[bool]], limit: int, offset: int
) -> Page[R]:
    """Return a page of a list, newest first; rows of the same time are ordered by id."""
    total = connection.execute(select(func.count()).select_from(table).where(*where)).scalar_one()
    query = newest_first(select(table).where(*where), table).limit(max(limit, 0)).offset(max(offset, 0))
    return Page([record(cls, row) for row in connection.execute(query)], total)


def newest_first(query: Select[Any], table: Table) -> Select[Any]:
    """Order a query by time, newest first."""
    return query.order_by(table.c.created.desc(), table.c.id.desc())
