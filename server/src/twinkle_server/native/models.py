"""Endpoints for models: created, saved, loaded, and every method that trains them."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Literal

import orjson
from fastapi import APIRouter, Request, Response

from twinkle_client import types, wire
from twinkle_server.app_state import AppState, Caller, app_state_of, caller_of, now
from twinkle_server.engine.native.calls import payload_of
from twinkle_server.errors import BadRequest, ServiceError, Unprocessable
from twinkle_server.ids import CheckpointPath, check_name, model_id, new_id
from twinkle_server.native.bodies import RESULT, call_schema, is_frame, operation_response, parse_body, read_body
from twinkle_server.operations import Create, Kind, Load, Save, Submission, Unload
from twinkle_server.requests import LARGE, json_response, owned_model, submit
from twinkle_server.settings import Limits
from twinkle_server.store.records import Checkpoint, Model
from twinkle_server.tinker.models import check_base, submit_create
from twinkle_server.tinker.saves import check_ttl

router = APIRouter()
_INIT: Final[dict[bool | str, Literal["kaiming", "gaussian", "random"]]] = {
    True: "kaiming", False: "random", "gaussian": "gaussian",
}  # fmt: skip
"""Kinds of first weights by PEFT's `init_lora_weights`."""
_NUMBER: Final = {"seq_id": "number of the operation in the queue of its model; identifies a retry"}
METHODS: Final[dict[str, tuple[Kind, type[types.Arguments]]]] = {
    "forward_backward": ("native_pass", types.ForwardBackward),
    "forward_only": ("native_pass", types.ForwardOnly),
    "clip_grad_and_step": ("native_step", types.ClipGradAndStep),
    "forward": ("native", types.Forward),
    "calculate_loss": ("native", types.CalculateLoss),
    "backward": ("native", types.Backward),
    "clip_grad_norm": ("native", types.ClipGradNorm),
    "step": ("native", types.OptimizerStep),
    "zero_grad": ("native", types.ZeroGrad),
    "lr_step": ("native", types.LrStep),
    "set_loss": ("native", types.SetComponent),
    "set_optimizer": ("native", types.SetComponent),
    "set_lr_scheduler": ("native", types.SetComponent),
    "set_template": ("native", types.SetComponent),
    "set_processor": ("native", types.SetComponent),
    "add_metric": ("native", types.AddMetric),
    "apply_patch": ("native", types.SetComponent),
    "calculate_metric": ("native", types.CalculateMetric),
    "get_state_dict": ("native", types.Nothing),
    "get_train_configs": ("native", types.Nothing),
    "get_progress": ("native", types.Nothing),
}
"""The methods of a model: the kind of their operation, and their arguments."""


@router.post("/models", openapi_extra=call_schema(types.CreateModelRequest) | RESULT)
async def create_model(request: Request) -> Response:
    """Create a model with fresh weights, or from a checkpoint, as operation 0 of its queue."""
    caller, state = caller_of(request), app_state_of(request)
    body = await read_body(request, types.CreateModelRequest)
    created: list[Create] = []

    async def payload() -> Create:
        check_base(state, body.base_model)
        create = await _create(state, caller, body)
        if create.rank == 0:
            await state.service.reserve(caller.tenant, model_id(body.session_id, body.model_seq_id))
        created.append(create)
        return create

    accepted = await submit_create(state, caller, body, body.session_id, body.model_seq_id, payload, created)
    return await operation_response(state, caller, accepted)


async def _create(state: AppState, caller: Caller, body: types.CreateModelRequest) -> Create:
    seed = secrets.randbits(48) if body.seed is None else body.seed
    if body.full_parameters:
        _check_full(state, body)
    if body.checkpoint is None:
        if body.full_parameters:
            return Create(0, seed, native=True, accumulation=body.gradient_accumulation_steps)
        return _fresh(body.config or types.AdapterConfig(), seed, body.gradient_accumulation_steps)
    if body.config is not None:
        raise BadRequest("give config or checkpoint, not both: a checkpoint has the configuration of its adapter")
    checkpoint = await _loadable(state, caller, CheckpointPath.parse(body.checkpoint), body.load_optimizer)
    if body.full_parameters != (checkpoint.rank == 0):
        kind = "all parameters" if checkpoint.rank == 0 else f"an adapter of rank {checkpoint.rank}"
        raise BadRequest(f"{body.checkpoint} holds {kind}; set full_parameters accordingly")
    return Create(
        checkpoint.rank, seed, checkpoint.train_attn, checkpoint.train_mlp, checkpoint.train_unembed,
        source=checkpoint.folder, optimizer=body.load_optimizer, path=str(checkpoint.path), native=True,
        accumulation=body.gradient_accumulation_steps,
    )  # fmt: skip


