"""Responses of the Tinker protocol, `/api/v1`."""

from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from twinkle_server.responses.base import Answer, Plain, Time

LogProbs = list[list[tuple[int, float]] | None]


class Accepted(Answer):
    """An operation that was accepted; `retrieve_future` returns its result."""

    request_id: str


class AcceptedOfModel(Accepted):
    """An operation of a model."""

    model_id: str


class AcceptedSample(Accepted):
    """A sampling request, and ids of its sequences."""

    sample_sequence_ids: list[str]


class TryAgain(Answer):
    """An operation that is pending."""

    type: Literal["try_again"]
    request_id: str
    queue_state: Literal["active", "paused_capacity"]
    queue_state_reason: str | None = None


class FailedFuture(Answer):
    """An operation that has failed or was cancelled."""

    error: str
    category: Literal["user", "server", "unknown"]


class Created(Answer):
    """A new model."""

    type: Literal["create_model"]
    model_id: str


class Loaded(Answer):
    """A checkpoint that was loaded; the counters are those of a native model."""

    type: Literal["load_weights"]
    model_id: str
    path: str
    cur_step: int | None = None
    consumed_train_samples: int | None = None
    gradient_accumulation_steps: int | None = None


class Saved(Answer):
    """A checkpoint that was saved; it has no path if only a sampling session uses it."""

    type: Literal["save_weights", "save_weights_for_sampler"]
    path: str | None = None
    sampling_session_id: str | None = None


class SavedExternal(Answer):
    """An exported checkpoint."""

    type: Literal["save_weights_external"]
    path: str
    size_bytes: int


class Unloaded(Answer):
    """A model that was unloaded."""

    type: Literal["unload_model"]
    model_id: str


class Stepped(Answer):
    """The metrics of an optimizer step; those that are not finite are missing."""

    metrics: dict[str, float]


class Tensor(Answer):
    """An array."""

    data: list[float]
    dtype: Literal["float32", "int64"]
    shape: list[int]


class PassResult(Answer):
    """The result of a pass, for clients that read JSON only."""

    loss_fn_output_type: str
    loss_fn_outputs: list[dict[str, Tensor]]
    metrics: dict[str, float]


class SampledSequence(Answer):
    """A sampled sequence."""

    stop_reason: Literal["stop", "length"]
    tokens: list[int]
    logprobs: list[float]
    topk_logprobs: LogProbs | None = None


class SampleResult(Answer):
    """The result of a sampling request, for clients that read JSON only."""

    type: Literal["sample"]
    sequences: list[SampledSequence]
    prompt_cache_hit_tokens: int
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: LogProbs | None = None


class CustomLoss(Answer):
    """A custom loss that is ready."""

    type: Literal["create_custom_loss"]
    loss_id: str


class Retrieved(
    RootModel[
        TryAgain | FailedFuture | Created | Loaded | Saved | SavedExternal | Unloaded | Stepped | PassResult
        | SampleResult | CustomLoss
    ]
):  # fmt: skip
    """The state of an operation, or its result."""


class FinishedRequest(Answer):
    """A finished request of a sampling session."""

    state: Literal["finished", "failed"]
    request_id: str


class FinishedRequests(Answer):
    """Finished requests, and the cursor for later ones."""

    completions: list[FinishedRequest]
    cursor: int


class SamplingSession(Answer):
    """A new sampling session."""

    type: Literal["create_sampling_session"]
    sampling_session_id: str


class JoinedSamplingSession(Answer):
    """The number of another client of a sampling session."""

    type: Literal["join_sampling_session"]
    client_counter: int


class SamplerInfo(Answer):
    """A sampling session; `model_path` is missing for the base model."""

    sampler_id: str
    base_model: str
    model_path: str | None = None


class SessionCreated(Answer):
    """A new session."""

    type: Literal["create_session"]
    session_id: str


class HeartbeatNoted(Answer):
    """A heartbeat that was noted."""

    type: Literal["session_heartbeat"]


class SessionIds(Answer):
    """Ids of sessions."""

    sessions: list[str]


