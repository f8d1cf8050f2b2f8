"""Checks of the options that losses are built with, and of the outputs that they read."""

import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from twinkle.data_format import InputBatch, ModelOutput
from twinkle.errors import ArgumentError, DataError, TrainingStateError

if TYPE_CHECKING:
    from torch import Tensor


Rest = Literal["bucket", "renormalize"]
"""What becomes of the tokens that are not among a teacher's most probable ones."""


def number(
    loss: object, name: str, value: Any, *, least: float = -math.inf, above: float = -math.inf, below: float = math.inf
) -> float:
    """Return an option as a float.

    Args:
        loss: whose option; the error names its class.
        name: the option.
        value: the passed value.
        least: the smallest value that it may have.
        above: what it must be above.
        below: what it must be below.

    Raises:
        ArgumentError: it is no finite number, or outside its range.
    """
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if plain and abs(value) <= sys.float_info.max and value >= least and above < value < below:
        return float(value)
    bounds = [f"of at least {least:g}"] * (least > -math.inf) + [f"above {above:g}"] * (above > -math.inf)
    bounds += [f"below {below:g}"] * (below < math.inf)
    wanted = " ".join(["a finite number", " and ".join(bounds)]).strip()
    raise ArgumentError(f"{type(loss).__name__}: {name}={value!r}; it must be {wanted}")


def whole(loss: object, name: str, value: Any, *, least: int) -> int:
    """Return an option that counts something; a float without a fraction is one too, since requests send numbers so.

    Raises:
        ArgumentError: it is no whole number of at least `least`.
    """
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if plain and value == value // 1 and value >= least:
        return int(value)
    raise ArgumentError(f"{type(loss).__name__}: {name}={value!r}; it must be a whole number of at least {least}")


def flag(loss: object, name: str, value: Any) -> bool:
    """Return an option that is on or off; 1 and 0 are so too, since requests send numbers.

    Raises:
        ArgumentError: it is neither.
    """
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    raise ArgumentError(f"{type(loss).__name__}: {name}={value!r}; it must be True or False")


def label_to_ignore(loss: object, value: Any) -> int:
    """Return `ignore_index`, checked.

    Raises:
        ArgumentError: it is no whole number.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentError(f"{type(loss).__name__}: ignore_index={value!r}; it must be a whole number")
    return value


def output(outputs: Mapping[str, Any], name: str, loss: object, remedy: str) -> "Tensor":
    """Return `outputs[name]`.

    Raises:
        TrainingStateError: it is not there; `remedy` says what to do.
    """
    found = outputs.get(name)
    if found is None:
        raise TrainingStateError(
            f"{type(loss).__name__} needs outputs[{name!r}], but the forward gave {sorted(outputs)}; {remedy}"
        )
    tensor: Tensor = found
    return tensor


def score(inputs: InputBatch, outputs: ModelOutput, name: str, loss: object) -> "Tensor":
    """Return a score of each label: that of the forward, or else computed from its logits and stored there.

    Args:
        inputs: `labels`.
        outputs: outputs of the forward, with `name` or with `logits` `[B, T, V]` (`[N, V]` for flat labels).
        name: `logps`, `entropies` or `uniform_logps`.
        loss: whose score; the error names its class.

    Raises:
        DataError: labels are not a tensor, or logits and labels do not fit each other.
        TrainingStateError: neither the score nor logits are there.
    """
    from twinkle_torch.logit_scores import scores_of_logits

    if not hasattr(labels := inputs["labels"], "shape"):
        raise DataError(
            f"{type(loss).__name__}: labels are a {type(labels).__name__}; give a tensor, which InputProcessor or "
            "torch.tensor makes of rows"
        )
    scores_of_logits(inputs, outputs, name, getattr(loss, "ignore_index", -100))
    return output(outputs, name, loss, "call with task='causal_lm', on rows with labels")
