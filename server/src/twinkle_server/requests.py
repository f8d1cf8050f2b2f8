"""Requests and responses of endpoints: routes, JSON bodies, pages, and operations of a queue.

A body is validated by a pydantic model. Unknown fields are errors in this service's own protocols; the Tinker protocol
ignores them, because newer SDKs send more. A request whose operation is refused uses up its sequence number.
"""

import asyncio
import hashlib
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Protocol, TypeVar

import orjson
from fastapi import APIRouter, Query, Request, Response
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from twinkle_server.app_state import AppState, Caller, app_state_of, caller_of
from twinkle_server.errors import BadRequest, Gone, NotFound, Unprocessable
from twinkle_server.operations import Accepted, Kind, Submission
from twinkle_server.store.records import Checkpoint, Model, Page

LARGE = 64 * 2**10
"""Size in bytes from which JSON is parsed on a thread, so as not to block the event loop."""
_METADATA = 64 * 2**10
B = TypeVar("B", bound="Body")
Id = Annotated[str, Field(min_length=1, max_length=256)]
Text = Annotated[str, Field(max_length=4096)]
Number = Annotated[int, Field(ge=0, le=2**62)]
"""A sequence number, or the number of a model in its session."""
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]


def _texts(value: Any) -> Any:
    """Convert metadata to strings; older clients send values of any JSON type."""
    if not isinstance(value, dict):
        return value
    return {str(key): item if isinstance(item, str) else str(item) for key, item in value.items() if item is not None}


def _bounded(value: dict[str, str]) -> dict[str, str]:
    size = sum(len(key) + len(text) for key, text in value.items())
    if size > _METADATA:
        raise ValueError(f"the metadata must have at most {_METADATA} characters, got {size}")
    return value


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=256)], Annotated[str, Field(max_length=16384)]],
    Field(max_length=128),
    BeforeValidator(_texts, json_schema_input_type=dict[str, Any]),
    AfterValidator(_bounded),
]


class Body(BaseModel):
    """A JSON body of a protocol whose newer clients may send more fields; unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), frozen=True)


class StrictBody(Body):
    """A JSON body of this service's own protocol; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid")


async def read(request: Request, kind: type[B]) -> B:
    """Parse a request's body; an empty body counts as `{}`.

    Raises:
        Unprocessable: it is invalid; the message names each invalid field.
    """
    data = await request.body()
    return parse(data, kind) if len(data) <= LARGE else await asyncio.to_thread(parse, data, kind)


def parse(data: bytes, kind: type[B]) -> B:
    """See `read`."""
    try:
        return kind.model_validate_json(data or b"{}")
    except ValidationError as error:
        raise Unprocessable(validation_message(error, data), _field(error)) from error


def body_schema(kind: type[Body]) -> dict[str, Any]:
    """Return the OpenAPI description of an endpoint's body."""
    schema = kind.model_json_schema()
    parts = schema.pop("$defs", {})
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _inlined(schema, parts)}}}}


