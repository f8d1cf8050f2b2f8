"""Compares responses with the OpenAPI description of the service, more strictly than it demands of clients."""

import json
import re
from typing import Any

import httpx
import jsonschema_rs
import numpy as np

from twinkle_client import wire
from twinkle_server.application import describe_routes

EVENTS = "text/event-stream"


def strict(described: dict[str, Any]) -> dict[str, Any]:
    """Return a description whose schemas of responses allow no other fields than those that they name."""
    return {**described, "components": _closed(described["components"])}


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(item) for name, item in schema.items()}
    if isinstance(closed.get("properties"), dict) and closed.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def plain(value: Any) -> Any:
    """Return the content of a frame as JSON; arrays become lists."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


class Described:
    """The description, and the routes that have answered with success.

    Attributes:
        seen: method, path, status and media type of each described response that was checked.
        wrong: what was wrong with others.
    """

    def __init__(self) -> None:
        self._described = strict(describe_routes())
        self._routes = {
            path: re.compile(
                re.sub(r"\\\{(\w+)\\\}", lambda found: "(.+)" if found[1] == "model" else "([^/]+)", re.escape(path))
                + "$"
            )
            for path in self._described["paths"]
        }
        self._validators: dict[str, Any] = {}
        self.seen: set[tuple[str, str, str, str]] = set()
        self.wrong: list[str] = []

    def hook(self, response: httpx.Response) -> None:
        """Check a response: an event hook of `httpx.Client`; it reads the body."""
        response.read()
        request = response.request
        self.check(request.method, request.url.path, response.status_code, response.headers, response.content)

    def transport(self) -> httpx.HTTPTransport:
        """Return a transport that checks the responses of our client; those of streams are not read."""
        return _Checking(self)

    def check(self, method: str, url: str, status: int, headers: Any, content: bytes) -> None:
        """Note whether a response is as described; paths that are not described do not count."""
        path = next((path for path, pattern in self._routes.items() if pattern.match(url)), None)
        if path is None or method.lower() not in self._described["paths"][path]:
            return
        responses = self._described["paths"][path][method.lower()]["responses"]
        kind = headers.get("content-type", "").partition(";")[0]
        found = responses.get(str(status), responses.get(f"{status // 100}XX"))
        if found is None:
            self.wrong.append(f"{method} {path}: the status {status} is not described")
            return
        if "$ref" in found:
            found = self._described["components"]["responses"][found["$ref"].rpartition("/")[2]]
        media = found.get("content", {}).get(kind)
        if media is None:
            if content:
                self.wrong.append(f"{method} {path} {status}: {kind} is not described")
            return
        schema = media["schema"]
        if kind == EVENTS:  # validators do not read the JSON in a text
            schema = _content_schema(schema["properties"]["data"])
        for value in _values(kind, content):
            if (error := self._error(schema, value)) is not None:
                self.wrong.append(f"{method} {path} {status} {kind}: {error}: {str(value)[:300]}")
                return
        self.seen.add((method, path, str(status), kind))

    def _error(self, schema: dict[str, Any], value: Any) -> str | None:
        key = json.dumps(schema, sort_keys=True)
        if key not in self._validators:
            whole = {**schema, "components": self._described["components"]}
            self._validators[key] = jsonschema_rs.Draft202012Validator(whole)
        validator = self._validators[key]
        return None if validator.is_valid(value) else str(next(iter(validator.iter_errors(value))).message)[:300]


class _Checking(httpx.HTTPTransport):
    def __init__(self, described: Described) -> None:
        super().__init__()
        self._described = described

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if not response.headers.get("content-type", "").startswith(EVENTS):
            response.read()
            headers, content = response.headers, response.content
            self._described.check(request.method, request.url.path, response.status_code, headers, content)
        return response


def _content_schema(data: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the JSON of events."""
    found = next(each["contentSchema"] for each in (data, *data.get("anyOf", ())) if "contentSchema" in each)
    return dict(found)


def _values(kind: str, content: bytes) -> list[Any]:
    """Return what a schema describes: JSON, the value of a frame, or the data of the events of a stream."""
    if kind == "application/json":
        return [json.loads(content)]
    if kind == wire.CONTENT_TYPE:
        return [plain(wire.unpack(content))]
    if kind != EVENTS:
        return []
    events = []
    for block in content.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if fields and fields["data"] != "[DONE]":
            events.append(json.loads(fields["data"]))
    return events
