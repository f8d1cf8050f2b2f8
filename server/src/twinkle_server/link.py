"""The socket between the API process and the engine: frames of `engine.messages`, on a loop here, on threads there."""

import asyncio
import socket
import threading
from collections.abc import Iterator

from twinkle_server.engine.messages import SIZES, Message

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
