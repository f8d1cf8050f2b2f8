"""Output of commands: aligned tables for people, JSON for programs."""

import json
from collections.abc import Sequence
from typing import Any

import click


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return columns aligned to the left, two spaces apart; the last one is not padded."""
    cells = [tuple(header), *(tuple(str(cell) for cell in row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join(lines)


def pairs(values: Sequence[tuple[str, object]]) -> str:
    """Return `key  value` lines, aligned; empty values are omitted, further lines of a value are indented."""
    shown = [(key, str(value)) for key, value in values if value not in ("", None, [], {})]
    width = max((len(key) for key, _ in shown), default=0)
    gap = "\n" + " " * (width + 2)
    return "\n".join(f"{key.ljust(width)}  {value.replace(chr(10), gap)}" for key, value in shown)


def echo_json(value: Any) -> None:
    """Write `value` as indented JSON; other types are written as strings."""
    click.echo(json.dumps(value, indent=2, default=str))
