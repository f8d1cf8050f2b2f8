"""Updates of a model's weights."""

import math

from fastapi import APIRouter, Request, Response

from twinkle_server.errors import BadRequest
from twinkle_server.payloads import OptimStep
from twinkle_server.store.records import Model
from twinkle_server.tinker.app_state import AppState, Caller
from twinkle_server.tinker.bodies import Body, Text, takes
from twinkle_server.tinker.submitting import Numbered, submit_body

router = APIRouter()


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
        raise BadRequest(f"optimizer {body.optimizer_params.type[:100]!r} is not offered here; adam_params are")
    return checked(body.adam_params or Adam())


def checked(adam: Adam) -> OptimStep:
    """Return the payload of an update.

    Raises:
        BadRequest: a value is none that AdamW can have.
    """
    values = adam.model_dump()
    for name, value in values.items():
        if not math.isfinite(value):
            raise BadRequest(f"adam_params.{name} is {value}; a finite number is meant")
    for name in ("beta1", "beta2"):
        if not 0 <= values[name] < 1:
            raise BadRequest(f"adam_params.{name} is {values[name]}; it is at least 0 and less than 1")
    for name in ("learning_rate", "eps", "weight_decay"):
        if values[name] < 0:
            raise BadRequest(f"adam_params.{name} is {values[name]}; it is not negative")
    return OptimStep(**values)
