"""Endpoints for training: forward and backward passes, and optimizer steps."""

import asyncio
import hashlib
import math
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from twinkle_server.app_state import AppState, Caller, app_state_of, caller_of
from twinkle_server.errors import BadRequest, Unprocessable
from twinkle_server.limits.body import ON_A_THREAD, PARTS, check_parts, has_parts
from twinkle_server.operations import OptimStep, Submission
from twinkle_server.requests import (
    Body,
    Numbered,
    Text,
    accepted_response,
    body_schema,
    owned_model,
    submit_body,
)
from twinkle_server.settings import Limits
from twinkle_server.store.records import Model
from twinkle_server.telemetry.logs import holds_key
from twinkle_server.tinker.provenance import LOSSES, Claim, claims_of, refusal_of

router = APIRouter()
_COPIED, _FEW = 2**20, 64  # bytes and parts: parsing few long arrays copies them, which takes less time than a thread
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
    """The fields of a pass that the log needs.

    Attributes:
        model: id of the model.
        number: sequence number in the queue.
        payload: a serialized `ForwardBackwardRequest`.
        tokens: its cost.
        forward_only: whether to compute no gradients.
        refusal: why the whole pass is refused, if it is.
        claims: claims of its provenance spans, if its loss requires them.
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
    """Compute a loss on rows and accumulate its gradients, except with `forward_only`."""
    return await _submit_pass(request, "forward_backward_input")


@router.post("/forward", openapi_extra=_ENCODINGS)
async def forward(request: Request) -> Response:
    """Compute rows without gradients. Clients before 0.25 send this, as JSON."""
    return await _submit_pass(request, "forward_input")


async def _submit_pass(request: Request, name: str) -> Response:
    caller, state = caller_of(request), app_state_of(request)
    data, protobuf = await request.body(), _is_protobuf(request)
    arguments = (data, None if protobuf else name, state.settings.limits)
    at_once = len(data) <= ON_A_THREAD or (protobuf and len(data) <= _COPIED and has_parts(data, _FEW))
    body = read_pass(*arguments) if at_once else await asyncio.to_thread(read_pass, *arguments)
    return await _submit(state, caller, body, await owned_model(state, caller, body.model))


async def _submit(state: AppState, caller: Caller, body: PassBody, model: Model) -> Response:
    refusal = body.refusal
    if body.claims and not state.settings.strict_losses:  # otherwise the engine refuses the loss itself
        refusal = await refusal_of(state, caller, model.session, body.claims)
    submission = Submission(
        caller.tenant,
        model.id,
        "forward" if body.forward_only else "forward_backward",
        body.payload,
        body.number,
        tokens=body.tokens,
        refusal=refusal,
    )
    return accepted_response(await state.service.submit(submission), model_id=model.id)


def read_pass(data: bytes, name: str | None, limits: Limits) -> PassBody:
    """Parse a body.

    Args:
        data: the body.
        name: name of the field with the input of the pass if the body is JSON; None for protobuf.
        limits: maximum numbers of rows and tokens of a pass.

    Raises:
        BadRequest: it cannot be parsed.
        TooLarge: it has too many parts.
        Unprocessable: model or sequence number are missing or invalid.
    """
    return _from_json(data, name, limits) if name is not None else _from_protobuf(data, limits)


def _from_protobuf(data: bytes, limits: Limits) -> PassBody:
    from twinkle_server.wire.codec import parse_request

    if len(data) > ON_A_THREAD:  # walking the parts of less takes longer than parsing them
        check_parts(data, PARTS * limits.datums)
    try:
        message = parse_request(data)
    except ValueError as error:
        raise BadRequest(f"cannot parse the request body: {error}") from error
    if not message.model_id:
        raise BadRequest("model_id is required in the request body")
    return _measured(message, _check_number(message.seq_id), data, limits)


def _from_json(data: bytes, name: str, limits: Limits) -> PassBody:
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the request body is not valid JSON: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_id"), str) or not fields["model_id"]:
        raise Unprocessable("model_id is required in the request body")
    number = _check_number(fields.get("seq_id"))
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
        refusal = "data must have at least one row"
    elif rows > limits.datums:
        refusal = f"a pass must have at most {limits.datums} rows, got {rows}"
    elif tokens > limits.request_tokens:
        refusal = f"a pass must have at most {limits.request_tokens} tokens, got {tokens}"
    elif holds_key(message.loss_fn):
        refusal = f"loss_fn must be the name of a loss, got {message.loss_fn[:140]!r}, which contains an API key"
    if refusal:
        payload = _mark(payload)
    claims = claims_of(message) if refusal is None and message.loss_fn in LOSSES else ()
    return PassBody(message.model_id, number, payload, tokens, message.forward_only, refusal, claims)


def _check_number(number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number not in _NUMBERS:
        raise Unprocessable(f"seq_id must be an integer of at least 1, got {str(number)[:40]}")
    return number


def _mark(data: bytes) -> bytes:
    """Return the payload of a refused body; its hash identifies a retry."""
    return b"refused:" + hashlib.sha256(data).digest()


def _is_protobuf(request: Request) -> bool:
    return "protobuf" in request.headers.get("content-type", "")


class Adam(Body):
    """The parameters of `OptimStepBody`; the defaults are those of the SDK."""

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


@router.post("/optim_step", openapi_extra=body_schema(OptimStepBody))
async def optim_step(request: Request) -> Response:
    """Update a model with its gradients, and clear them."""
    return await submit_body(request, OptimStepBody, "optim_step", _payload)


async def _payload(_state: AppState, _who: Caller, _model: Model, body: OptimStepBody) -> OptimStep:
    if body.optimizer_params is not None and body.optimizer_params.type != "adamw":
        raise BadRequest(f"unsupported optimizer {body.optimizer_params.type[:100]!r}; use adam_params")
    return optim_step_of(body.adam_params or Adam())


def optim_step_of(adam: Adam) -> OptimStep:
    """Validate the parameters of an optimizer step, and return its payload.

    Raises:
        BadRequest: a value is out of range.
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