def _check_full(state: AppState, body: types.CreateModelRequest) -> None:
    """Refuse a full-parameter model where the operator does not allow it, or with options of an adapter.

    Raises:
        BadRequest: it is refused.
    """
    if not state.settings.full_parameters:
        raise BadRequest(
            "this service trains adapters only; its operator can allow full-parameter training "
            "(serve --allow-full-parameters)"
        )
    if body.config is not None:
        raise BadRequest("full_parameters trains all weights and has no adapter; leave out config")


def _fresh(config: types.AdapterConfig, seed: int, accumulation: int) -> Create:
    create = Create(
        config.r, seed, alpha=config.lora_alpha, dropout=config.lora_dropout, native=True, accumulation=accumulation,
        rank_pattern=list(config.rank_pattern.items()), alpha_pattern=list(config.alpha_pattern.items()),
        rslora=config.use_rslora, init=_INIT[config.init_lora_weights],
    )  # fmt: skip
    switches = (config.train_attn, config.train_mlp, config.train_unembed)
    if all(switch is None for switch in switches):
        target = config.target_modules
        create.targets = ["all-linear"] if target == "all-linear" else target or []
        create.exclude = config.exclude_modules
        return create
    if config.target_modules is not None or config.exclude_modules is not None:
        raise BadRequest(
            "give target_modules and exclude_modules, or train_attn, train_mlp and train_unembed, not both"
        )
    create.train_attn, create.train_mlp, create.train_unembed = (switch is not False for switch in switches)
    if not (create.train_attn or create.train_mlp or create.train_unembed):
        raise BadRequest("at least one of train_attn, train_mlp and train_unembed must be true")
    return create


async def _loadable(state: AppState, caller: Caller, path: CheckpointPath, optimizer: bool) -> Checkpoint:
    """Return a checkpoint from which a model can be trained.

    Raises:
        NotFound: the caller may not load a checkpoint of this path.
        BadRequest: it is of another base model, or lacks the optimizer.
    """
    checkpoint = await state.store.checkpoints.find(caller.tenant, path, now())
    check_base(state, checkpoint.base)
    if path.kind != "weights":
        raise BadRequest(f"cannot train from {path}, a checkpoint for sampling; save one without is_sampler=True")
    if optimizer and not checkpoint.has_optimizer:
        raise BadRequest(f"{path} does not contain the optimizer; save it with save_optimizer=True")
    return checkpoint


@router.get("/models/{model_id}")
async def model_info(request: Request) -> Response:
    """Describe a model."""
    caller, state = caller_of(request), app_state_of(request)
    model = await state.store.models.get(caller.tenant, request.path_params["model_id"])
    return json_response(
        {
            "model_id": model.id, "session_id": model.session, "base_model": model.base, "lora_rank": model.rank,
            "status": model.status,
        }
    )  # fmt: skip


@router.post("/models/{model_id}/unload", openapi_extra=call_schema(types.Nothing, _NUMBER) | RESULT)
async def unload(request: Request) -> Response:
    """Unload a model, and zero its weights."""

    async def payload(state: AppState, caller: Caller, model: Model, body: types.Nothing) -> Unload:
        return Unload()

    response = await _submit_json(request, types.Nothing, "unload", payload)
    app_state_of(request).models.forget()
    return response


@router.post("/models/{model_id}/save", openapi_extra=call_schema(types.SaveRequest, _NUMBER) | RESULT)
async def save(request: Request) -> Response:
    """Save a checkpoint for training or for sampling."""

    async def payload(state: AppState, caller: Caller, model: Model, body: types.SaveRequest) -> Save:
        kind = "sampler_weights" if body.is_sampler else "weights"
        if body.is_sampler and body.save_optimizer:
            raise BadRequest("save_optimizer has no effect with is_sampler=True; leave one of them out")
        return Save(
            f"checkpoints/{new_id()}", kind, check_name(body.name), body.overwrite, check_ttl(body.ttl_seconds),
            body.user_metadata, native=not body.is_sampler, optimizer=body.save_optimizer,
            consumed=body.consumed_train_samples,
        )  # fmt: skip

    return await _submit_json(request, types.SaveRequest, "save", payload)


@router.post("/models/{model_id}/load", openapi_extra=call_schema(types.LoadRequest, _NUMBER) | RESULT)
async def load(request: Request) -> Response:
    """Load the weights of a checkpoint into a model, and its optimizer and counters where asked; return these."""

    async def payload(state: AppState, caller: Caller, model: Model, body: types.LoadRequest) -> Load:
        checkpoint = await _loadable(state, caller, _named(model, body.path), body.load_optimizer)
        if checkpoint.rank != model.rank:
            raise BadRequest(
                f"cannot load {body.path} (rank {checkpoint.rank}) into a model of rank {model.rank}; create a new "
                "model from the checkpoint"
            )
        return Load(checkpoint.folder, str(checkpoint.path), body.load_optimizer, native=True)

    return await _submit_json(request, types.LoadRequest, "load", payload)


