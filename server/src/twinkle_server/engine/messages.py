"""The protocol between the API process and the engine process: messages, and the socket that carries them.

A frame is two little-endian uint32 (bytes of the head, bytes of the body), the head (JSON), and the body.
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
#                                         composition: of a replay, as in the first DONE
RESTORE = "restore"  #                    queue, folder (None: without a snapshot)                    -
DETACH = "detach"  #                      queue: snapshot it, then free its memory                    -
GENERATE = "generate"  #                  id (below -1), tenant, model (whose present weights are used)  a Generate
EMBED = "embed"  #                        id (below -1), tenant, model                               an Embed
CANCEL = "cancel"  #                      id of a sample, waiting or running                          -
WITHDRAW = "withdraw"  #                  ids of operations that must not begin; answer: WITHDRAWN    -
SNAPSHOT = "snapshot"  #                  queue                                                       -
WEIGHTS = "weights"  #                    weights: by tenant; of the others it is 1                   -
PLACES = "places"  #                      -: answer with PLACED between two turns                       -
DRAIN = "drain"  #                        end the current pass, snapshot changed models, then DRAINED -
# from the engine
READY = "ready"  #                        info: fields of ModelInfo                                  -
BEGIN = "begin"  #                        ids of the operations that now run                          -
TOKENS = "tokens"  #                      -                                                          see streams.Entry
DONE = "done"  #                          id, error, category, extra (columns of a checkpoint's row)  the result
#                                         cancelled: True after a CANCEL in time
#                                         composition: JSON text, the composition of its passes
#                                         later: True if a replay may succeed with more free memory
#                                         figures: JSON text, see `recording.Recorded`
ROLLOUTS = "rollouts"  #                  queue_id, tenant, number, rows: see `recording.Recorded`       their arrays
WITHDRAWN = "withdrawn"  #                ids: of WITHDRAW; out: those that had not begun and never will  -
PLACED = "placed"  #                      places: [bytes on the device, in host memory, on disk] by model
RESTORED = "restored"  #                  queue, error (None after success), later                    -
SNAPSHOTTED = "snapshotted"  #            queue, number, folder, digest, size                         -
DETACHED = "detached"  #                  queue                                                       -
DRAINED = "drained"  #                    -
ALIVE = "alive"  #                        -: heartbeat, sent every second by a separate thread
PASSED = "passed"  #                      kind, seconds, tokens, padded, tenants, operations, flops  -
#                                         passes; reported: seconds, passes and tokens of it that PROGRESS had
PROGRESS = "progress"  #                  of a turn that goes on: seconds, passes, tokens, tenants: their tokens


@dataclass(slots=True)
class Message:
    """One message.

    Attributes:
        type: one of the constants of this module.
        head: fields, as JSON.
        body: raw bytes.
    """

    type: str
    head: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""

    def pack_head(self) -> bytes:
        """Return the frame without its body, to avoid copying large bodies."""
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
    """The other end has closed the link."""


class AsyncLink:
    """The service's end, for an asyncio loop; one task receives, any task sends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, sock: socket.socket) -> "AsyncLink":
        """Wrap a connected socket."""
        sock.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=sock, limit=_BUFFER)
        return cls(reader, writer)

    def put(self, message: Message) -> None:
        """Send a message without waiting for buffer space; messages arrive in the order of the calls.

        Raises:
            LinkClosed: the other end has closed the link.
        """
        if self._writer.is_closing():
            raise LinkClosed("the engine closed the socket")
        if len(message.body) < _TOGETHER:
            self._writer.write(message.pack())
            return
        self._writer.write(message.pack_head())
        self._writer.write(message.body)

    async def room(self) -> None:
        """Wait until the buffer has space.

        Raises:
            LinkClosed: the other end has closed the link.
        """
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise LinkClosed("the engine closed the socket") from error

    async def receive(self) -> Message:
        """Return the next message.

        Raises:
            LinkClosed: the other end has closed the link.
        """
        try:
            sizes = SIZES.unpack(await self._reader.readexactly(SIZES.size))
            head, body = [await self._reader.readexactly(size) for size in sizes]
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise LinkClosed("the engine closed the socket") from error
        return Message.unpack(head, body)

    def close(self) -> None:
        """Close the socket, which ends the engine."""
        self._writer.close()


class BlockingLink:
    """The engine's end: one thread iterates over received messages, any thread sends."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._lock = threading.Lock()
        self._file = sock.makefile("rb", buffering=_BUFFER)

    @classmethod
    def from_descriptor(cls, descriptor: int) -> "BlockingLink":
        """Wrap an inherited socket, given its descriptor."""
        return cls(socket.socket(fileno=descriptor))

    def send(self, message: Message) -> None:
        """Send a message; return when the kernel has accepted all of it.

        Raises:
            LinkClosed: the other end has closed the link.
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
        """Yield messages until the link is closed; an incomplete frame is dropped."""
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
