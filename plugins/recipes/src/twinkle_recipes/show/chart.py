"""A line of numbers as a small chart of text, for terminals."""

import itertools
from collections.abc import Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"


def chart(values: Sequence[float], width: int = 60, height: int = 6) -> list[str]:
    """Return `height` lines of at most `width` columns that show `values` as bars.

    They stand on 0, or where a value is negative on the least one, and the highest fills all lines.

    More values than columns are averaged in equal parts, so that the last column is always the newest.
    """
    if not values or width < 1 or height < 1:
        return []
    columns = _squeezed(values, width)
    ground = min(0.0, *columns)
    top = max(columns) - ground
    eighths = [round(8 * height * (value - ground) / top) if top > 0 else 0 for value in columns]
    return ["".join(_BLOCKS[min(8, max(0, bar - 8 * row))] for bar in eighths) for row in reversed(range(height))]


def _squeezed(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [len(values) * column // width for column in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
