"""Refuses unknown arguments of a call: surplus keywords and those that Python refuses; errors name the nearest."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from twinkle.errors import ArgumentError

F = TypeVar("F", bound=Callable[..., Any])

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


def explains_calls(function: F) -> F:
    """Make a call that does not fit the signature an `ArgumentError`, which names the nearest argument.

    It is a TypeError, as Python's own. One that is raised inside the function passes as it is.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # the call was never made
                from twinkle_registry import check_keywords

                check_keywords(function, kwargs, what=function.__qualname__.removesuffix(".__init__"), args=args)
            raise

    return call  # type: ignore[return-value]
