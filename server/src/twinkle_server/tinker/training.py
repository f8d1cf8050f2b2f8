"""Training: forward and backward passes, and optimizer steps."""

import asyncio
import hashlib
import math
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from twinkle_server.errors import BadRequest, Unprocessable
from twinkle_server.operations import OptimStep, Submission
from twinkle_server.settings import Limits
from twinkle_server.store.records import Model
from twinkle_server.telemetry.logs import holds_key
from twinkle_server.tinker.app_state import AppState, Caller, app_state_of, caller
from twinkle_server.tinker.provenance import LOSSES, Claim, claims_of, refusal_of
from twinkle_server.tinker.requests import Body, Numbered, Text, owned_model, promise, submit_body, takes

router = APIRouter()
_ON_A_THREAD = 96 * 2**10  # bytes; below it, handing over takes longer than reading (4k tokens: 50 µs)
_NUMBERS = range(1, 2**31)
_ENCODINGS = {
    "requestBody": {
        "required": True,
        "content": {
            "application/x-protobuf": {"schema": {"type": "string", "format": "binary"}},
            "application/json": {"schema": {"type": "object"}},
        },
    }
}


@dataclass(frozen=True, slots=True)
class PassBody:
    """What the log must know of a pass.

    Attributes:
        model: its id.
        number: in the queue.
        payload: the bytes of a `ForwardBackwardRequest`.
        tokens: that it costs.
        forward_only: whether gradients stay as they are.
        refusal: what is wrong with it as a whole.
        claims: what it says of where its tokens were sampled, if its loss needs that.
    """

    model: str
    number: int
    payload: bytes
    tokens: int = 0
    forward_only: bool = False
    refusal: str | None = None
    claims: tuple[Claim, ...] = ()


@router.post("/forward_backward", openapi_extra=_ENCODINGS)
async def forward_backward(request: Request) -> Response:
    """Add the gradients of rows to a model's, or with `forward_only` leave them."""
    return await _take(request, "forward_backward_input")


@router.post("/forward", openapi_extra=_ENCODINGS)
async def forward(request: Request) -> Response:
    """Compute rows without gradients. Clients before 0.25 send this, in JSON."""
    return await _take(request, "forward_input")


async def _take(request: Request, name: str) -> Response:
    who, state = caller(request), app_state_of(request)
    data = await request.body()
    arguments = (data, None if _is_protobuf(request) else name, state.settings.limits)
    taken = read_pass(*arguments) if len(data) <= _ON_A_THREAD else await asyncio.to_thread(read_pass, *arguments)
    return await _submit(state, who, taken, await owned_model(state, who, taken.model))


async def _submit(state: AppState, who: Caller, taken: PassBody, model: Model) -> Response:
    refusal = taken.refusal
    if taken.claims and not state.settings.strict_losses:  # else the engine refuses the loss itself
        refusal = await refusal_of(state, who, model.session, taken.claims)
    submission = Submission(
        who.tenant,
        model.id,
        "forward" if taken.forward_only else "forward_backward",
        taken.payload,
        taken.number,
        tokens=taken.tokens,
        refusal=refusal,
    )
    return promise(await state.service.submit(submission), model_id=model.id)


def read_pass(data: bytes, name: str | None, limits: Limits) -> PassBody:
    """Read a body.

    Args:
        data: of the request.
        name: of the field with the work, if the body is JSON.
        limits: rows and tokens of a pass.

    Raises:
        BadRequest: it cannot be read, or it does not say which model and number it is for.
    """
    return _from_json(data, name, limits) if name is not None else _from_protobuf(data, limits)


def _from_protobuf(data: bytes, limits: Limits) -> PassBody:
    from twinkle_server.wire.codec import parse_request

    try:
        message = parse_request(data)
    except ValueError as error:
        raise BadRequest(f"cannot parse the request body: {error}") from error
    if not message.model_id:
        raise BadRequest("model_id is required in the request body")
    return _measured(message, _checked(message.seq_id), data, limits)


def _from_json(data: bytes, name: str, limits: Limits) -> PassBody:
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the request body is not valid JSON: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_id"), str) or not fields["model_id"]:
        raise Unprocessable("model_id is required in the request body")
    number = _checked(fields.get("seq_id"))
    from twinkle_server.wire.json_bodies import pass_message

    try:
        message = pass_message(fields, fields.get(name), forward_only=name == "forward_input")
    except ValueError as error:
        return PassBody(
            fields["model_id"], number, _mark(data), forward_only=name == "forward_input", refusal=f"{name}: {error}"
        )
    return _measured(message, number, message.SerializeToString(deterministic=True), limits)


def _measured(message: Any, number: int, payload: bytes, limits: Limits) -> PassBody:
    from twinkle_server.wire.codec import datum_length

    tokens = sum(map(datum_length, message.data))
    rows = len(message.data)
    refusal = None
    if not rows:
        refusal = "the pass has no rows in data; send at least one"
    elif rows > limits.datums:
        refusal = f"the pass has {rows} rows; this service takes {limits.datums} at a time"
    elif tokens > limits.request_tokens:
        refusal = f"the pass has {tokens} tokens; this service takes {limits.request_tokens} at a time"
    elif holds_key(message.loss_fn):
        refusal = f"{message.loss_fn[:140]!r} is no name of a loss: it holds an API key"
    if refusal:
        payload = _mark(payload)
    claims = claims_of(message) if refusal is None and message.loss_fn in LOSSES else ()
    return PassBody(message.model_id, number, payload, tokens, message.forward_only, refusal, claims)


def _checked(number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number not in _NUMBERS:
        raise Unprocessable(f"seq_id is {str(number)[:40]}; numbers of a model's operations begin at 1")
    return number


def _mark(data: bytes) -> bytes:
    """Return what stands for a body that is never run, so that the same one is known again."""
    return b"refused:" + hashlib.sha256(data).digest()


def _is_protobuf(request: Request) -> bool:
    return "protobuf" in request.headers.get("content-type", "")


class Adam(Body):
    """Of `OptimStepBody`; its defaults are the SDK's."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class _Other(Body):
    type: Text = "adamw"


class OptimStepBody(Numbered):
    """See `optim_step`."""

    adam_params: Adam | None = None
    optimizer_params: _Other | None = None


@router.post("/optim_step", openapi_extra=takes(OptimStepBody))
async def optim_step(request: Request) -> Response:
    """Update a model by its gradients, and clear them."""
    return await submit_body(request, OptimStepBody, "optim_step", _payload)


async def _payload(_house: AppState, _who: Caller, _model: Model, body: OptimStepBody) -> OptimStep:
    if body.optimizer_params is not None and body.optimizer_params.type != "adamw":
        raise BadRequest(f"unsupported optimizer {body.optimizer_params.type[:100]!r}; use adam_params")
    return checked(body.adam_params or Adam())


def checked(adam: Adam) -> OptimStep:
    """Return the payload of an update.

    Raises:
        BadRequest: a value is none that AdamW can have.
    """
    values = adam.model_dump()
    for name, value in values.items():
        if not math.isfinite(value):
            raise BadRequest(f"adam_params.{name} must be a finite number, got {value}")
    for name in ("beta1", "beta2"):
        if not 0 <= values[name] < 1:
            raise BadRequest(f"adam_params.{name} must be at least 0 and less than 1, got {values[name]}")
    for name in ("learning_rate", "eps", "weight_decay"):
        if values[name] < 0:
            raise BadRequest(f"adam_params.{name} must be at least 0, got {values[name]}")
    return OptimStep(**values)
