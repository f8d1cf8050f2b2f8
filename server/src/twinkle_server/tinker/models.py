"""Endpoints for models: created, described, loaded from a checkpoint, unloaded."""

import secrets
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Request, Response
from pydantic import Field

from twinkle_client.types.models import LayerPatterns
from twinkle_server.app_state import AppState, Caller, app_state_of, caller_of, now
from twinkle_server.errors import BadRequest, Gone, NotFound, SequenceConflict
from twinkle_server.ids import CheckpointPath, model_id
from twinkle_server.operations import Accepted, Create, Load, Submission, Unload
from twinkle_server.requests import (
    Body,
    Id,
    Metadata,
    Number,
    Numbered,
    Seed,
    Text,
    accepted_response,
    body_schema,
    json_response,
    owned_model,
    read,
    submit,
    submit_body,
)
from twinkle_server.store import models
from twinkle_server.store.records import Checkpoint, Model
from twinkle_server.telemetry.health import is_local
from twinkle_server.tinker.layer_patterns import read_layer_patterns, refuse_layer_patterns

router = APIRouter()
_RANKS = 1024


class Lora(Body):
    """The LoRA options of `CreateModel`."""

    rank: int = 32
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Body):
    """The optimizer of `CreateModel` and `LoadNew`."""

    type: Text = "adamw"


class CreateModel(Body):
    """See `create_model`."""

    session_id: Id
    model_seq_id: Number
    base_model: Annotated[str, Field(max_length=4096)]
    user_metadata: Metadata | None = None
    lora_config: Lora | None = None
    optimizer_config: Optimizer = Optimizer()


class GetInfo(Body):
    """See `get_info`."""

    model_id: Text


class _Source(Body):
    path: Text
    optimizer: bool = False
    base_model: Text | None = None
    weights_access_token: Text | None = Field(default=None, exclude=True, repr=False)


class LoadNew(_Source):
    """See `load_weights`."""

    session_id: Id
    model_seq_id: Number
    user_metadata: Metadata | None = None
    optimizer_config: Optimizer | None = None


class LoadInto(_Source, Numbered):
    """See `load_weights`."""


class CreateRequest(Protocol):
    """A request for a new model: a pydantic model with metadata."""

    @property
    def user_metadata(self) -> dict[str, str] | None:
        """Kept with the training run."""

    def model_dump_json(self) -> str:
        """Return the content, which identifies a retry."""


class _Addressed(Body):
    model_id: Text | None = None


class UnloadModel(Body):
    """See `unload_model`."""

    model_id: Text


@router.post("/create_model", openapi_extra=body_schema(CreateModel))
async def create_model(request: Request) -> Response:
    """Create a model with fresh weights, as operation 0 of its queue."""
    caller, state = caller_of(request), app_state_of(request)
    body = await read(request, CreateModel)
    lora = body.lora_config
    created: list[Create] = []

    async def payload() -> Create:
        if lora is None:
            raise BadRequest("lora_config is required: this service only trains LoRA adapters")
        check_base(state, body.base_model)
        check_optimizer(body.optimizer_config)
        created.append(_fresh(lora, read_layer_patterns(body.user_metadata)))
        return created[0]

    accepted = await submit_create(state, caller, body, body.session_id, body.model_seq_id, payload, created)
    return accepted_response(accepted, model_id=model_id(body.session_id, body.model_seq_id))


@router.post("/get_info", openapi_extra=body_schema(GetInfo))
async def get_info(request: Request) -> Response:
    """Describe a model."""
    caller, state = caller_of(request), app_state_of(request)
    body = await read(request, GetInfo)
    model = await state.store.models.get(caller.tenant, body.model_id)
    info = state.service.info
    data = {"arch": info.architecture, "model_name": model.base, "tokenizer_id": tokenizer_of(state, request)}
    return json_response(
        {
            "type": "get_info",
            "model_id": model.id,
            "model_data": {name: value for name, value in data.items() if value},
            "optimizer_config": {"type": "adamw"},
            "is_lora": not model.full,
            "lora_rank": model.rank,
            "model_name": model.base,
        }
    )


@router.post("/load_weights", openapi_extra=body_schema(LoadNew))
async def load_weights(request: Request) -> Response:
    """Load a checkpoint into an existing model, or into a new one as its operation 0."""
    caller, state = caller_of(request), app_state_of(request)
    if (await read(request, _Addressed)).model_id is not None:
        return await submit_body(request, LoadInto, "load", _load)
    body = await read(request, LoadNew)
    created: list[Create] = []

    async def payload() -> Create:
        if body.optimizer_config is not None:
            check_optimizer(body.optimizer_config)
        refuse_layer_patterns(body.user_metadata)
        checkpoint = await loadable(state, caller, body)
        created.append(_from_checkpoint(checkpoint, body))
        return created[0]

    accepted = await submit_create(state, caller, body, body.session_id, body.model_seq_id, payload, created)
    return accepted_response(accepted, model_id=model_id(body.session_id, body.model_seq_id))


@router.post("/unload_model", openapi_extra=body_schema(UnloadModel))
async def unload_model(request: Request) -> Response:
    """Unload a model and zero its weights. Clients before 0.26 send this, without a sequence number."""
    caller, state = caller_of(request), app_state_of(request)
    body = await read(request, UnloadModel)
    model = await owned_model(state, caller, body.model_id)
    accepted = await state.service.submit_next(Submission(caller.tenant, model.id, "unload", Unload().dump(), None))
    state.models.forget()
    return accepted_response(accepted, model_id=model.id)


