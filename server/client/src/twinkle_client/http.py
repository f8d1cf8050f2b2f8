"""The connection to a service: address and key, retries that repeat nothing twice, synchronous and asynchronous.

Every request has an id (`X-Request-Id`, `X-Idempotency-Key`) that all of its attempts share, so that the service can
recognize a repetition. Operations of a model also have their number in the model's queue; see `queues`.
"""

import contextlib
import json
import logging
import os
import ssl
import threading
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from urllib.parse import urlsplit

from twinkle.errors import ArgumentError
from twinkle_client import wire
from twinkle_client.calls import Answer, Call, Send, Sleep
from twinkle_client.errors import ConnectionFailed, ServiceError, error_of

if TYPE_CHECKING:
    import asyncio

    import httpx

T = TypeVar("T")
_log = logging.getLogger(__name__)
DEFAULT_URL: Final = "http://127.0.0.1:8000"
DEFAULT_KEY: Final = "EMPTY_TOKEN"
_RETRIED: Final = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses after which the same request may succeed."""
_EVENT: Final = "data: "
_FAILURES: Final = 3
"""Attempts after an internal error of the service: some are transient, most are not."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0  # seconds
_FIRST_LINE, _LINES = 5.0, 30.0
"""Seconds without success after which a line is logged, and until the next one."""
_PASSING: Final = frozenset({"UNEXPECTED_EOF_WHILE_READING", "DECRYPTION_FAILED_OR_BAD_RECORD_MAC", "BAD_RECORD_MAC"})
"""Failures of TLS that a broken connection can cause."""


