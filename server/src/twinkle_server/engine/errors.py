"""Errors of operations: what a client sees of them, and which ones are temporary.

A client sees one line without details of the machine.
"""

import errno
import logging
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
from twinkle_server.engine import messages
from twinkle_server.engine.files import Damaged
from twinkle_server.engine.messages import Message
from twinkle_server.engine.queues import Task
from twinkle_server.operations import Category

_log = logging.getLogger(__name__)
_CLIENT_ERRORS = (ArgumentError, DataError, Unsupported, ComponentTypeError, TrainingStateError)
"""`ComponentTypeError` and `TrainingStateError` are caused by the client's loss: its result is not a number or has no
gradient."""
_ADAPTER = re.compile(r"(the )?adapter '[^']*'")
_LONGEST = 2000
_FULL = {errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC}
_PASSING = _FULL | {errno.EAGAIN, errno.EINTR, errno.EIO}


class UserError(Exception):
    """The request is wrong; the message is for the client."""


class Lost(Exception):
    """A model's state could not be read back."""


class NotInMemory(Exception):
    """The present weights of a model are not there: its restore or replay failed, and the service decides what then."""


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
        reason = str(error).partition(";")[0]
        public = UserError(f"{_anonymous(reason)}; this operation had no effect, and the weights are unchanged")
    elif isinstance(error, _CLIENT_ERRORS):
        public = UserError(_anonymous(str(error)))
    elif isinstance(error, CapacityError):  # its text may name adapters of other tenants
        public = CapacityError("not enough memory for this operation; send fewer or shorter rows, or retry later")
    else:
        return error
    public.__cause__ = error
    return public


def damaged_checkpoint(error: CheckpointError) -> UserError:
    """Return the error for a checkpoint that cannot be loaded, without its path on disk."""
    public = UserError("the checkpoint does not fit this model, or its files are damaged; save it again")
    public.__cause__ = error
    return public


def failed(task: Task, error: Exception) -> Message:
    """Return the message that an operation failed; internal details are logged."""
    text, category = explain(task, error)
    head = {"id": task.id, "error": text, "category": category, "extra": {}}
    return Message(messages.DONE, head | ({"later": True} if task.replay and is_passing(error) else {}))


def explain(task: Task, error: Exception) -> tuple[str, Category]:
    """Return the line for the client and the category of an error."""
    if isinstance(error, UserError):
        return _line(str(error)), "user"
    if isinstance(error, Lost):
        return "The state of this model could not be read. Create a new one from its last checkpoint.", "server"
    if isinstance(error, NotInMemory):
        return "The weights of this model are not in memory at the moment; repeat the request.", "server"
    _log.error("operation %d (%s) failed", task.id, task.kind, exc_info=error)
    if is_out_of_memory(error):
        return f"There is not enough memory for this {task.kind} ({task.tokens} tokens), even alone.", "server"
    if isinstance(error, Damaged):
        return (
            "The files of this checkpoint are damaged. Use another one.",
            "server",
        )
    if isinstance(error, OSError) or "(os error " in str(error):  # the format of safetensors
        return f"The service's disk failed during this {task.kind}; it had no effect. Try again.", "server"
    if isinstance(error, CapacityError):
        return _line(str(error)), "server"
    return f"The service failed during this {task.kind} ({type(error).__name__}); see its log.", "server"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory was exhausted, on the host or on a device."""
    if isinstance(error, CapacityError):  # raised by an engine for a failed allocation
        cause = error.__cause__
        return cause is not None and not isinstance(cause, CapacityError) and is_out_of_memory(cause)
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch's error for host memory


def is_passing(error: BaseException | None) -> bool:
    """Return whether a retry may succeed later: memory, disk space or file descriptors were exhausted."""
    while error is not None:
        if is_out_of_memory(error) or isinstance(error, CapacityError):
            return True
        if isinstance(error, OSError) and error.errno in _PASSING:
            return True
        error = error.__cause__
    return False


def _anonymous(text: str) -> str:
    return _ADAPTER.sub("this model", text)


def _line(text: str) -> str:
    """Return a text as one line that JSON can encode; errors of plugins may contain lone surrogates."""
    return " ".join(text.encode("utf-8", "replace").decode().split())[:_LONGEST]
