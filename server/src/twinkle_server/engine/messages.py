"""The protocol between the API process and the engine process: messages, and the socket that carries them.

A frame is two little-endian uint32 (bytes of the head, bytes of the body), the head (JSON), the body.
The API process reads and writes on its event loop, the engine process on threads.
"""

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

SIZES = struct.Struct("<II")
# to the engine                           head beside "type"                                         body
RUN = "run"  #                            id, queue, number, kind, tenant, tokens, alone, replay      the payload
#                                         composition: of a replay, as the first DONE had it
RESTORE = "restore"  #                    queue, folder (None: from nothing)                          -
DETACH = "detach"  #                      queue: snapshot it, then free its memory                    -
CANCEL = "cancel"  #                      id of a sample; what trains runs to its end                -
SNAPSHOT = "snapshot"  #                  queue                                                       -
DRAIN = "drain"  #                        end the pass that runs, snapshot what changed, then DRAINED -
# from the engine
READY = "ready"  #                        info: fields of ModelInfo                                  -
BEGIN = "begin"  #                        ids of the operations that are now under way               -
DONE = "done"  #                          id, error, category, extra (what a checkpoint's row says)  the result
#                                         cancelled: True where a CANCEL came in time
#                                         composition: JSON text, how its passes were composed
#                                         later: True where a replay may work when there is memory again
RESTORED = "restored"  #                  queue, error (None: it is there; otherwise why not), later  -
SNAPSHOTTED = "snapshotted"  #            queue, number, folder, digest, size                         -
DETACHED = "detached"  #                  queue                                                       -
DRAINED = "drained"  #                    -
ALIVE = "alive"  #                        -: the process runs; sent every second by a thread of its own
PASSED = "passed"  #                      kind, seconds, tokens, padded, tenants, operations, flops  -


@dataclass(slots=True)
class Message:
    """One message.

    Attributes:
        type: one of the names of this module.
        head: what JSON can say.
        body: bytes that go as they are.
    """

    type: str
    head: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""

    def pack_head(self) -> bytes:
        """Return the frame without its body, for bodies that are too large to be copied."""
        head = orjson.dumps({"type": self.type, **self.head})
        return SIZES.pack(len(head), len(self.body)) + head

    def pack(self) -> bytes:
        """Return the frame."""
        return self.pack_head() + self.body

    @classmethod
    def unpack(cls, head: bytes, body: bytes) -> "Message":
        """Read a frame's parts."""
        fields = orjson.loads(head)
        return cls(fields.pop("type"), fields, body)


_TOGETHER = 64 * 2**10
_BUFFER = 2**20


class LinkClosed(ConnectionError):
    """The other end is gone."""


class AsyncLink:
    """The end that lives on an asyncio loop; one task receives, any task sends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, sock: socket.socket) -> "AsyncLink":
        """Take over a connected socket."""
        sock.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=sock, limit=_BUFFER)
        return cls(reader, writer)

    def put(self, message: Message) -> None:
        """Send a message without waiting until there is room; the order of calls is the order of arrival.

        Raises:
            LinkClosed: the other end is gone.
        """
        if self._writer.is_closing():
            raise LinkClosed("the engine closed the socket")
        if len(message.body) < _TOGETHER:
            self._writer.write(message.pack())
            return
        self._writer.write(message.pack_head())
        self._writer.write(message.body)

    async def room(self) -> None:
        """Wait until the other end has taken most of what was sent.

        Raises:
            LinkClosed: the other end is gone.
        """
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise LinkClosed("the engine closed the socket") from error

    async def receive(self) -> Message:
        """Return the next message.

        Raises:
            LinkClosed: the other end is gone.
        """
        try:
            head, body = SIZES.unpack(await self._reader.readexactly(SIZES.size))
            frame = await self._reader.readexactly(head + body)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise LinkClosed("the engine closed the socket") from error
        return Message.unpack(frame[:head], frame[head:])

    def close(self) -> None:
        """Close the socket; the engine ends when it sees that."""
        self._writer.close()


class BlockingLink:
    """The engine's end: one thread iterates over what arrives, any thread sends."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._lock = threading.Lock()
        self._file = sock.makefile("rb", buffering=_BUFFER)

    @classmethod
    def from_descriptor(cls, descriptor: int) -> "BlockingLink":
        """Take over a socket by the number of its descriptor, which this process was started with."""
        return cls(socket.socket(fileno=descriptor))

    def send(self, message: Message) -> None:
        """Send a message whole, and return when the system has taken it.

        Raises:
            LinkClosed: the other end is gone.
        """
        try:
            with self._lock:
                if len(message.body) < _TOGETHER:
                    self._sock.sendall(message.pack())
                else:
                    self._sock.sendall(message.pack_head())
                    self._sock.sendall(message.body)
        except OSError as error:
            raise LinkClosed("the service closed the socket") from error

    def __iter__(self) -> Iterator[Message]:
        """Give messages until the other end is gone; a frame that was cut off is dropped."""
        while (sizes := self._read(SIZES.size)) is not None:
            head, body = SIZES.unpack(sizes)
            parts = self._read(head), self._read(body)
            if parts[0] is None or parts[1] is None:
                return
            yield Message.unpack(parts[0], parts[1])

    def _read(self, size: int) -> bytes | None:
        try:
            data = self._file.read(size)
        except OSError:
            return None
        return data if len(data) == size else None

    def close(self) -> None:
        """Close the socket."""
        self._file.close()
        self._sock.close()