class Connection:
    """A connection to one service, for one key. Any number of them can exist in a process; all methods are thread-safe.

    Args:
        base_url: address of the service, such as `http://127.0.0.1:8000`; by default `TWINKLE_SERVER_URL`.
        api_key: key of the tenant; by default `TWINKLE_SERVER_TOKEN`. Services without keys accept any.
        route_prefix: prefix of the native routes.
        retry_seconds: how long a request is repeated after lost connections and answers such as 429 and 503. The
            logger `twinkle_client.http` reports long waits. A certificate that is not accepted is an error at once.
        transport: a transport of httpx, for tests; None opens sockets.
        async_transport: the same for asynchronous calls.

    Raises:
        ArgumentError: the address is not an http(s) URL.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        route_prefix: str = "/twinkle",
        retry_seconds: float = 300.0,
        transport: "httpx.BaseTransport | None" = None,
        async_transport: "httpx.AsyncBaseTransport | None" = None,
    ) -> None:
        self.base_url = _checked_url(base_url or os.environ.get("TWINKLE_SERVER_URL") or DEFAULT_URL)
        self.route_prefix = "/" + route_prefix.strip("/") if route_prefix.strip("/") else ""
        self._key = api_key or os.environ.get("TWINKLE_SERVER_TOKEN") or DEFAULT_KEY
        self._retry_seconds = retry_seconds
        self._transport, self._async_transport = transport, async_transport
        self._lock = threading.Lock()
        self._client: httpx.Client | None = None
        self._async_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = (
            weakref.WeakKeyDictionary()
        )

    def __repr__(self) -> str:
        return f"Connection({self.base_url!r})"  # without the key

    # Calls

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        timeout: float = 60.0,
        retry_seconds: float | None = None,
    ) -> Call[Any]:
        """Make a request until it is answered, and return the value of the answer.

        Args:
            method: of HTTP.
            path: below the prefix of the native routes, such as `/create_session`.
            body: sent as a frame of `wire`; None sends no body.
            query: parameters of the URL; those that are None are left out.
            request_id: identifies the request over its attempts; by default a new random one.
            timeout: seconds without a byte after which an attempt has failed.
            retry_seconds: as that of the connection, which is the default.

        Returns:
            the JSON or the frame of the answer; its bytes if it is something else.

        Raises:
            TwinkleClientError: see `errors`.
        """
        answer = yield from self.exchange(
            method, path, body, query=query, request_id=request_id, timeout=timeout, retry_seconds=retry_seconds
        )
        return value_of(answer)

    def exchange(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        timeout: float = 60.0,
        retry_seconds: float | None = None,
    ) -> Call[Answer]:
        """As `request`, and return the answer itself."""
        request_id = request_id or uuid.uuid4().hex
        headers = {"x-request-id": request_id, "x-idempotency-key": request_id}
        content = b""
        if body is not None:
            content = bytes(body) if isinstance(body, bytes | bytearray | memoryview) else wire.pack(body)
            headers["content-type"] = wire.CONTENT_TYPE
        send = Send(method, self.route_prefix + path + _query(query), content, headers, timeout)
        seconds = self._retry_seconds if retry_seconds is None else retry_seconds
        return (yield from _attempts(send, seconds))

    # Streams

    def events(self, path: str, body: Any, *, timeout: float = 60.0) -> Iterator[Any]:
        """Make a request whose answer is a stream of events, and yield each as it arrives; closing ends the request.

        The request is repeated until the stream begins, and never after that.

        Raises:
            TwinkleClientError: see `errors`; `ConnectionFailed` if the stream breaks.
        """
        import httpx

        with contextlib.ExitStack() as stack:
            opened: list[httpx.Response] = []

            def perform(effect: Send | Sleep) -> Answer | None:
                if isinstance(effect, Sleep):
                    return self._perform(effect)
                request = self._sync_client().stream(
                    effect.method, effect.path, content=effect.content, headers=effect.headers, timeout=_timeout(effect)
                )
                try:
                    response = stack.enter_context(request)
                    if response.status_code >= 400:
                        response.read()
                        return _answer(response)
                except httpx.TransportError as error:
                    raise self._lost(error) from error
                opened.append(response)
                return Answer(response.status_code, {}, b"")

            _drive(_attempts(self._stream_request(path, body, timeout), self._retry_seconds), perform)
            try:
                for line in opened[-1].iter_lines():
                    if line.startswith(_EVENT):
                        yield json.loads(line.removeprefix(_EVENT))
            except httpx.TransportError as error:
                raise ConnectionFailed(f"the stream broke ({type(error).__name__}: {error}); start it again") from error

    async def events_async(self, path: str, body: Any, *, timeout: float = 60.0) -> AsyncIterator[Any]:
        """As `events`, on the current event loop."""
        import httpx

        async with contextlib.AsyncExitStack() as stack:
            call = _attempts(self._stream_request(path, body, timeout), self._retry_seconds)
            opened: list[httpx.Response] = []

            async def perform(effect: Send | Sleep) -> Answer | None:
                if isinstance(effect, Sleep):
                    return await self._perform_async(effect)
                request = self._loop_client().stream(
                    effect.method, effect.path, content=effect.content, headers=effect.headers, timeout=_timeout(effect)
                )
                try:
                    response = await stack.enter_async_context(request)
                    if response.status_code >= 400:
                        await response.aread()
                        return _answer(response)
                except httpx.TransportError as error:
                    raise self._lost(error) from error
                opened.append(response)
                return Answer(response.status_code, {}, b"")

            await _drive_async(call, perform)
            try:
                lines = cast("AsyncGenerator[str, None]", opened[-1].aiter_lines())
                async with contextlib.aclosing(lines):
                    async for line in lines:
                        if line.startswith(_EVENT):
                            yield json.loads(line.removeprefix(_EVENT))
            except httpx.TransportError as error:
                raise ConnectionFailed(f"the stream broke ({type(error).__name__}: {error}); start it again") from error

    def _stream_request(self, path: str, body: Any, timeout: float) -> Send:
        request_id = uuid.uuid4().hex
        headers = {"x-request-id": request_id, "content-type": wire.CONTENT_TYPE}
        return Send("POST", self.route_prefix + path, wire.pack(body), headers, timeout)

    # Running calls

    def run(self, call: Call[T]) -> T:
        """Run a call in this thread, and return its result."""
        return _drive(call, self._perform)

    async def run_async(self, call: Call[T]) -> T:
        """Run a call on the current event loop, and return its result."""
        return await _drive_async(call, self._perform_async)

    def _perform(self, effect: Send | Sleep) -> Answer | None:
        if isinstance(effect, Sleep):
            time.sleep(effect.seconds)
            return None
        import httpx

        try:
            response = self._sync_client().request(
                effect.method, effect.path, content=effect.content, headers=effect.headers, timeout=_timeout(effect)
            )
        except httpx.TransportError as error:
            raise self._lost(error) from error
        return _answer(response)

    async def _perform_async(self, effect: Send | Sleep) -> Answer | None:
        if isinstance(effect, Sleep):
            import asyncio

            await asyncio.sleep(effect.seconds)
            return None
        import httpx

        try:
            response = await self._loop_client().request(
                effect.method, effect.path, content=effect.content, headers=effect.headers, timeout=_timeout(effect)
            )
        except httpx.TransportError as error:
            raise self._lost(error) from error
        return _answer(response)

    def _lost(self, error: "httpx.TransportError") -> ConnectionError:
        """Return the error of an attempt: `ConnectionFailed` if repeating it cannot help."""
        failure = _tls_failure(error)
        if failure is None:
            return ConnectionError(f"{type(error).__name__}: {error}")
        reason = getattr(failure, "verify_message", "") or failure.reason or str(failure)
        if isinstance(failure, ssl.SSLCertVerificationError):
            what = "its certificate is not accepted"
            remedy = "for an authority of your own, set SSL_CERT_FILE to its certificate; or check the address"
        else:
            what, remedy = (
                "the TLS handshake failed",
                "check that the address has the right port, and https:// is meant",
            )
        return ConnectionFailed(f"cannot connect to {self.base_url}: {what}: {reason}; {remedy}. Nothing was sent")

    def _sync_client(self) -> "httpx.Client":
        import httpx

        with self._lock:
            if self._client is None or self._client.is_closed:
                self._client = httpx.Client(
                    base_url=self.base_url, headers=self._headers(), transport=self._transport, limits=_limits()
                )
            return self._client

    def _loop_client(self) -> "httpx.AsyncClient":
        """Return the client of the running event loop: sockets belong to one loop."""
        import asyncio

        import httpx

        loop = asyncio.get_running_loop()
        with self._lock:
            client = self._async_clients.get(loop)
            if client is None or client.is_closed:
                client = self._async_clients[loop] = httpx.AsyncClient(
                    base_url=self.base_url, headers=self._headers(), transport=self._async_transport, limits=_limits()
                )
            return client

    def _headers(self) -> dict[str, str]:
        return {"x-api-key": self._key, "accept": f"{wire.CONTENT_TYPE}, application/json"}

    def close(self) -> None:
        """Close the sockets of synchronous calls; a later call opens new ones."""
        with self._lock:
            if self._client is not None:
                self._client.close()

    async def close_async(self) -> None:
        """Close the sockets of asynchronous calls of the running event loop."""
        import asyncio

        with self._lock:
            client = self._async_clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()


def value_of(answer: Answer) -> Any:
    """Return the value of a successful answer."""
    kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == wire.CONTENT_TYPE:
        return wire.unpack(answer.content)
    if kind == "application/json":
        try:
            return json.loads(answer.content)
        except ValueError as error:
            raise ServiceError(f"the service answered with invalid JSON: {error}") from error
    return answer.content


def _drive(call: Call[T], perform: Callable[[Send | Sleep], Answer | None]) -> T:
    try:
        effect = next(call)
        while True:
            try:
                answer = perform(effect)
            except ConnectionError as error:
                effect = call.throw(error)
            else:
                effect = call.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        call.close()


async def _drive_async(call: Call[T], perform: Callable[[Send | Sleep], Awaitable[Answer | None]]) -> T:
    try:
        effect = next(call)
        while True:
            try:
                answer = await perform(effect)
            except ConnectionError as error:
                effect = call.throw(error)
            else:
                effect = call.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        call.close()


def _attempts(send: Send, seconds: float) -> Call[Answer]:
    """Send a request until it succeeds or cannot succeed; return the successful answer."""
    began = time.monotonic()
    pause, failures, attempts, next_line = _FIRST_PAUSE, 0, 0, _FIRST_LINE
    while True:
        lost: ConnectionError | None = None
        answer: Answer | None = None
        try:
            attempts += 1
            answer = yield send
        except ConnectionFailed:  # for good
            raise
        except ConnectionError as error:
            lost = error
        if answer is not None and answer.status < 400:
            return answer
        waited = time.monotonic() - began
        if answer is not None:
            failures += answer.status == 500
            if not _may_succeed(answer, failures):
                raise _error(answer)
            wait = max(pause, _retry_after(answer))
            if waited + wait > seconds:
                raise _error(answer)
        else:
            wait = min(pause, seconds - waited)  # the last attempt is made at the end of the time
            if wait <= 0:
                raise ConnectionFailed(
                    f"no answer to {_name(send)} for {waited:.1f} s ({_times(attempts)}; the last: {lost}); check that "
                    "the service runs, and its address"
                ) from lost
        if waited >= next_line:
            reason = lost if answer is None else f"HTTP status {answer.status}: {_error(answer)}"
            _log.warning(
                "no result of %s for %.0f s (%s); trying until %.0f s have passed", _name(send), waited, reason, seconds
            )
            next_line = waited + _LINES
        yield Sleep(wait)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _name(send: Send) -> str:
    """Return a request for messages, without its parameters."""
    return f"{send.method} {send.path.partition('?')[0]}"


def _times(attempts: int) -> str:
    return "1 attempt" if attempts == 1 else f"{attempts} attempts"


def _tls_failure(error: BaseException | None) -> ssl.SSLError | None:
    """Return the failure of TLS behind an error that no repetition cures; None if there is none.

    A connection that ends during the handshake is a lost one: the service may be about to start.
    """
    while error is not None:
        if isinstance(error, ssl.SSLError):
            passing = ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError
            return None if isinstance(error, passing) or error.reason in _PASSING else error
        error = error.__cause__ or error.__context__
    return None


def _may_succeed(answer: Answer, failures: int) -> bool:
    if answer.headers.get("x-should-retry") == "false":
        return False
    return answer.status in _RETRIED or (answer.status == 500 and failures < _FAILURES)


def _retry_after(answer: Answer) -> float:
    with contextlib.suppress(ValueError):
        return min(max(0.0, float(answer.headers.get("retry-after", "0"))), 60.0)
    return 0.0


def _error(answer: Answer) -> Exception:
    message, kind = "", None
    with contextlib.suppress(ValueError, AttributeError):
        body = json.loads(answer.content)
        detail, kind = body.get("detail"), body.get("error")
        message = detail if isinstance(detail, str) else json.dumps(detail)
    return error_of(answer.status, message or f"the service answered with HTTP status {answer.status}", kind)


def _answer(response: "httpx.Response") -> Answer:
    return Answer(
        response.status_code, {name.lower(): value for name, value in response.headers.items()}, response.content
    )


def _timeout(send: Send) -> "httpx.Timeout":
    import httpx

    return httpx.Timeout(send.timeout, connect=min(10.0, send.timeout))


def _limits() -> "httpx.Limits":
    import httpx

    return httpx.Limits(max_connections=None, max_keepalive_connections=64)


def _query(query: Mapping[str, Any] | None) -> str:
    given = {name: value for name, value in (query or {}).items() if value is not None}
    if not given:
        return ""
    from urllib.parse import urlencode

    return "?" + urlencode(
        {name: str(value).lower() if isinstance(value, bool) else value for name, value in given.items()}
    )


def _checked_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ArgumentError(f"base_url must be an address such as {DEFAULT_URL!r}, got {url!r}")
    path = parts.path.rstrip("/").removesuffix("/api/v1")  # scripts for the older service end in this prefix
    return f"{parts.scheme}://{parts.netloc}{path}"
