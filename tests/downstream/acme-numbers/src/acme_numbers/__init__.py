"""Polynomials of anything that can be multiplied and added."""

from collections.abc import Sequence
from typing import Any


def polynomial(coefficients: Sequence[float], x: Any) -> Any:
    """Return `coefficients[0] + coefficients[1] x + coefficients[2] x^2 + ...`, by Horner's rule."""
    value = 0.0 * x
    for coefficient in reversed(coefficients):
        value = value * x + coefficient
    return value
