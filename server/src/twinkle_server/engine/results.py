"""What clients are told of an operation that failed: one line, nothing of the machine."""

import errno
import logging
from typing import Any

from twinkle.errors import CapacityError
from twinkle_server.engine import messages
from twinkle_server.engine.composition import Composition
from twinkle_server.engine.errors import UserError
from twinkle_server.engine.files import Damaged
from twinkle_server.engine.messages import Message
from twinkle_server.engine.queues import Task
from twinkle_server.operations import Category

_log = logging.getLogger(__name__)
_LONGEST = 2000
_FULL = {errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC}
_PASSING = _FULL | {errno.EAGAIN, errno.EINTR, errno.EIO}


class Lost(Exception):
    """A model's state could not be read back."""


def done(
    task: Task, result: bytes = b"", extra: dict[str, Any] | None = None, composition: Composition | None = None
) -> Message:
    """Return the message that an operation is done."""
    head = {"id": task.id, "error": None, "category": None, "extra": extra or {}}
    return Message(messages.DONE, head if composition is None else head | {"composition": composition.dump()}, result)


def cancelled(operation: int) -> Message:
    """Return the message that an operation ended because nobody wanted it."""
    head = {"id": operation, "error": "cancelled", "category": "user", "extra": {}, "cancelled": True}
    return Message(messages.DONE, head)


def failed(task: Task, error: Exception) -> Message:
    """Return the message that an operation failed; what the client must not see goes to the log."""
    words, category = explain(task, error)
    head = {"id": task.id, "error": words, "category": category, "extra": {}}
    return Message(messages.DONE, head | ({"later": True} if task.replay and is_passing(error) else {}))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether there was no memory, on the host or on a device."""
    if isinstance(error, CapacityError):  # an engine's own, of an allocation that failed
        cause = error.__cause__
        return cause is not None and not isinstance(cause, CapacityError) and is_out_of_memory(cause)
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch has no kind for the host's


def is_passing(error: BaseException | None) -> bool:
    """Return whether the same may work a while later, because memory, room or descriptors were lacking."""
    while error is not None:
        if is_out_of_memory(error) or isinstance(error, CapacityError):
            return True
        if isinstance(error, OSError) and error.errno in _PASSING:
            return True
        error = error.__cause__
    return False


def explain(task: Task, error: Exception) -> tuple[str, Category]:
    """Return a line for the client, and whose fault it was."""
    if isinstance(error, UserError):
        return _line(str(error)), "user"
    if isinstance(error, Lost):
        return "The state of this model could not be read back. Make a new one from its last checkpoint.", "server"
    _log.error("operation %d (%s) failed", task.id, task.kind, exc_info=error)
    if is_out_of_memory(error):
        return f"There is not enough memory for this {task.kind}, even alone ({task.tokens} tokens).", "server"
    if isinstance(error, Damaged):
        return (
            "The files of this checkpoint are not what was saved. Use another one.",
            "server",
        )
    if isinstance(error, OSError) or "(os error " in str(error):  # as safetensors has it
        return f"The service's disk failed during this {task.kind}; nothing of it was kept. Try again.", "server"
    if isinstance(error, CapacityError):
        return _line(str(error)), "server"
    return f"The service failed during this {task.kind} ({type(error).__name__}); its log has more.", "server"


def _line(text: str) -> str:
    """Return a text as one line that JSON can carry: what a plugin raised may hold halves of surrogate pairs."""
    return " ".join(text.encode("utf-8", "replace").decode().split())[:_LONGEST]
