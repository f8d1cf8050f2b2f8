"""Two processes, or threads, with a checkpoint engine each, which the checks control."""

import asyncio
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from twinkle.errors import TwinkleError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch import Tensor


class SideFailed(TwinkleError, RuntimeError):
    """A call of the engine raised in its process, or the process has ended."""


def weights(seed: int, size: int) -> "list[tuple[str, Tensor]]":
    """Return named weights of many forms: large, strided, scalar, empty, of several dtypes.

    Args:
        seed: seed of the values.
        size: size of the largest weight, in bytes.
    """
    import torch

    draw = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> "Tensor":
        return torch.randn(shape, generator=draw)

    return [
        ("model.embed.weight", some(7, 5)),
        ("model.layer.weight", some(6, 4).T),
        ("model.layer.bias", some(4).bfloat16()),
        ("model.large.weight", some(size // 4)),
        ("model.scale", some().reshape(())),
        ("model.empty", some(0, 3)),
        ("model.half", some(9)[::2].half()),
        ("model.head.weight", some(5, 7)),
    ]


class Side:
    """A process that has one engine and executes commands.

    Args:
        engine: the class of the engine.
        kwargs: arguments of its constructor.
        start: start method of the process.
        seconds: time limit of a command.
    """

    def __init__(self, engine: Any, kwargs: dict[str, Any], start: str, seconds: float) -> None:
        context: Any = multiprocessing.get_context(start)
        self._connection, theirs = context.Pipe()
        self._seconds = seconds
        self._process = context.Process(target=_serve, args=(theirs, engine, kwargs), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, command: str, argument: Any = None) -> None:
        """Start a command without waiting for its end."""
        try:
            self._connection.send((command, argument))
        except OSError as error:
            raise SideFailed(f"{command}: the process is gone") from error

    def answer(self) -> Any:
        """Wait for the end of the command, and return its result.

        Raises:
            SideFailed: the command raised, or the process died.
            TimeoutError: the time limit was exceeded.
        """
        if not self._connection.poll(self._seconds):
            raise TimeoutError(f"no answer within {self._seconds:g} s")
        try:
            fine, value = self._connection.recv()
        except (EOFError, OSError) as error:
            raise SideFailed("the process died") from error
        if not fine:
            raise SideFailed(value)
        return value

    def ask(self, command: str, argument: Any = None) -> Any:
        """Run a command and wait for its end."""
        self.tell(command, argument)
        return self.answer()

    def wait(self) -> None:
        """Wait for the process to end by itself."""
        self._process.join(self._seconds)

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._connection.close()


class SideHere:
    """Like `Side`, but a thread of this process; it raises instead of being killed.

    Args:
        engine: the class of the engine.
        kwargs: arguments of its constructor.
        seconds: time limit of a command.
    """

    def __init__(self, engine: Any, kwargs: dict[str, Any], seconds: float) -> None:
        self._engine, self._seconds = engine(**kwargs), seconds
        self._thread = ThreadPoolExecutor(1)
        self._answers: list[Future[Any]] = []

    def tell(self, command: str, argument: Any = None) -> None:
        """Start a command without waiting for its end."""
        self._answers.append(self._thread.submit(self._do, command, argument))

    def _do(self, command: str, argument: Any) -> Any:
        if command == "send_half_and_die":
            command, argument = "send", (*argument, True)
        return _obey(self._engine, command, argument)

    def answer(self) -> Any:
        """Wait for the end of the command; see `Side.answer`."""
        try:
            return self._answers.pop(0).result(self._seconds)
        except TimeoutError:
            raise TimeoutError(f"no answer within {self._seconds:g} s") from None
        except Exception as error:  # the error is the result of the command
            raise SideFailed(f"{type(error).__name__}: {error}") from error

    def ask(self, command: str, argument: Any = None) -> Any:
        """Run a command and wait for its end."""
        self.tell(command, argument)
        return self.answer()

    def wait(self) -> None:
        """Do nothing: `answer` raises the error."""

    def kill(self) -> None:
        """Release the other side, and end the thread after its command."""
        self._engine.finalize()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _serve(connection: "Connection[Any, Any]", engine_class: Any, kwargs: dict[str, Any]) -> None:
    """Execute commands until the connection ends."""
    engine = None
    while True:
        try:
            command, argument = connection.recv()
        except (EOFError, OSError):
            return
        try:
            engine = engine or engine_class(**kwargs)
            value = _obey(engine, command, argument)
            connection.send((True, value))
        except Exception as error:  # the error is the result of the command
            connection.send((False, f"{command}: {type(error).__name__}: {error}"))


def _obey(engine: Any, command: str, argument: Any) -> Any:
    if command == "init_process_group":
        engine.init_process_group(**argument)
        return None
    if command == "send":
        seed, size, *fails = argument
        asyncio.run(engine.send_weights(_raising(seed, size) if fails else iter(weights(seed, size))))
        return None
    if command == "send_half_and_die":
        asyncio.run(engine.send_weights(_half(*argument)))
        return None
    if command == "receive":
        return asyncio.run(_received(engine))
    return getattr(engine, command)()


def _half(seed: int, size: int) -> "Iterator[tuple[str, Tensor]]":
    import time

    named = weights(seed, size)
    yield from named[: len(named) // 2]
    time.sleep(0.2)  # let the weights that were passed so far be sent
    os._exit(9)


def _raising(seed: int, size: int) -> "Iterator[tuple[str, Tensor]]":
    named = weights(seed, size)
    yield from named[: len(named) // 2]
    raise ConnectionAbortedError("the trainer fails in the middle")


async def _received(engine: Any) -> list[tuple[str, str, Any]]:
    """Return name, dtype and values of each weight, copied immediately because the engine may reuse its buffer."""
    found = []
    async for name, tensor in engine.receive_weights():
        plain = tensor.detach().cpu()
        numbers = plain.double() if plain.is_floating_point() else plain.clone()
        found.append((name, str(tensor.dtype), numbers.contiguous().numpy().copy()))
    return found
