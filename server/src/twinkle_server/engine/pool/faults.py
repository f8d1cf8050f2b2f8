"""What an error of torch or of the house means for the service: the client's fault, the service's, or the end."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from twinkle.errors import (
    ArgumentError,
    CapacityError,
    CheckpointError,
    ComponentTypeError,
    DataError,
    NonFiniteError,
    TrainingStateError,
    TwinkleError,
    Unsupported,
)
from twinkle_server.engine.backend import Fatal, UserError

_OF_THE_CLIENT = (ArgumentError, DataError, Unsupported, ComponentTypeError, TrainingStateError)
"""The last two are said of a loss that the client chose: it gives no number, or one without a gradient."""
_ADAPTER = re.compile(r"(the )?adapter '[^']*'")
_OF_THE_DEVICE = ("CUDA error", "cuDNN error", "CUBLAS_STATUS", "device-side assert", "HIP error", "NCCL error")


def told(error: Exception) -> Exception:
    """Return what the engine is told of an error.

    Args:
        error: of one operation.

    Raises:
        Fatal: the device has failed, and nothing that it computes from now on can be trusted.
    """
    if isinstance(error, UserError | Fatal):
        return error
    check_device(error)
    made: Exception
    if isinstance(error, NonFiniteError):
        what = str(error).partition(";")[0]
        made = UserError(f"{_plain(what)}; nothing of this operation was kept, and the weights are as they were")
    elif isinstance(error, _OF_THE_CLIENT):
        made = UserError(_plain(str(error)))
    elif isinstance(error, CapacityError):  # whose adapters fill the memory is nobody's business
        made = CapacityError("there is no memory for this operation now; send fewer or shorter rows at once, or later")
    else:
        return error
    made.__cause__ = error
    return made


def _plain(text: str) -> str:
    """Return a message without the names that adapters have among themselves."""
    return _ADAPTER.sub("this model", text)


@contextmanager
def telling() -> Iterator[None]:
    """Raise what the engine is told of an error in place of the error itself; see `told`."""
    try:
        yield
    except Exception as error:  # a plugin may raise anything
        made = told(error)
        if made is error:
            raise
        raise made from error


def check_device(error: BaseException) -> None:
    """Raise `Fatal` for an error after which a device computes no more; running out of memory is none.

    Raises:
        Fatal: see above.
    """
    if isinstance(error, TwinkleError | MemoryError) or "out of memory" in str(error):
        return
    if any(sign in str(error) for sign in _OF_THE_DEVICE):
        raise Fatal(f"the device failed: {type(error).__name__}") from error


def damaged(error: CheckpointError) -> UserError:
    """Return what a client is told of a checkpoint that cannot be loaded; its place on the disk is not for clients."""
    made = UserError("the checkpoint does not fit this model, or its files are damaged; save it again")
    made.__cause__ = error
    return made