def _inlined(schema: Any, parts: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inlined(item, parts) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(parts[schema["$ref"].rpartition("/")[2]], parts)
    return {key: _inlined(item, parts) for key, item in schema.items()}


def validation_message(error: ValidationError, data: bytes | None = None) -> str:
    """Return the message for a client: each invalid field, and why.

    Args:
        error: of pydantic.
        data: the JSON that is invalid. With it, the names of pydantic's types are not part of the message, and of the
            forms that a value may have, only the errors of the nearest one.
    """
    errors: list[Any] = [
        dict(item) for item in error.errors(include_url=False, include_context=False, include_input=False)
    ]
    if data is not None:
        errors = _nearest_forms(errors, data)
    lines = [
        f"{'.'.join(map(str, item['loc'])) or 'the body'}: {item['msg'].removeprefix('Value error, ')}"
        for item in errors[:8]
    ]
    more = f"; and {len(errors) - 8} more" if len(errors) > 8 else ""
    return "; ".join(lines)[:2000] + more


def _nearest_forms(errors: list[Any], data: bytes) -> list[Any]:
    """Return errors with their places in the body, and for a value of several forms those of the nearest form.

    pydantic adds the form to the place, as in `stop.list[str].0`. The nearest form is the one with the deepest error:
    the others fail at the value itself. Of several, it is the one with the fewest errors. If all fail in the same way,
    the errors of all are kept. An error that several items of a list have is kept once.
    """
    try:
        body = orjson.loads(data)
    except ValueError:
        return errors
    forms: dict[tuple[Any, ...], dict[Any, list[Any]]] = {}
    for item in errors:
        place, form = _place(item, body)
        above, tag = form or (place, None)
        forms.setdefault(above, {}).setdefault(tag, []).append({**item, "loc": place})
    kept: list[Any] = []
    for found in forms.values():
        if None in found:  # a value of one form
            kept += [item for items in found.values() for item in items]
            continue
        ranks = {tag: (-max(len(item["loc"]) for item in items), len(items)) for tag, items in found.items()}
        nearest = [item for tag, items in found.items() if ranks[tag] == min(ranks.values()) for item in items]
        unique = {(_without_indices(item["loc"]), item["msg"]): item for item in reversed(nearest)}
        kept += reversed(unique.values())
    return kept


def _without_indices(place: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(part for part in place if not isinstance(part, int))


def _place(item: Any, body: Any) -> tuple[tuple[Any, ...], tuple[tuple[Any, ...], Any] | None]:
    """Return the place of an error in the body; and if it has a form, the place of the first one, and that form."""
    place: list[Any] = []
    form = None
    for number, part in enumerate(item["loc"]):
        inside = isinstance(body, dict) and part in body
        inside = inside or (isinstance(body, list) and isinstance(part, int) and part < len(body))
        missing = item["type"] == "missing" and number == len(item["loc"]) - 1
        if inside:
            body = body[part]
        if inside or missing:
            place.append(part)
        elif form is None:
            form = (tuple(place), part)
    return tuple(place), form


def _field(error: ValidationError) -> str | None:
    """Return the name of the first invalid field of the body; None if the body itself is invalid."""
    place = error.errors(include_url=False, include_context=False, include_input=False)[0]["loc"]
    return str(place[0]) if place else None


def json_response(body: Any, status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(orjson.dumps(body), status, media_type="application/json")


def accepted_response(accepted: Accepted, **more: Any) -> Response:
    """Return the response to an accepted operation: its request id."""
    return json_response({"request_id": accepted.request, **more})


def without_none(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def isoformat(seconds: float) -> str:
    """Return a time (UTC seconds) in ISO format."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=2**53)]


def cursor(page: Page[Any], limit: int, offset: int) -> dict[str, int]:
    """Return the position of a page in its list."""
    return {"offset": offset, "limit": limit, "total_count": page.total}


N = TypeVar("N", bound="Numbered")
Positive = Annotated[int, Field(ge=1, le=2**62)]
PERMANENT = (BadRequest, NotFound, Gone, Unprocessable)
"""Errors of the request itself, which a retry cannot fix."""


class Numbered(Body):
    """A request for an operation of a model.

    Attributes:
        model_id: the queue.
        seq_id: the sequence number, which identifies a retry.
    """

    model_id: Text
    seq_id: Positive


class Payload(Protocol):
    """The payload of an operation; see `operations`."""

    def dump(self) -> bytes:
        """Return the bytes for the log."""


class Content(Protocol):
    """A body whose content identifies a retry: a pydantic model."""

    def model_dump_json(self) -> str:
        """Return the content."""


async def owned_model(state: AppState, caller: Caller, model_id: str) -> Model:
    """Return the caller's model if it accepts operations.

    Raises:
        NotFound: the caller has no such model.
        Gone: the model no longer exists, or belongs to another base model than the served one.
        Locked: it trains all parameters, and others use the service.
    """
    model = await state.model(caller, model_id)
    state.check_base(model.base, f"model {model_id!r}")
    if model.status == "gone":
        raise Gone(f"model {model_id!r} no longer exists: {model.reason or 'it was unloaded'}")
    if model.full:
        await state.service.reserve(caller.tenant, model.id)
    return model


def check_sampled(record: Model | Checkpoint, name: str) -> None:
    """Refuse to sample from all weights of a model: samplers share the base model, and add adapters to it.

    Raises:
        BadRequest: the model or checkpoint is not of an adapter.
    """
    if record.full:
        raise BadRequest(
            f"{name} holds all weights of a model, which this service trains but does not sample; download the "
            "checkpoint, and serve its folder"
        )


async def submit_body(
    request: Request, form: type[N], kind: Kind, make: Callable[[AppState, Caller, Model, N], Awaitable[Payload]]
) -> Response:
    """Submit the operation of a JSON body, and return the response.

    Args:
        request: with the body.
        form: model of the body. An invalid body fails the operation, not the request, if it has a model and a number.
        kind: of the operation.
        make: creates the payload; its permanent errors fail the operation, not the request.

    Raises:
        Unprocessable: model or sequence number are missing or invalid.
        NotFound: the caller has no such model.
        Gone: the model no longer exists.
    """
    caller, state, data = caller_of(request), app_state_of(request), await request.body()
    body = _read(data, form) if len(data) <= LARGE else await asyncio.to_thread(_read, data, form)
    if isinstance(body, _Refused):
        model = await owned_model(state, caller, body.head.model_id)
        original, number = body.original, body.head.seq_id
        refused = Submission(caller.tenant, model.id, kind, b"{}", number, refusal=body.reason, original=original)
        return accepted_response(await state.service.submit(refused), model_id=model.id)
    model = await owned_model(state, caller, body.model_id)
    accepted = await submit(state, caller, model.id, body.seq_id, kind, body, lambda: make(state, caller, model, body))
    return accepted_response(accepted, model_id=model.id)


async def submit(
    state: AppState,
    caller: Caller,
    queue_id: str,
    number: int,
    kind: Kind,
    body: Content,
    payload: Callable[[], Awaitable[Payload]],
    in_transaction: Callable[[Any], None] | None = None,
) -> Accepted:
    """Submit an operation of a JSON request.

    Args:
        state: of the application.
        caller: the caller.
        queue_id: of a model of the caller.
        number: sequence number in the queue.
        kind: of the operation.
        body: of the request; its content identifies a retry.
        payload: creates the payload; its permanent errors fail the operation, not the request, so that later numbers
            can run.
        in_transaction: see `Service.submit`.
    """
    refusal, data = None, b"{}"
    try:
        data = (await payload()).dump()
    except PERMANENT as error:
        refusal = error.message
    original = body.model_dump_json().encode()
    submission = Submission(caller.tenant, queue_id, kind, data, number, refusal=refusal, original=original)
    return await state.service.submit(submission, in_transaction)


@dataclass(frozen=True, slots=True)
class _Refused:
    head: Numbered
    reason: str
    original: bytes


def _read(data: bytes, form: type[N]) -> N | _Refused:
    """Parse a body; for an invalid one, return at least its model and sequence number."""
    try:
        return parse(data, form)
    except Unprocessable as error:
        try:
            head = parse(data, Numbered)
        except Unprocessable:
            raise error from None
        return _Refused(head, error.message, hashlib.sha256(data).digest())


class RequestRoute(APIRoute):
    """Calls an endpoint whose only parameter is `request` without FastAPI's dependency resolution.

    Such an endpoint reads the body and builds the response itself, so FastAPI has nothing to convert. Resolving its
    empty set of dependencies costs a third of the service's time for a small request
    (`benchmarks/server_capacity.py`). Other endpoints are called by FastAPI as usual.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._takes_only_request = list(inspect.signature(self.endpoint).parameters) == ["request"]

    async def handle(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle a request whose path matched."""
        if not self._takes_only_request or scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        response = await self.endpoint(Request(scope, receive))
        await response(scope, receive, send)


def add_routes(target: APIRouter, router: APIRouter, prefix: str = "") -> None:
    """Add the endpoints of `router` directly to `target`.

    `include_router` keeps nested routers and searches each of them for every request.
    """
    for route in router.routes:
        if isinstance(route, APIRoute):
            target.add_api_route(
                prefix + route.path,
                route.endpoint,
                methods=sorted(route.methods or ()),
                openapi_extra=route.openapi_extra,
                include_in_schema=route.include_in_schema,
                route_class_override=RequestRoute,
            )
