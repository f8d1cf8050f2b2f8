"""How a request becomes an operation of a model's queue. A request that fails uses up its number as well."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import Request, Response
from pydantic import Field

from twinkle_server.errors import BadRequest, Gone, NotFound, Unprocessable
from twinkle_server.operations import Accepted, Kind, Submission
from twinkle_server.store.records import Model
from twinkle_server.tinker.answers import promise
from twinkle_server.tinker.app_state import AppState, Caller, app_state_of, caller
from twinkle_server.tinker.bodies import LARGE, Body, Text, parse

B = TypeVar("B", bound="Numbered")
Positive = Annotated[int, Field(ge=1, le=2**62)]
PERMANENT = (BadRequest, NotFound, Gone, Unprocessable)
"""What is wrong with a request itself, and not with the moment."""


class Numbered(Body):
    """A request for an operation of a model.

    Attributes:
        model_id: the queue.
        seq_id: the number in it. Without one a repeated request could not be told from another.
    """

    model_id: Text
    seq_id: Positive


class Payload(Protocol):
    """See `payloads`."""

    def dump(self) -> bytes:
        """Return the bytes for the log."""


async def owned_model(state: AppState, who: Caller, model_id: str) -> Model:
    """Return the caller's model, if it can be given work.

    Raises:
        NotFound: the caller has none of that id.
        Gone: it was unloaded.
    """
    model = await state.model(who, model_id)
    if model.status == "gone":
        raise Gone(f"model {model_id!r} no longer exists: {model.reason or 'it was unloaded'}")
    return model


async def submit_body(
    request: Request, form: type[B], kind: Kind, make: Callable[[AppState, Caller, Model, B], Awaitable[Payload]]
) -> Response:
    """Submit the operation that a JSON body asks for, and return the answer.

    Args:
        request: with the body.
        form: of it. A body of another form fails the operation and not the request if model and number can be read.
        kind: of the operation.
        make: makes the payload; what it raises for good fails the operation and not the request.

    Raises:
        Unprocessable: not even model and number can be read.
        NotFound: the caller has no such model.
        Gone: it was unloaded.
    """
    who, state, data = caller(request), app_state_of(request), await request.body()
    body = _read(data, form) if len(data) <= LARGE else await asyncio.to_thread(_read, data, form)
    if isinstance(body, _Refused):
        model = await owned_model(state, who, body.head.model_id)
        asked, number = body.asked, body.head.seq_id
        refused = Submission(who.tenant, model.id, kind, b"{}", number, refusal=body.reason, asked=asked)
        return promise(await state.service.submit(refused), model_id=model.id)
    model = await owned_model(state, who, body.model_id)
    accepted = await submit(state, who, model.id, body.seq_id, kind, body, lambda: make(state, who, model, body))
    return promise(accepted, model_id=model.id)


async def submit(
    state: AppState,
    who: Caller,
    queue_id: str,
    number: int,
    kind: Kind,
    body: Body,
    payload: Callable[[], Awaitable[Payload]],
    also: Callable[[Any], None] | None = None,
) -> Accepted:
    """Submit an operation that came as JSON.

    Args:
        state: see there.
        who: asks.
        queue_id: of a model of theirs.
        number: in the queue.
        kind: of the operation.
        body: of the request; all that it says tells a repeated request from another one.
        payload: makes the payload; what it raises for good fails the operation, and not the request, so that the
            numbers behind it go on.
        also: see `Service.submit`.
    """
    refusal, data = None, b"{}"
    try:
        data = (await payload()).dump()
    except PERMANENT as error:
        refusal = error.message
    asked = body.model_dump_json().encode()
    submission = Submission(who.tenant, queue_id, kind, data, number, refusal=refusal, asked=asked)
    return await state.service.submit(submission, also)


@dataclass(frozen=True, slots=True)
class _Refused:
    head: Numbered
    reason: str
    asked: bytes


def _read(data: bytes, form: type[B]) -> B | _Refused:
    """Read a body; of one that has another form, what says whose number it uses up."""
    try:
        return parse(data, form)
    except Unprocessable as error:
        try:
            head = parse(data, Numbered)
        except Unprocessable:
            raise error from None
        return _Refused(head, error.message, hashlib.sha256(data).digest())
