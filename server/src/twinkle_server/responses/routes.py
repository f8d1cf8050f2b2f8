"""The responses of each route: the model of its JSON, of its events, and of the values in its frames."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from twinkle_client import types
from twinkle_server.responses import chat, native, service, tinker
from twinkle_server.responses.base import Empty

Model = type[BaseModel]


@dataclass(frozen=True, slots=True)
class Answers:
    """The responses of a route.

    Attributes:
        json: model of JSON with status 200; None if the route has no such response.
        events: model of the data of each server-sent event.
        frame: model of the value in a frame of the native protocol.
        other: models of JSON with another status.
        done: last event that is not JSON.
    """

    json: Model | None = None
    events: Model | None = None
    frame: Model | None = None
    other: Mapping[str, Model] = field(default_factory=dict)
    done: str | None = None


_PENDING: Final = {"202": native.Pending}
_CALLED: Final = Answers(native.Ended, frame=native.CallResult, other=_PENDING)
_ACCEPTED: Final = Answers(tinker.AcceptedOfModel)
_EMPTY: Final = Answers(Empty)
_RUN: Final = "/api/v1/training_runs/{run}"
_CHECKPOINT: Final = f"{_RUN}/checkpoints/{{kind}}/{{name}}"
CALL: Final = "POST /twinkle/models/{model_id}/"
"""Beginning of the routes of methods of a model, whose responses are `_CALLED` unless they are in `ROUTES`."""
ROUTES: Final[Mapping[str, Answers]] = {
    "POST /api/v1/asample": Answers(tinker.AcceptedSample),
    "GET /api/v1/audit": Answers(tinker.AuditLog),
    "DELETE /api/v1/auth/apikey/me": Answers(),
    "GET /api/v1/auth/apikey/me": Answers(tinker.KeyInfo),
    "POST /api/v1/auth/token": Answers(),
    "GET /api/v1/billing/usage/checkpoints/current": Answers(tinker.CheckpointUsage),
    "GET /api/v1/billing/usage/events": Answers(tinker.UsageEvents),
    "POST /api/v1/cancel_future": _EMPTY,
    "GET /api/v1/checkpoints": Answers(tinker.TinkerCheckpoints),
    "POST /api/v1/client/config": Answers(tinker.ClientConfig),
    "POST /api/v1/client/dynamic_config": Answers(tinker.DynamicConfig),
    "POST /api/v1/copy_weights": Answers(tinker.PathCopied),
    "POST /api/v1/create_custom_loss": Answers(tinker.Accepted),
    "POST /api/v1/create_model": _ACCEPTED,
    "POST /api/v1/create_sampling_session": Answers(tinker.SamplingSession),
    "POST /api/v1/create_session": Answers(tinker.SessionCreated),
    "POST /api/v1/forward": _ACCEPTED,
    "POST /api/v1/forward_backward": _ACCEPTED,
    "POST /api/v1/get_info": Answers(tinker.ModelInfo),
    "GET /api/v1/get_server_capabilities": Answers(tinker.Capabilities),
    "GET /api/v1/healthz": Answers(native.Alive),
    "POST /api/v1/join_sampling_session": Answers(tinker.JoinedSamplingSession),
    "POST /api/v1/load_weights": _ACCEPTED,
    "POST /api/v1/optim_step": _ACCEPTED,
    "POST /api/v1/retrieve_future": Answers(tinker.Retrieved),
    "POST /api/v1/retrieve_futures": Answers(tinker.FinishedRequests),
    "GET /api/v1/samplers/{sampler_id}": Answers(tinker.SamplerInfo),
    "POST /api/v1/save_weights": _ACCEPTED,
    "POST /api/v1/save_weights_external": _ACCEPTED,
    "POST /api/v1/save_weights_for_sampler": _ACCEPTED,
    "POST /api/v1/session_heartbeat": Answers(tinker.HeartbeatNoted),
    "GET /api/v1/sessions": Answers(tinker.SessionIds),
    "POST /api/v1/sessions/search": Answers(tinker.SessionsFound),
    "GET /api/v1/sessions/{session_id}": Answers(tinker.SessionInfo),
    "POST /api/v1/sessions/{session_id}/finish": _EMPTY,
    "PUT /api/v1/sessions/{session_id}/project": _EMPTY,
    "GET /api/v1/sessions/{session_id}/trace_export": Answers(tinker.TracesMissing),
    "POST /api/v1/telemetry": Answers(tinker.TelemetryDropped),
    "GET /api/v1/training_runs": Answers(tinker.TinkerRuns),
    f"GET {_RUN}": Answers(tinker.TinkerRun),
    f"GET {_RUN}/checkpoints": Answers(tinker.TinkerCheckpoints),
    f"DELETE {_CHECKPOINT}": _EMPTY,
    f"GET {_CHECKPOINT}/archive": Answers(other={"302": tinker.Link}),
    f"GET {_CHECKPOINT}/external_weights_urls": Answers(tinker.Links),
    f"DELETE {_CHECKPOINT}/publish": _EMPTY,
    f"POST {_CHECKPOINT}/publish": _EMPTY,
    f"PUT {_CHECKPOINT}/ttl": _EMPTY,
    "POST /api/v1/unload_model": _ACCEPTED,
    "POST /api/v1/weights_info": Answers(tinker.TinkerWeightsInfo),
    "GET /healthz": Answers(native.Alive),
    "GET /readyz": Answers(service.Ready, other={"503": service.Ready}),
    "GET /twinkle/capacity_info": Answers(types.CapacityInfoResponse),
    "GET /twinkle/checkpoint_path/{run_id}/{kind}/{name}": Answers(types.ParsedCheckpointTwinklePath),
    "POST /twinkle/create_session": Answers(native.SessionOf),
    "GET /twinkle/data": Answers(native.DataResources),
    "POST /twinkle/data": Answers(native.DataResource),
    "DELETE /twinkle/data/{resource_id}": _EMPTY,
    "POST /twinkle/data/{resource_id}/call": Answers(frame=native.MethodResult),
    "POST /twinkle/finish_session": Answers(native.SessionOf),
    "GET /twinkle/futures/{request_id}": Answers(native.FutureResult, frame=native.AnyResult, other=_PENDING),
    "POST /twinkle/futures/{request_id}/cancel": Answers(native.RequestOf),
    "GET /twinkle/get_server_capabilities": Answers(types.ServerCapabilities),
    "GET /twinkle/healthz": Answers(native.Alive),
    "DELETE /twinkle/hub/automatic/{run}": Answers(native.AutomaticUpload),
    "GET /twinkle/hub/automatic/{run}": Answers(native.AutomaticUpload),
    "PUT /twinkle/hub/automatic/{run}": Answers(native.AutomaticUpload),
    "GET /twinkle/hub/uploads": Answers(native.HubUploads),
    "POST /twinkle/hub/uploads": Answers(native.HubUpload),
    "DELETE /twinkle/hub/uploads/{upload_id}": Answers(native.HubUpload),
    "GET /twinkle/hub/uploads/{upload_id}": Answers(native.HubUpload),
    "GET /twinkle/merge": Answers(native.MergeJobs),
    "POST /twinkle/merge": Answers(native.MergeJob),
    "GET /twinkle/merge/{job}": Answers(native.MergeStatus),
    "POST /twinkle/models": Answers(native.CreateResult, other=_PENDING),
    "GET /twinkle/models/{model_id}": Answers(native.NativeModel),
    f"{CALL}load": Answers(native.LoadResult, other=_PENDING),
    f"{CALL}save": Answers(native.SaveResult, other=_PENDING),
    f"{CALL}skip": Answers(native.Skipped),
    f"{CALL}unload": Answers(native.UnloadResult, other=_PENDING),
    "GET /twinkle/overview": Answers(service.Overview),
    "POST /twinkle/samplers": Answers(native.SamplerOf),
    "DELETE /twinkle/samplers/{sampler_id}": Answers(native.SamplerOf),
    "POST /twinkle/samplers/{sampler_id}/sample": Answers(
        native.Ended, frame=native.SampleResults, other={"202": native.PendingSamples}
    ),
    "POST /twinkle/samplers/{sampler_id}/stream": Answers(events=native.StreamEvent),
    "POST /twinkle/session_heartbeat": Answers(native.SessionOf),
    "GET /twinkle/status": Answers(service.Status),
    "GET /twinkle/tokenizer": Answers(native.TokenizerFiles),
    "GET /twinkle/training_runs": Answers(native.TrainingRuns),
    "GET /twinkle/training_runs/{run_id}": Answers(types.TrainingRun),
    "GET /twinkle/training_runs/{run_id}/checkpoints": Answers(native.Checkpoints),
    "DELETE /twinkle/training_runs/{run_id}/checkpoints/{kind}/{name}": _EMPTY,
    "POST /twinkle/weights_info": Answers(types.WeightsInfoResponse),
    "POST /v1/chat/completions": Answers(chat.ChatCompletion, chat.ChatEvent, done="[DONE]"),
    "POST /v1/completions": Answers(chat.Completion, chat.CompletionEvent, done="[DONE]"),
    "POST /v1/embeddings": Answers(chat.Embeddings),
    "POST /v1/messages": Answers(chat.AnthropicMessage, chat.MessageEvent),
    "POST /v1/messages/count_tokens": Answers(chat.TokenCount),
    "GET /v1/models": Answers(chat.ListedModels),
    "GET /v1/models/{model}": Answers(chat.DescribedModel),
}
"""The responses of each route, by method and path. Routes that only send files, or texts, are not here."""


def answers_of(route: str) -> Answers | None:
    """Return the responses of a route, such as `GET /healthz`; None if they are not described."""
    return ROUTES.get(route, _CALLED if route.startswith(CALL) else None)


def definitions() -> dict[str, Any]:
    """Return the schemas of all models by name, with those that they consist of."""
    found = [_CALLED, *ROUTES.values()]
    models = {
        model: None
        for answers in found
        for model in (answers.json, answers.events, answers.frame, *answers.other.values())
        if model is not None
    }
    _, schema = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    parts: dict[str, Any] = schema["$defs"]
    if long := [name for name in parts if "__" in name]:
        raise ValueError(f"two models of responses have the same name: {', '.join(long)}")
    return parts


def reference(model: Model) -> dict[str, Any]:
    """Return a reference to the schema of a model."""
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def event_schema(answers: Answers) -> dict[str, Any]:
    """Return the schema of one server-sent event of a stream."""
    if answers.events is None:
        return {"type": "string"}
    data: dict[str, Any] = {
        "type": "string", "contentMediaType": "application/json", "contentSchema": reference(answers.events),
    }  # fmt: skip
    if answers.done is not None:
        data = {"anyOf": [{"const": answers.done}, data]}
    return {
        "type": "object",
        "description": "One server-sent event of the stream.",
        "required": ["data"],
        "properties": {"event": {"type": "string"}, "data": data},
    }
