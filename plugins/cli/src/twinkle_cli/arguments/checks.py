"""Checks the type of an argument's value, with lossless conversions."""

import types
import typing
from collections.abc import Mapping
from typing import Any

from twinkle_cli.configuration import alternatives


def checked(value: Any, annotation: Any) -> Any:
    """Return `value` converted to the type `annotation`.

    A whole number is accepted as a float, and 0 and 1 as a bool, the form used in environment variables.

    Raises:
        ValueError: the value has another type.
    """
    for member in alternatives(annotation):
        try:
            return _as(value, member)
        except ValueError:
            continue
    raise ValueError(f"{value!r} is {_kind(value)}")


def _as(value: Any, member: Any) -> Any:
    origin, arguments = typing.get_origin(member), typing.get_args(member)
    if member is Any or (member is types.NoneType and value is None):
        return value
    if origin is typing.Literal and any(value == choice and type(value) is type(choice) for choice in arguments):
        return value
    if origin is list and isinstance(value, list | tuple):
        return [checked(element, arguments[0]) for element in value]
    if origin is dict and isinstance(value, Mapping):
        return {str(key): checked(element, arguments[1]) for key, element in value.items()}
    if member is bool and (isinstance(value, bool) or (type(value) in (int, str) and value in (0, 1, "0", "1"))):
        return bool(int(value))
    if member is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if member in (int, str) and type(value) is member:
        return value
    raise ValueError


def _kind(value: Any) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"