class SessionInfo(Answer):
    """A session."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class FinishReason(Answer):
    """Why a session ended."""

    type: str


class SessionStatus(Answer):
    """Whether a session is active."""

    type: Literal["active", "client_finished"]
    reason: FinishReason | None = None
    detail: str | None = None


class SessionSummary(Answer):
    """A session that was found; one that expired has no status."""

    session_id: str
    created_at: Time
    owner: str
    project_id: str
    status: SessionStatus | None = None
    checkpoints_count: int
    checkpoint_storage_bytes: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None


class SessionCursor(Answer):
    """Where the next page begins."""

    last_created_at: Time
    last_session_id: str


class SessionsFound(Answer):
    """A page of sessions."""

    sessions: list[SessionSummary]
    next_cursor: SessionCursor | None = None


class TracesMissing(Answer):
    """The service has no traces of sessions."""

    status: Literal["failed"]
    error: str


class OptimizerConfig(Answer):
    """The optimizer of a model."""

    type: Literal["adamw"]


class ModelData(Answer):
    """The base model of a model."""

    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


class ModelInfo(Answer):
    """A model."""

    type: Literal["get_info"]
    model_id: str
    model_data: ModelData
    optimizer_config: OptimizerConfig
    is_lora: bool
    lora_rank: int
    model_name: str


class ServedModel(Answer):
    """A served model; its context is known when the engine is ready."""

    model_name: str
    trainable: bool
    sampleable: bool
    max_context_length: int | None = None


class Capabilities(Answer):
    """The served models."""

    supported_models: list[ServedModel]


class ClientConfig(Answer):
    """The configuration of a client."""

    proto_compress_fwdbwd: bool
    fwdbwd_max_chunk_len: int
    custom_loss_server_side: bool
    sample_use_retrieve_futures: bool
    sample_join_sampling_session: bool


class DynamicConfig(Answer):
    """The configuration that a client requests again and again."""

    refresh_interval_sec: int
    sample_cancel_enabled: bool
    sample_cancel_max_batch_size: int


class TelemetryDropped(Answer):
    """Telemetry that was accepted and dropped."""

    status: Literal["accepted"]


class PathCopied(Answer):
    """The path of a copy."""

    tinker_path: str


class TinkerCheckpoint(Answer):
    """A checkpoint."""

    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler", "external"]
    time: Time
    tinker_path: str
    size_bytes: int
    public: bool
    user_metadata: dict[str, str] | None = None
    expires_at: Time | None = None


class Place(Answer):
    """The place of a page in its list."""

    offset: int
    limit: int
    total_count: int


class TinkerCheckpoints(Answer):
    """A page of checkpoints."""

    checkpoints: list[TinkerCheckpoint]
    cursor: Place


class TinkerRun(Answer):
    """A training run, with its newest checkpoints."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    corrupted: bool
    lora_rank: int
    last_request_time: Time
    last_checkpoint: TinkerCheckpoint | None = None
    last_sampler_checkpoint: TinkerCheckpoint | None = None
    user_metadata: dict[str, str] | None = None


class TinkerRuns(Answer):
    """A page of training runs."""

    training_runs: list[TinkerRun]
    cursor: Place


class Links(Answer):
    """Signed links by file."""

    urls: dict[str, str]
    expires: Time


class Link(Answer):
    """A signed link; the header `Location` has it, too."""

    url: str
    expires: Time


class TinkerWeightsInfo(Answer):
    """What a model must be to load a checkpoint."""

    base_model: str
    optimizer_config: OptimizerConfig
    is_lora: bool
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool


class AuditRecord(Answer):
    """An entry of the audit log."""

    timestamp: Time
    event: str
    event_details: Plain


class AuditLog(Answer):
    """Entries of the audit log, newest first."""

    entries: list[AuditRecord]


class UsageInfo(Answer):
    """Tokens of a kind."""

    type: Literal["training", "sampling_prefill", "sampling_sample"]
    token_count: int
    cached: bool | None = None


class UsageEvent(Answer):
    """The usage of a day."""

    bucket_start: Time
    bucket_end: Time
    base_model: str
    event_info: UsageInfo


class UsageEvents(Answer):
    """Usage by day."""

    data: list[UsageEvent]
    sessions: Annotated[dict[str, Any], Field(max_length=0)]


class CheckpointUse(Answer):
    """Number and size of checkpoints."""

    project_id: str | None = None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float


class CheckpointUsage(Answer):
    """The present usage by checkpoints."""

    data: list[CheckpointUse]


class KeyInfo(Answer):
    """The identity of a key."""

    id: str
    tenant: str
    role: Literal["user", "operator"]
