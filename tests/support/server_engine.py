"""An engine process of the training service with the ledger in it, driven over its socket as the service does."""

import queue
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from forking import Forked
from ledger_engine import ENGINE, MODEL, read_ledger_metrics

from twinkle_server.engine import messages
from twinkle_server.engine.messages import BlockingLink, Message
from twinkle_server.operations import Create, OptimStep, Sample
from twinkle_server.settings import Settings, Times
from twinkle_server.wire import codec
from twinkle_server.wire import tinker_pb2 as pb

LIMIT = 30.0


def request(*rows: Sequence[int], forward: bool = False, loss: str = "cross_entropy") -> bytes:
    """Return the payload of a pass over rows of tokens."""
    made = pb.ForwardBackwardRequest(model_id="m", loss_fn=loss, forward_only=forward)
    for row in rows:
        datum = made.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(row, "<i4").tobytes()
        datum.loss_fn_inputs["target_tokens"].CopyFrom(codec.write_tensor(np.asarray(row, np.int64)))
    return made.SerializeToString()


class Engine:
    """One engine.

    Attributes:
        seen: every message that came, in order.
        log: what the process wrote, once it has ended.
    """

    def __init__(self, settings: Settings, environment: dict[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "twinkle_server.engine", str(theirs.fileno()), settings.dump()]
            self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the engine
            self.process = Forked(command, pass_fds=[theirs.fileno()], env=environment, stderr=self._stderr)
        self._socket = ours
        self._link = BlockingLink(ours)
        self._arrived: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._ids = 0
        self.seen: list[Message] = []
        self.log = ""

    def _read(self) -> None:
        for message in self._link:
            if message.type != messages.ALIVE:
                self._arrived.put(message)
        self._arrived.put(None)

    def send(self, type_: str, body: bytes = b"", /, **head: Any) -> None:
        """Send a message."""
        self._link.send(Message(type_, head, body))

    def run(self, queue_id: str, number: int, kind: str, payload: bytes, **more: Any) -> int:
        """Send an operation, and return its id."""
        self._ids += 1
        head = {"tenant": "t", "tokens": 1, "alone": False, "replay": False, **more}
        self.send(messages.RUN, payload, id=self._ids, queue_id=queue_id, number=number, kind=kind, **head)
        return self._ids

    def create(self, queue_id: str, number: int = 0, **more: Any) -> int:
        """Send a creation."""
        return self.run(queue_id, number, "create", Create(8, 0).dump(), **more)

    def backward(self, queue_id: str, number: int, *tokens: int, **more: Any) -> int:
        """Send a forward_backward over rows of one token each."""
        return self.run(queue_id, number, "forward_backward", request(*[[token] for token in tokens]), **more)

    def step(self, queue_id: str, number: int, **more: Any) -> int:
        """Send an optimizer step."""
        return self.run(queue_id, number, "optim_step", OptimStep().dump(), **more)

    def sample(self, sample: Sample, queue_id: str = "s", **more: Any) -> int:
        """Send a sampling request."""
        return self.run(queue_id, 0, "sample", sample.dump(), **more)

    def until(self, wanted: Callable[[Message], bool]) -> Message:
        """Return the first message of its kind that comes from now on."""
        while (message := self._arrived.get(timeout=LIMIT)) is not None:
            self.seen.append(message)
            if wanted(message):
                return message
        self._read_log()
        raise AssertionError(f"the engine ended: {self.log}")

    def wait(self, kind: str) -> Message:
        """Return the next message of a type."""
        return self.until(lambda message: message.type == kind)

    def done(self, *operations: int) -> Message:
        """Wait until operations are over, and return the last one's outcome."""
        found = {message.head["id"]: message for message in self.seen if message.type == messages.DONE}
        while missing := set(operations) - set(found):
            message = self.until(lambda m: m.type == messages.DONE and m.head["id"] in missing)
            found[message.head["id"]] = message
        return found[operations[-1]]

    def begun(self, operation: int) -> None:
        """Wait until an operation is under way."""
        self.until(lambda message: message.type == messages.BEGIN and operation in message.head["ids"])

    def ledger(self, queue_id: str, number: int) -> tuple[list[int], list[int]]:
        """Return the first tokens of the datums that a model has applied, and of those that are pending."""
        outcome = self.done(self.run(queue_id, number, "forward", request([1], forward=True)))
        assert outcome.head["error"] is None, outcome.head
        _, metrics = codec.read_forward_backward_output(outcome.body)
        applied, pending = (read_ledger_metrics(name, metrics) for name in ("applied", "pending"))
        return [number >> 32 for number in applied], [number >> 32 for number in pending]

    def ended(self) -> int:
        """Wait for the process's end and return its status."""
        return self.process.wait(LIMIT)

    def _read_log(self) -> None:
        self._stderr.seek(0)
        self.log = self._stderr.read()

    def close(self) -> None:
        """End the connection, and the process with it."""
        with suppress(OSError):  # it has ended by itself
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self.ended()
        finally:
            self.process.kill()
            self._reader.join(LIMIT)
            self._link.close()
            self._read_log()
            self._stderr.close()


@contextmanager
def engine(data: Path, *, environment: dict[str, str] | None = None, **more: Any) -> Iterator[Engine]:
    """Start an engine that is ready.

    Args:
        data: the data folder.
        environment: of the process.
        more: `extra` (the ledger's `Faults`), `snapshot` (seconds), and further settings.
    """
    backend = more.pop("backend", ENGINE)
    if backend == ENGINE:
        more["extra"] = {"marks": str(data), **more.get("extra", {})}
    times = Times(snapshot=more.pop("snapshot", 3600.0))
    data.mkdir(exist_ok=True)
    made = Engine(
        Settings(more.pop("model", str(MODEL)), data, more.pop("name", "base"), backend=backend, times=times, **more),
        environment,
    )
    try:
        made.wait(messages.READY)
        yield made
    finally:
        made.close()
