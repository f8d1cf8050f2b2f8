"""What a loss reads from a forward's outputs, with an error that says how to get it."""

from typing import TYPE_CHECKING

from twinkle.data_format import ModelOutput
from twinkle.errors import TrainingStateError

if TYPE_CHECKING:
    from torch import Tensor


def output(outputs: ModelOutput, name: str, loss: object, remedy: str) -> "Tensor":
    """Return `outputs[name]`.

    Raises:
        TrainingStateError: it is not there; `remedy` says what to do.
    """
    found = outputs.get(name)
    if found is None:
        raise TrainingStateError(
            f"{type(loss).__name__} needs outputs[{name!r}], but the forward gave {sorted(outputs)}; {remedy}"
        )
    return found  # type: ignore[no-any-return]
