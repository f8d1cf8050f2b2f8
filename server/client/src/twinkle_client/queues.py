"""The queue of one model on a service: calls have numbers, so that none is carried out twice or out of order."""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import twinkle.errors
from twinkle.errors import ArgumentError
from twinkle.logging import get_logger
from twinkle_client import wire
from twinkle_client.calls import Answer, Call
from twinkle_client.errors import (
    Cancelled,
    Conflict,
    ConnectionFailed,
    OperationFailed,
    Overloaded,
    ServiceError,
    TwinkleClientError,
)
from twinkle_client.http import Connection, value_of

_POLL: Final = 25.0
_TIMEOUT: Final = 60.0
_UNKNOWN: Final = (ConnectionFailed, Overloaded, ServiceError)
"""Errors after which it is not known whether the service has the request."""


class AdapterQueue:
    """Sends the calls of a model, in the order in which they begin, and waits for their results.

    A request that is repeated has its first number, and the service returns the first result. If a call ended without
    its result (it raised `ConnectionFailed`, or was interrupted or cancelled), nobody knows whether it was carried out:
    the same call, made again, is sent with the same number; any other call first makes the service give that number up,
    if it has not been used.

    Args:
        connection: to the service.
        route: of the model.
    """

    def __init__(self, connection: Connection, route: str) -> None:
        self._connection, self._route = connection, route
        self._lock = threading.Lock()
        self._last = 0
        self._unanswered: dict[int, tuple[str, bytes]] = {}
        self._holder = ""
        self._part: tuple[bytes, Mapping[str, Any], Mapping[str, Any]] | None = None

    @contextmanager
    def held(self, what: str) -> Iterator[None]:
        """Refuse all calls until the context ends, except those of `what`.

        Args:
            what: a method that makes several calls, between which no other may come.

        Raises:
            ArgumentError: another one has begun.
        """
        with self._lock:
            self._refuse("")
            self._holder = what
        try:
            yield
        finally:
            with self._lock:
                self._holder = ""

    def note_part(self, first: Mapping[str, Any], second: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        """Keep the second of two `forward_...` calls until it is answered.

        Args:
            first: body of the first one, `forward_only`.
            second: body of the second one, `forward_backward`.
            kept: what the method needs for its result.
        """
        self._part = (wire.pack(first), second, kept)

    def finish_part(self) -> Mapping[str, Any]:
        """Forget the second call, which was answered, and return what was kept for the result."""
        part, self._part = self._part, None
        return {} if part is None else part[2]

    def unanswered_part(self, first: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the body of the second call if the same method was called last, and its second call lost.

        It may have been carried out: it is sent again as it was, with its number, instead of both calls.
        """
        if self._part is None or self._part[0] != wire.pack(first):
            return None
        lost = ("forward_backward", wire.pack(self._part[1]))
        with self._lock:
            return self._part[1] if lost in self._unanswered.values() else None

    def _refuse(self, holder: str) -> None:
        if self._holder not in ("", holder):
            raise ArgumentError(
                f"{self._holder} of this adapter has not ended, and the next call would come between its two passes; "
                f"await {self._holder} first"
            )

    def call(self, method: str, body: Mapping[str, Any], holder: str = "") -> Call[Any]:
        """Make a call and return its value.

        Args:
            method: its name.
            body: its arguments.
            holder: the method that holds the queue, if the call is one of its parts.

        Raises:
            ArgumentError: another method holds the queue.
            TwinkleError: what the method raises on the service.
            OperationFailed: the service failed, or refused the call.
            TwinkleClientError: see `errors`.
        """
        frame = wire.pack(body)
        number, stale = self._begin(method, frame, holder)
        accepted = False
        try:
            for old in stale:
                yield from self._give_up(old)
            answer = yield from self._connection.exchange(
                "POST", f"{self._route}/{method}", frame, query={"seq_id": number}, timeout=_TIMEOUT
            )
            accepted = True
            return (yield from result_of_operation(self._connection, method, answer))
        except (*_UNKNOWN, GeneratorExit):  # an interrupted or cancelled call is closed while it waits
            with self._lock:
                self._unanswered[number] = (method, frame)
            raise
        except TwinkleClientError:
            if not accepted:
                with contextlib.suppress(*_UNKNOWN):  # it is given up before the next call
                    yield from self._give_up(number)
            raise

    def _begin(self, method: str, frame: bytes, holder: str) -> tuple[int, list[int]]:
        """Return the number of a call, and numbers whose calls were not made again."""
        with self._lock:
            self._refuse(holder)
            again = next((n for n, call in sorted(self._unanswered.items()) if call == (method, frame)), None)
            if again is not None:
                del self._unanswered[again]
                return again, sorted(self._unanswered)
            self._last += 1
            return self._last, sorted(self._unanswered)

    def _give_up(self, number: int) -> Call[None]:
        """Make the service use up a number, unless it has a request.

        Raises:
            ConnectionFailed: the service does not answer; the number is given up before the next call.
        """
        with self._lock:
            self._unanswered.setdefault(number, ("skip", b""))
        try:
            yield from self._connection.request("POST", f"{self._route}/skip", {}, query={"seq_id": number})
        except Conflict:  # the request had arrived, and was or will be carried out
            get_logger().warning("a call whose answer was lost (number %d) was carried out by the service", number)
        except _UNKNOWN:
            raise
        except TwinkleClientError as error:
            get_logger().debug("number %d could not be given up: %s", number, error)
        with self._lock:
            self._unanswered.pop(number, None)


class WaitLog:
    """Logs what a call waits for and how far it is, whenever that changes.

    Args:
        what: name of the call.
    """

    def __init__(self, what: str) -> None:
        self._what, self._last = what, ""

    def add(self, state: Mapping[str, Any]) -> None:
        """Log the state of an answer with HTTP status 202: `queue_state`, `reason`, and `done` of `total` prompts."""
        parts = []
        if state.get("total"):
            parts.append(f"{state.get('done', 0)} of {state['total']} prompts are complete")
        if state.get("reason"):
            parts.append(f"{state.get('queue_state')}: {state['reason']}")
        text = "; ".join(parts)
        if text and text != self._last:
            get_logger().info("%s waits (%s)", self._what, text)
            self._last = text


def result_of_operation(connection: Connection, what: str, answer: Answer) -> Call[Any]:
    """Wait for the result of an operation that the service has accepted, and return its value.

    Args:
        connection: to the service.
        what: name of the call, for the log.
        answer: to the request of the operation.

    Raises:
        Exception: see `outcome_of`.
    """
    request = answer.headers.get("x-twinkle-request", "")
    log = WaitLog(what)
    while answer.status == 202:
        log.add(value_of(answer))
        answer = yield from connection.exchange("GET", f"/futures/{request}", query={"wait": _POLL}, timeout=_TIMEOUT)
    return outcome_of(value_of(answer))


def outcome_of(body: Any) -> Any:
    """Return the value of an operation that has ended.

    Raises:
        TwinkleError: the method raised one of `twinkle.errors`.
        OperationFailed: the operation failed.
    """
    if not isinstance(body, dict):
        raise ServiceError(f"the service returned a {type(body).__name__} instead of a result")
    if "error" in body and isinstance(body["error"], dict):
        raise _raised(body["error"])
    status = body.get("status")
    if status == "cancelled":
        raise Cancelled(str(body.get("error")), "user")
    if status == "failed":
        raise OperationFailed(str(body.get("error")), str(body.get("category", "unknown")))
    return body.get("value")


def _raised(error: Mapping[str, Any]) -> Exception:
    """Return the error that a local call raises, by the name of its class."""
    message = str(error.get("message"))
    kind = getattr(twinkle.errors, str(error.get("type")), None)
    if isinstance(kind, type) and issubclass(kind, twinkle.errors.TwinkleError):
        return kind(message)
    return OperationFailed(message, "user")
