"""Refuses keywords that nobody reads, in functions that take `**kwargs` for the sake of their published signature."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from twinkle.errors import ArgumentError

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def refuse_unknown(function: Callable[..., Any], kwargs: Mapping[str, Any], *, what: str) -> None:
    """Raise `ArgumentError` if `kwargs`, what is left over in a call of `function`, holds anything.

    Args:
        function: its parameters are offered as the nearest name.
        kwargs: the keywords that no parameter took.
        what: how the error names the function.
    """
    if not kwargs:
        return
    from twinkle_registry import nearest

    known = [p.name for p in inspect.signature(function).parameters.values() if p.kind in _BY_NAME and p.name != "self"]
    asked = next(iter(kwargs))
    near = nearest(asked, known)
    hint = f", nearest: {near[0]!r}" if near else ""
    raise ArgumentError(f"{what} has no argument {asked!r}{hint}; it takes: {', '.join(known) or 'none'}")
