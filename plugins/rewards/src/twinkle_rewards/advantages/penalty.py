"""The distance from a reference as a cost of each token."""

import math
from typing import Any

import torch
from torch import Tensor

from twinkle.errors import ArgumentError, DataError
from twinkle_rewards.advantages.entries import listed


def coefficient(owner: object, name: str, value: Any, most: float = math.inf) -> float:
    """Return an option that is a number from 0 to `most`.

    Raises:
        ArgumentError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most or math.isinf(value):
        bound = "a number from 0" if math.isinf(most) else f"a number from 0 to {most:g}"
        raise ArgumentError(f"{type(owner).__name__}: {name} is {value!r}; it is {bound}")
    return float(value)


def token_rows(owner: object, what: str, values: Any) -> list[Tensor]:
    """Return an argument with one list of numbers a row as float64 tensors.

    Raises:
        ArgumentError: it has another form.
        DataError: a number is not finite.
    """
    name, rows = type(owner).__name__, []
    for number, entry in enumerate(listed(name, what, values)):
        fine = isinstance(entry, list) and all(isinstance(n, int | float) for n in entry)
        if not fine:
            raise ArgumentError(f"{name}: {what} of row {number} is {entry!r:.60}; give one number a trained token")
        row = torch.tensor(entry, dtype=torch.float64)
        if not bool(torch.isfinite(row).all()):
            raise DataError(f"{name}: {what} of row {number} has a number that is not finite")
        rows.append(row)
    return rows


def kl_rows(owner: object, weight: float, old_logps: Any, ref_logps: Any) -> list[Tensor] | None:
    """Return `weight * (old - ref)` of each token, float64; None where the weight is 0.

    Raises:
        ArgumentError: one of them is missing, or both are given and have no weight.
        DataError: their lengths differ.
    """
    name = type(owner).__name__
    if not weight:
        if ref_logps is not None or old_logps is not None:
            raise ArgumentError(
                f"{name}: old_logps and ref_logps are for kl_coef, which is 0; leave them out or set it"
            )
        return None
    if old_logps is None or ref_logps is None:
        missing = "old_logps" if old_logps is None else "ref_logps"
        raise ArgumentError(f"{name}: kl_coef={weight:g} needs old_logps and ref_logps, and {missing} is missing")
    old, ref = token_rows(owner, "old_logps", old_logps), token_rows(owner, "ref_logps", ref_logps)
    if len(old) != len(ref):
        raise DataError(f"{name}: old_logps has {len(old)} rows and ref_logps {len(ref)}")
    for row, (one, other) in enumerate(zip(old, ref, strict=True)):
        if len(one) != len(other):
            raise DataError(f"{name}: row {row} has {len(one)} old_logps and {len(other)} ref_logps")
    return [weight * (one - other) for one, other in zip(old, ref, strict=True)]
