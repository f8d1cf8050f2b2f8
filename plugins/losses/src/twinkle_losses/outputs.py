"""What a loss reads from a forward's outputs, with an error that says how to get it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from twinkle.errors import TrainingStateError

if TYPE_CHECKING:
    from torch import Tensor


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