def _named(model: Model, path: str) -> CheckpointPath:
    """Return the path of a checkpoint that is given by its path, or by its name in the model."""
    if "://" in path:
        return CheckpointPath.parse(path)
    return CheckpointPath(model.id, "weights", check_name(path))


def _method(name: str) -> Callable[[Request], Awaitable[Response]]:
    kind, form = METHODS[name]

    async def call(request: Request) -> Response:
        caller, state, number = caller_of(request), app_state_of(request), _number_of(request)
        model = await owned_model(state, caller, request.path_params["model_id"])
        data = await request.body()
        arguments = (data, is_frame(request), name, form, state.settings.limits)
        read = _read_call(*arguments) if len(data) <= LARGE else await asyncio.to_thread(_read_call, *arguments)
        payload, tokens, refusal = read
        accepted = await state.service.submit(
            Submission(caller.tenant, model.id, kind, payload, number, tokens=tokens, refusal=refusal)
        )
        return await operation_response(state, caller, accepted, len(data))

    call.__name__ = name
    call.__doc__ = f"Call `{name}` of a model; see `twinkle.model.TwinkleModel.{name}`."
    return call


for _name, (_kind, _form) in METHODS.items():
    router.add_api_route(
        f"/models/{{model_id}}/{_name}",
        _method(_name),
        methods=["POST"],
        openapi_extra=call_schema(_form, _NUMBER) | RESULT,
    )


def _read_call(
    data: bytes, frame: bool, name: str, form: type[types.Arguments], limits: Limits
) -> tuple[bytes, int, str | None]:
    """Return the payload of a call, its cost in tokens, and why it is refused, if it is.

    A refused call uses up its number, so that later calls of the model can run.
    """
    try:
        body = parse_body(data, form, frame=frame, lists=False)
        tokens = _tokens(getattr(body, "inputs", ()), limits)
        payload = payload_of(name, data if frame else wire.pack(orjson.loads(data or b"{}")))
    except ServiceError as error:
        return payload_of(name, data), 0, error.message
    return payload, tokens, None


def _tokens(inputs: Any, limits: Limits) -> int:
    """Return the number of tokens of rows; of conversations, an upper bound from their size.

    Raises:
        BadRequest: there are too many.
    """
    rows: Sequence[Any] = inputs if isinstance(inputs, list | tuple) else [inputs]
    if len(rows) > limits.datums:
        raise BadRequest(f"a call must have at most {limits.datums} rows, got {len(rows)}")
    tokens = sum(_length(row) for row in rows)
    if tokens > limits.request_tokens:
        raise BadRequest(f"a call must have at most {limits.request_tokens} tokens, got {tokens}")
    return tokens


def _length(row: Any) -> int:
    ids = row.get("input_ids") if isinstance(row, dict) else None
    if ids is not None:
        return len(ids) if hasattr(ids, "__len__") else 1
    return len(orjson.dumps(row, default=str)) // 4


def _number_of(request: Request) -> int:
    """Return the sequence number in the query.

    Raises:
        Unprocessable: it is missing or invalid.
    """
    text = request.query_params.get("seq_id", "")
    if not text.isascii() or not text.isdecimal() or not 1 <= len(text) <= 18 or int(text) < 1:
        raise Unprocessable(f"seq_id must be an integer of at least 1 in the query, got {text[:40]!r}")
    return int(text)


async def _submit_json(request: Request, form: Any, kind: Kind, make: Callable[..., Awaitable[Any]]) -> Response:
    """Submit an operation whose payload the service makes; its permanent errors fail the operation."""
    caller, state, number = caller_of(request), app_state_of(request), _number_of(request)
    model = await owned_model(state, caller, request.path_params["model_id"])
    try:
        body = await read_body(request, form)
    except (BadRequest, Unprocessable) as error:
        refused = Submission(
            caller.tenant, model.id, kind, b"{}", number, refusal=error.message, original=await request.body()
        )
        accepted = await state.service.submit(refused)
    else:
        accepted = await submit(state, caller, model.id, number, kind, body, lambda: make(state, caller, model, body))
    return await operation_response(state, caller, accepted)


@router.post("/models/{model_id}/skip", openapi_extra=call_schema(types.Nothing, _NUMBER))
async def skip(request: Request) -> Response:
    """Use up a number whose request could not be sent, so that later calls run; 409 if the number has a request."""
    caller, state, number = caller_of(request), app_state_of(request), _number_of(request)
    model = await owned_model(state, caller, request.path_params["model_id"])
    skipped = Submission(caller.tenant, model.id, "native", b"skip\n", number, refusal="the client skipped this number")
    await state.service.submit(skipped)
    return json_response({"skipped": number})
