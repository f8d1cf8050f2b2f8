"""Checks the arguments of a call before it is made, so that a misspelt keyword names its nearest parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .errors import ArgumentError
from .naming import nearest, quoted

_LONG = 300
_SHOWN = 12
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_keywords(
    callable: Callable[..., Any],
    kwargs: Mapping[str, Any],
    *,
    what: str,
    args: Sequence[Any] = (),
    partial: bool = False,
) -> None:
    """Raise `ArgumentError` unless `callable(*args, **kwargs)` fits the signature of `callable`.

    Args:
        callable: A class or a function; one with `**kwargs` accepts every keyword, one that has no signature
            (some builtins) is not checked.
        kwargs: The keyword arguments of the call.
        what: How the error names the callable, for example `loss 'GRPOLoss' of twinkle-losses`.
        args: The positional arguments of the call.
        partial: More arguments follow later, so missing ones are not an error.
    """
    try:
        signature = inspect.signature(callable)
    except (TypeError, ValueError):
        return
    problems = [
        *_unknown(signature, kwargs),
        *_surplus(signature, args, kwargs),
        *([] if partial else _missing(signature, args, kwargs)),
    ]
    if problems:
        name = getattr(callable, "__name__", type(callable).__name__)
        raise ArgumentError(f"{what}: {'; '.join(problems)}. {_text(name, signature)}")


def _text(name: str, signature: inspect.Signature) -> str:
    text = str(signature.replace(return_annotation=inspect.Signature.empty))
    if len(text) <= _LONG:
        return f"Its signature is {name}{text}"
    known = list(signature.parameters)
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return f"{name} takes {', '.join(known[:_SHOWN])}{more}"


def _keywords(signature: inspect.Signature) -> list[str]:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in signature.parameters.values() if p.kind in by_name]


def _unknown(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> list[str]:
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values()):
        return []
    known = _keywords(signature)
    problems = []
    for name in kwargs:
        if name not in known:
            close = nearest(name, known, 1)
            problems.append(f"unknown argument {name!r}" + (f", nearest: {close[0]!r}" if close else ""))
    return problems


def _surplus(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    places = [p.name for p in signature.parameters.values() if p.kind in _POSITIONAL]
    takes_any = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in signature.parameters.values())
    problems = []
    if len(args) > len(places) and not takes_any:
        problems.append(f"{len(args)} positional arguments given, at most {len(places)} taken")
    by_keyword = set(_keywords(signature))
    twice = [name for name in places[: len(args)] if name in kwargs and name in by_keyword]
    if twice:
        problems.append(f"given twice: {quoted(twice)}")
    return problems


def _missing(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    missing = []
    place = 0
    for p in signature.parameters.values():
        if p.kind in _POSITIONAL:
            place += 1
            given = place <= len(args) or (p.kind is not inspect.Parameter.POSITIONAL_ONLY and p.name in kwargs)
        elif p.kind is inspect.Parameter.KEYWORD_ONLY:
            given = p.name in kwargs
        else:
            continue
        if not given and p.default is inspect.Parameter.empty:
            missing.append(p.name)
    return [f"missing argument {quoted(missing)}"] if missing else []
