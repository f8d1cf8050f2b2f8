"""The HTTP server of the fake hub: routes, tokens, ranges, redirects and faults.

The interfaces, `fakehub_hf` and `fakehub_ms`, register their routes here; `fakehub` imports both.
"""

import base64
import contextlib
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar, Literal, Protocol
from urllib.parse import parse_qs, unquote, urlsplit

from twinkle_testing.fakehub_store import Store

Route = tuple[str, re.Pattern[str], Callable[..., None]]
_WORDS = "refs|revision|tree|paths-info|preupload|commit|branch|resolve|repo"
REPO = rf"(?P<repo>[\w.-]+(/(?!({_WORDS})(/|$|\?))[\w.-]+)?)"
KIND = r"(?P<kind>models|datasets)"
ROUTES: list[Route] = []


def route(method: str, pattern: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function for requests whose method and whole path match; groups of the pattern are its keywords."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        ROUTES.append((method, re.compile(pattern), function))
        return function

    return register


class Answer(Exception):
    """Ends a request with a JSON body."""

    def __init__(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status)
        self.status, self.body, self.headers = status, body, dict(headers or {})


@dataclass
class Fault:
    """An injected fault for requests whose path matches.

    Attributes:
        kind: `cut` ends the connection in the middle of a body, `slow` waits, `status` answers with an error.
        pattern: searched in `METHOD path`.
        value: bytes sent before the cut, seconds, or the status.
        times: number of times that it will still happen.
        begun: number of times that it has happened.
    """

    kind: Literal["cut", "slow", "status"]
    pattern: str
    value: float
    times: int
    begun: int = 0


class ServedHub(Protocol):
    """The part of `FakeHub` that requests use."""

    store: Store
    requests: list[str]

    @property
    def url(self) -> str:
        """Its address, without a slash at the end."""

    def fault(self, request: str) -> Fault | None:
        """Return the fault for this request, if any."""


class Handler(BaseHTTPRequestHandler):
    """One request; `hub` is set by the server."""

    hub: ClassVar[ServedHub]
    body: bytes
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Find the route and answer, or inject a fault."""
        self._cut: int | None = None
        fault = self.hub.fault(f"{self.command} {self.path}")
        if fault is not None and fault.kind == "slow":
            time.sleep(fault.value)
        if fault is not None and fault.kind == "cut":
            self._cut = int(fault.value)
        self.body = self._read_body()  # before any answer, so that the connection can be reused
        try:
            if fault is not None and fault.kind == "status":
                raise Answer(int(fault.value), {"error": "this is an injected fault"})
            self._dispatch()
        except Answer as answer:
            self.send(answer.status, json.dumps(answer.body).encode(), answer.headers)
        except Exception as error:  # an error of the fake hub must not look like a network failure
            self.send(500, json.dumps({"error": f"the fake hub failed: {error!r}"}).encode())

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def _dispatch(self) -> None:
        path = urlsplit(self.path).path
        method = "GET" if self.command == "HEAD" else self.command
        for wanted, pattern, function in ROUTES:
            found = pattern.fullmatch(path) if wanted == method else None
            if found:
                # Unquote after the match: a quoted slash is part of the name of a revision or a file.
                function(self, **{key: part and unquote(part) for key, part in found.groupdict().items()})
                return
        raise Answer(404, {"error": f"the fake hub has no route for {self.command} {path}"})

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    @property
    def query(self) -> dict[str, str]:
        """The first value of each parameter."""
        return {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}

    @property
    def token(self) -> str | None:
        """The token of the request: a bearer token, ModelScope's cookie, or git's password."""
        scheme, _, value = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return value
        if scheme.lower() == "basic":
            return base64.b64decode(value).decode().partition(":")[2]
        cookie = re.search(r"m_session_id=([^;]+)", self.headers.get("Cookie", ""))
        return cookie[1] if cookie else None

    @property
    def user(self) -> str | None:
        """The user of the token, or None."""
        return self.hub.store.tokens.get(self.token or "")

    def json(self) -> Any:
        """The request's body, parsed."""
        return json.loads(self.body or b"{}")

    def send(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Answer with these bytes, or with a part of them if a fault cuts the connection."""
        self.hub.requests.append(f"{self.command} {self.path} {status}")
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self._cut is not None and self._cut < len(data):
            self.wfile.write(data[: self._cut])
            self.close_connection = True
            return
        with contextlib.suppress(ConnectionError):  # the client has disconnected
            self.wfile.write(data)

    def send_file(self, data: bytes, headers: Mapping[str, str]) -> None:
        """Answer with a file, or with the requested range of it."""
        shared = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", **headers}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            return self.send(200, data, shared)
        first, last = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
        if first >= len(data):
            return self.send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        return self.send(206, data[first : last + 1], {**shared, "Content-Range": f"bytes {first}-{last}/{len(data)}"})

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log: `FakeHub.requests` records the requests."""
