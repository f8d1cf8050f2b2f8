"""Refuses unknown arguments of a call with an error that suggests the nearest name."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from twinkle.errors import ArgumentError

F = TypeVar("F", bound=Callable[..., Any])

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def refuse_unknown(function: Callable[..., Any], kwargs: Mapping[str, Any], *, what: str) -> None:
    """Raise `ArgumentError` if `kwargs`, the unused keywords of a call of `function`, is not empty.

    Args:
        function: its parameters are suggested as the nearest name.
        kwargs: the keywords that no parameter took.
        what: name of the function in the error.
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
    """Turn the TypeError of a call that does not match the signature into an `ArgumentError`.

    The error suggests the nearest argument. A TypeError that is raised inside the function is not changed.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # the function was not entered
                from twinkle_registry import check_keywords

                check_keywords(function, kwargs, what=function.__qualname__.removesuffix(".__init__"), args=args)
            raise

    return call  # type: ignore[return-value]
