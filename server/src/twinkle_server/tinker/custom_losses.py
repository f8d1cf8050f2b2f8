"""Losses that clients bring along as graphs: a loss's id is the graph itself, so that nothing is kept here."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from twinkle_server.errors import BadRequest
from twinkle_server.tinker.answers import answer
from twinkle_server.tinker.app_state import app_state_of, caller
from twinkle_server.tinker.bodies import Body, Id, Number, Text, read, takes
from twinkle_server.wire.loss_graphs import MOST_BYTES, PREFIX, loss_id, read_graph, read_loss_id

router = APIRouter()
MOST_WIRE_BYTES = 16 * MOST_BYTES
"""Of a request that brings a graph, which says the same in more words than an id does."""


class Graph(Body):
    """Of `CreateCustomLoss`."""

    format: Literal[1] = 1
    nodes: list[dict[str, Any]]


class CreateCustomLoss(Body):
    """See `create_custom_loss`."""

    session_id: Id
    custom_loss_seq_id: Number
    name: Text = ""
    inputs: Annotated[list[dict[str, Any]], Field(default_factory=list)]
    graph: Graph


@router.post("/create_custom_loss", openapi_extra=takes(CreateCustomLoss))
async def create_custom_loss(request: Request) -> Response:
    """Check a loss, and return the id by which passes name it; its future is its id, and is over."""
    who, state = caller(request), app_state_of(request)
    body = await read(request, CreateCustomLoss)
    if not state.settings.custom_losses:
        raise BadRequest(
            "custom losses are disabled on this service (enable them with --custom-losses); use "
            "forward_backward_custom, which computes the loss in the client, or the name of a loss plugin that is "
            "installed on the service"
        )
    if (size := len(await request.body())) > MOST_WIRE_BYTES:
        raise BadRequest(f"the body of a custom loss must have at most {MOST_WIRE_BYTES} bytes, got {size}")
    await state.store.sessions.get(who.tenant, body.session_id)
    try:
        made = loss_id(read_graph(body.inputs, body.graph.nodes))
    except ValueError as error:
        raise BadRequest(f"custom loss {body.name[:80]!r}: {error}") from error
    return answer({"request_id": made})


def custom_loss_answer(request_id: str) -> Response | None:
    """Return the answer to who asks for the future of a custom loss; None if it is another future."""
    if not request_id.startswith(PREFIX):
        return None
    try:
        read_loss_id(request_id)
    except ValueError:
        return None
    return answer({"loss_id": request_id, "type": "create_custom_loss"})