def tokenizer_of(state: AppState, request: Request) -> str | None:
    """Return where the sender of a request loads the tokenizer; None if the model has none.

    A folder of this machine is only named to the operator on this machine. Others get the last part of the model's
    name: `GET /twinkle/tokenizer` has the files, and the SDK finds them in a folder of that name.
    """
    folder, public = state.service.info.tokenizer, state.settings.tokenizer
    if public or not folder:
        return public
    if caller_of(request).role == "operator" and is_local(request.scope):
        return folder
    return state.service.info.name.rstrip("/").rpartition("/")[2]


def check_free(connection: Any, tenant: str, run: str) -> None:
    """Check within a transaction that a run id is unused.

    Raises:
        SequenceConflict: it is used.
    """
    try:
        models.get(connection, tenant, run)
    except NotFound:
        return
    raise SequenceConflict(f"run {run!r} already exists; increment model_seq_id")


def check_base(state: AppState, name: str | None) -> None:
    """Check that a base model is the served one.

    Raises:
        BadRequest: it is another; the message names the served model.
    """
    if name is not None and name not in state.bases:  # scripts may still contain a folder
        raise BadRequest(f"base_model must be {state.service.info.name!r}, the served model, got {name[:300]!r}")


def check_optimizer(optimizer: Optimizer) -> None:
    """Check that an optimizer is supported.

    Raises:
        BadRequest: it is not.
    """
    if optimizer.type != "adamw":
        raise BadRequest(f"optimizer must be 'adamw', got {optimizer.type[:100]!r}")


async def loadable(state: AppState, caller: Caller, body: _Source) -> Checkpoint:
    """Return the checkpoint to load into a model.

    Raises:
        NotFound: the caller may not load a checkpoint of this path.
        BadRequest: it is not for training, or lacks the optimizer state that the request needs.
    """
    if body.weights_access_token is not None:
        raise BadRequest("weights_access_token is not supported; publish the checkpoint to allow others to load it")
    path = CheckpointPath.parse(body.path)
    if path.kind != "weights":
        raise BadRequest(
            f"cannot train from the sampler checkpoint {path}; use one of save_state: tinker://<run>/weights/<name>"
        )
    check_base(state, body.base_model)
    checkpoint = await state.store.checkpoints.find(caller.tenant, path, now())
    check_base(state, checkpoint.base)
    if body.optimizer and not checkpoint.has_optimizer:
        raise BadRequest(f"{path} does not contain the optimizer state; load it with optimizer=False")
    return checkpoint


async def _load(state: AppState, caller: Caller, model: Model, body: LoadInto) -> Load:
    checkpoint = await loadable(state, caller, body)
    shape = (checkpoint.rank, checkpoint.train_attn, checkpoint.train_mlp, checkpoint.train_unembed)
    if shape != (model.rank, model.train_attn, model.train_mlp, model.train_unembed):
        raise BadRequest(
            f"cannot load {body.path} (rank {checkpoint.rank}) into model {model.id!r} (rank {model.rank}): the ranks "
            "or the trained layers differ; create a new model from the checkpoint"
        )
    return Load(checkpoint.folder, str(checkpoint.path), body.optimizer)


async def submit_create(
    state: AppState,
    caller: Caller,
    body: CreateRequest,
    session: str,
    number: int,
    payload: Callable[[], Awaitable[Create]],
    created: list[Create],
) -> Accepted:
    """Submit operation 0 of a queue; the model's row is added in the same transaction if the payload is valid.

    Args:
        state: of the application.
        caller: the caller.
        body: the request.
        session: of the caller.
        number: of the model in the session.
        payload: creates the payload.
        created: where `payload` puts what it has created.

    Raises:
        NotFound: the caller has no such session.
        Gone: the session has ended.
    """
    queue_id, begun = model_id(session, number), now()
    owner = await state.store.sessions.get(caller.tenant, session)
    if owner.status != "active":
        raise Gone(f"session {session!r} has {owner.status}; create a new one")

    def in_transaction(connection: Any) -> None:
        create = created[0]
        model = Model(
            queue_id,
            caller.tenant,
            session,
            number,
            state.service.info.name,
            create.rank,
            begun,
            begun,
            seed=create.seed,
            train_attn=create.train_attn,
            train_mlp=create.train_mlp,
            train_unembed=create.train_unembed,
            metadata=body.user_metadata,
            project=owner.project,
        )
        check_free(connection, caller.tenant, queue_id)
        models.add(connection, model)

    return await submit(state, caller, queue_id, 0, "create", body, payload, in_transaction)


def _fresh(lora: Lora, patterns: LayerPatterns) -> Create:
    if not 1 <= lora.rank <= _RANKS:
        raise BadRequest(f"rank must be between 1 and {_RANKS}, got {lora.rank}")
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        raise BadRequest("at least one of train_attn, train_mlp and train_unembed must be true")
    seed = secrets.randbits(48) if lora.seed is None else lora.seed
    return Create(
        lora.rank, seed, lora.train_attn, lora.train_mlp, lora.train_unembed,
        rank_pattern=list(patterns.rank_pattern.items()), alpha_pattern=list(patterns.alpha_pattern.items()),
    )  # fmt: skip


def _from_checkpoint(checkpoint: Checkpoint, body: _Source) -> Create:
    return Create(
        checkpoint.rank,
        secrets.randbits(48),
        checkpoint.train_attn,
        checkpoint.train_mlp,
        checkpoint.train_unembed,
        source=checkpoint.folder,
        optimizer=body.optimizer,
        path=str(checkpoint.path),
    )
