"""Errors of operations: which ones a client sees, and with which text."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from twinkle.errors import (
    ArgumentError,
    CapacityError,
    CheckpointError,
    ComponentTypeError,
    DataError,
    EngineFault,
    NonFiniteError,
    TrainingStateError,
    Unsupported,
)

_CLIENT_ERRORS = (ArgumentError, DataError, Unsupported, ComponentTypeError, TrainingStateError)
"""`ComponentTypeError` and `TrainingStateError` come from the client's loss: it returns no number, or one without a
gradient."""
_ADAPTER = re.compile(r"(the )?adapter '[^']*'")


class UserError(Exception):
    """The request is wrong; the message is for the client."""


def public_error(error: Exception) -> Exception:
    """Return the error of an operation as the service reports it.

    Errors that the client has caused become a `UserError`. Names of adapters, which are internal, are removed.

    Raises:
        EngineFault: the error is one.
    """
    if isinstance(error, EngineFault):
        raise error
    public: Exception
    if isinstance(error, UserError):
        return error
    if isinstance(error, NonFiniteError):
        what = str(error).partition(";")[0]
        public = UserError(f"{_anonymous(what)}; nothing of this operation was kept, and the weights are as they were")
    elif isinstance(error, _CLIENT_ERRORS):
        public = UserError(_anonymous(str(error)))
    elif isinstance(error, CapacityError):  # its text may name adapters of other tenants
        public = CapacityError("not enough memory for this operation; send fewer or shorter rows, or retry later")
    else:
        return error
    public.__cause__ = error
    return public


def _anonymous(text: str) -> str:
    return _ADAPTER.sub("this model", text)


@contextmanager
def public_errors() -> Iterator[None]:
    """Raise errors inside the block as `public_error` returns them."""
    try:
        yield
    except Exception as error:  # a plugin may raise anything
        public = public_error(error)
        if public is error:
            raise
        raise public from error


def damaged_checkpoint(error: CheckpointError) -> UserError:
    """Return the error for a checkpoint that cannot be loaded; its path on disk is not for clients."""
    public = UserError("the checkpoint does not fit this model, or its files are damaged; save it again")
    public.__cause__ = error
    return public
