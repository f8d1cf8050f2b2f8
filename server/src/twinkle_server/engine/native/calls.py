"""Native calls as they are in the log: the name of the method, and its arguments as a frame."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from twinkle_client import wire
from twinkle_client.errors import WireError
from twinkle_server.engine.errors import UserError

SEPARATOR: Final = b"\n"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a method.

    Attributes:
        method: its name.
        arguments: its arguments; lists of numbers are arrays.
    """

    method: str
    arguments: Mapping[str, Any]

    @classmethod
    def parse(cls, payload: bytes) -> "Call":
        """Read a payload.

        Raises:
            UserError: the frame is invalid.
        """
        method, _, frame = payload.partition(SEPARATOR)
        try:
            arguments = wire.unpack(memoryview(frame), lists=False)
        except WireError as error:
            raise UserError(str(error)) from error
        if not isinstance(arguments, dict):
            raise UserError(f"the body must be a mapping, got a {type(arguments).__name__}")
        return cls(method.decode(), arguments)


def payload_of(method: str, frame: bytes) -> bytes:
    """Return the payload of a call whose arguments are a frame."""
    return method.encode() + SEPARATOR + frame


def success(value: Any) -> bytes:
    """Return the result of a call."""
    return wire.pack({"value": value})


def failure(error: BaseException, message: str) -> bytes:
    """Return the result of a call that raised an error.

    It is a result and not a failure of the operation where the call may have changed the model before: a replay makes
    such calls again.
    """
    return wire.pack({"error": {"type": type(error).__name__, "message": message}})
