"""Responses of the native protocol, `/twinkle`; those that its client also has are in `twinkle_client.types`."""

from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from twinkle_client import types
from twinkle_server.responses.base import Answer
from twinkle_server.responses.tinker import Created, Loaded, Saved, SavedExternal, Stepped, Unloaded


class Pending(Answer):
    """An operation that has not ended."""

    status: Literal["pending"]
    request_id: str
    queue_state: Literal["active", "paused_capacity"]
    reason: str | None = None


class PendingSamples(Answer):
    """A sampling request with prompts that have not ended; the same request again waits for them."""

    status: Literal["pending"]
    queue_state: Literal["active", "paused_capacity"]
    done: int
    total: int
    reason: str | None = None


class Ended(Answer):
    """An operation that has failed or was cancelled."""

    status: Literal["failed", "cancelled"]
    error: str
    category: Literal["user", "server", "unknown"]


class CreatedValue(Answer):
    """The model, in the form of its Tinker result."""

    value: Created | Loaded


class SavedValue(Answer):
    """The checkpoint."""

    value: Saved | SavedExternal


class LoadedValue(Answer):
    """The checkpoint, and the counters of the model."""

    value: Loaded


class UnloadedValue(Answer):
    """The model."""

    value: Unloaded


class JsonValue(Answer):
    """The result of an operation."""

    value: Created | Loaded | Saved | SavedExternal | Unloaded | Stepped


class CreateResult(RootModel[CreatedValue | Ended]):
    """A new model."""


class SaveResult(RootModel[SavedValue | Ended]):
    """A checkpoint that was saved."""


class LoadResult(RootModel[LoadedValue | Ended]):
    """A checkpoint that was loaded, and the counters of its model."""


class UnloadResult(RootModel[UnloadedValue | Ended]):
    """A model that was unloaded."""


class FutureResult(RootModel[JsonValue | Ended]):
    """The result of an operation, if it is JSON."""


class CallError(Answer):
    """An error that the call has in a local program, too."""

    type: str
    message: str


class CallValue(Answer):
    """What a call returns."""

    value: Any


class CallFailure(Answer):
    """What a call raises."""

    error: CallError


class CallResult(RootModel[CallValue | CallFailure]):
    """What a method of a model returns, or the error that it raises."""


class SampleResults(Answer):
    """One response for each prompt."""

    value: list[types.SampleResponseModel]


class AnyResult(RootModel[CallValue | CallFailure]):
    """The result of a call, or of a pass or a sampling request of another protocol."""


class RequestOf(Answer):
    """A request."""

    request_id: str


class SessionOf(Answer):
    """A session."""

    session_id: str


class SamplerOf(Answer):
    """A sampling session."""

    sampler_id: str


class Skipped(Answer):
    """A number that was used up."""

    skipped: int


class Alive(Answer):
    """The service answers."""

    status: Literal["ok"]


class NativeModel(Answer):
    """A model; one that trains all parameters has the rank 0."""

    model_id: str
    session_id: str
    base_model: str
    lora_rank: int
    status: Literal["creating", "live", "detached", "corrupted", "gone"]


class TrainingRuns(Answer):
    """A page of training runs, newest first."""

    training_runs: list[types.TrainingRun]
    cursor: types.Cursor


class Checkpoints(Answer):
    """A page of checkpoints, newest first."""

    checkpoints: list[types.Checkpoint]
    cursor: types.Cursor


class DataResource(Answer):
    """A data resource; `calls` is the number of calls so far."""

    resource_id: str
    session_id: str
    kind: str
    name: str
    calls: int


class DataResources(Answer):
    """Data resources."""

    resources: list[DataResource]


class MethodResult(RootModel[Any]):
    """What a method of a data resource returns."""


class HubUpload(Answer):
    """An upload to a hub."""

    request_id: str
    status: Literal["queued", "running", "succeeded", "failed", "cancelled"]
    checkpoint_path: str
    hub_model_id: str
    private: bool
    files: int
    bytes: int
    attempts: int
    url: str | None = None
    error: str | None = None
    changed: str


class HubUploads(Answer):
    """Uploads, oldest first."""

    uploads: list[HubUpload]


class AutomaticUpload(Answer):
    """Where the checkpoints of a run are uploaded; null if they are not."""

    hub_model_id: str | None
    private: bool


class MergeJob(Answer):
    """A merge of a checkpoint into the base model."""

    id: str
    source: str
    path: str
    status: Literal["waiting", "running", "done", "failed"]
    done_bytes: int
    total_bytes: int
    error: str | None


class MergeStatus(MergeJob):
    """A merge; once it is done, with signed links to the files."""

    urls: dict[str, str] | None = None
    urls_expire: float | None = None
    size_bytes: int | None = None


class MergeJobs(Answer):
    """Merges, newest first."""

    merges: list[MergeJob]


class TokenizerEntry(Answer):
    """A file of the tokenizer."""

    size: int
    sha256: Annotated[str, Field(min_length=64, max_length=64)]
    url: str


class TokenizerFiles(Answer):
    """The tokenizer of the served model."""

    model_name: str
    tokenizer_id: str | None
    files: dict[str, TokenizerEntry]


class StreamUsage(Answer):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int


class StreamEnd(Answer):
    """The last event of a stream."""

    end: StreamUsage


class StreamError(Answer):
    """Why a stream cannot go on."""

    error: str
    status: int


class StreamEvent(RootModel[types.SampleDelta | StreamEnd | StreamError]):
    """An event of a stream of sampled tokens."""
