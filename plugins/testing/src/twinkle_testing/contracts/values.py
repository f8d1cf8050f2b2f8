"""Compares nested values with tensors, arrays and NaN in them."""

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from twinkle_testing.contracts.case import require


def same(one: Any, two: Any, *, tolerance: float = 0.0) -> bool:
    """Return whether two values are equal, number for number; NaN equals NaN.

    Args:
        one: nested mappings, sequences, tensors, arrays and plain values.
        two: likewise.
        tolerance: largest allowed difference of two floats.
    """
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        return one.keys() == two.keys() and all(same(one[key], two[key], tolerance=tolerance) for key in one)
    if _is_array(one) or _is_array(two):
        return _same_arrays(one, two, tolerance)
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        return len(one) == len(two) and all(same(a, b, tolerance=tolerance) for a, b in zip(one, two, strict=True))
    if isinstance(one, float) and isinstance(two, int | float):
        return (math.isnan(one) and math.isnan(two)) or math.isclose(one, two, rel_tol=tolerance, abs_tol=tolerance)
    return bool(one == two)


def left_alone(action: Callable[[Any], Any], value: Any, what: str) -> Any:
    """Call `action(value)`, require that `value` is unchanged, and return the result of the call."""
    before = copy.deepcopy(value)
    result = action(value)
    require(same(before, value), f"it changed {what} that it was given; work on a copy")
    return result


def is_plain_number(value: Any) -> bool:
    """Return whether a value is an `int` or `float` of Python, not a `bool`."""
    return type(value) in (int, float)


def as_json(value: Any, what: str) -> str:
    """Return a value as JSON text; a value that is not JSON data is a violation."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        require(False, f"{what} is no JSON ({error}); give plain lists, dicts, texts, numbers and None")
        return ""


def shown(value: Any, limit: int = 120) -> str:
    """Return a value in the form of messages."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def leaves(value: Any) -> Iterator[Any]:
    """Yield the values inside nested mappings, lists and tuples."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _same_arrays(one: Any, two: Any, tolerance: float) -> bool:
    import numpy as np

    if not (_is_array(one) and _is_array(two)) or tuple(one.shape) != tuple(two.shape) or one.dtype != two.dtype:
        return False
    first, second = (np.asarray(_on_cpu(value)) for value in (one, two))
    if first.dtype.kind in "fc":
        return bool(np.allclose(first, second, rtol=tolerance, atol=tolerance, equal_nan=True))
    return bool(np.array_equal(first, second))


def _on_cpu(value: Any) -> Any:
    detached = value.detach().cpu() if hasattr(value, "detach") else value
    narrow = hasattr(detached, "float") and str(detached.dtype) in ("torch.bfloat16", "torch.float16")
    return detached.float() if narrow else detached
