"""Frames between the service and a worker process: a JSON text, followed by bytes. Nothing is unpickled."""

import json
import struct
from collections.abc import Mapping
from typing import Any, Final, Protocol

HEADER: Final = struct.Struct("<IQ")
"""Length of the JSON text, and length of the bytes after it."""
BODY: Final = "body"


class BadFrame(Exception):
    """The received bytes are not a valid frame."""


class Frames(Protocol):
    """Converts messages to frames and back.

    Attributes:
        invalid: what a process did whose frame is invalid, for errors.
    """

    invalid: str

    def pack(self, head: Mapping[str, Any]) -> bytes:
        """Serialize a frame, including its header."""

    def unpack(self, text: bytes, body: bytearray) -> dict[str, Any]:
        """Parse a frame.

        Raises:
            BadFrame: the bytes are not a valid frame.
        """


class PlainFrames:
    """Frames whose values are JSON, except for `body`, which is bytes."""

    invalid = "sent an invalid response"

    def pack(self, head: Mapping[str, Any]) -> bytes:
        """Serialize a frame."""
        body = head.get(BODY, b"")
        text = json.dumps({key: value for key, value in head.items() if key != BODY}).encode()
        return b"".join([HEADER.pack(len(text), len(body)), text, body])

    def unpack(self, text: bytes, body: bytearray) -> dict[str, Any]:
        """Parse a frame; its `body` is always present."""
        try:
            head = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadFrame(str(error)) from error
        if not isinstance(head, dict):
            raise BadFrame(f"a frame must be an object, got a {type(head).__name__}")
        return {**head, BODY: bytes(body)}
