"""Training runs and their checkpoints."""

from typing import Annotated

from pydantic import Field

from twinkle_client.types.base import Metadata, Number, Request, Response, Text


class Checkpoint(Response):
    """A checkpoint of a training run.

    Attributes:
        checkpoint_id: `weights/<name>` or `sampler_weights/<name>`.
        checkpoint_type: "training", "sampler" or "external".
        twinkle_path: the path by which it is loaded; its `tinker://` path names the same checkpoint.
    """

    checkpoint_id: str
    checkpoint_type: str
    time: str
    size_bytes: int = 0
    public: bool = False
    twinkle_path: str
    base_model: str | None = None
    is_lora: bool = True
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None
    has_optimizer: bool | None = None
    user_metadata: dict[str, str] | None = None
    expires_at: str | None = None


class TrainingRun(Response):
    """A model, live or not, with its newest checkpoints."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool = True
    corrupted: bool = False
    lora_rank: int | None = None
    last_request_time: str | None = None
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None


class Cursor(Response):
    """The position of a page in its list."""

    limit: int
    offset: int
    total_count: int


class ParsedCheckpointTwinklePath(Response):
    """The parts of a checkpoint's path; `path` is the path itself: a client has no use for folders of the service."""

    path: str
    twinkle_path: str
    training_run_id: str
    checkpoint_type: str
    checkpoint_id: str


class WeightsInfoResponse(Response):
    """What a model must be to load a checkpoint."""

    training_run_id: str
    base_model: str
    model_owner: str | None = None
    is_lora: bool = True
    lora_rank: int | None = None


class ResolvedLoadPath(Response):
    """A path as `load` takes it."""

    checkpoint_name: str
    checkpoint_dir: str | None = None
    is_twinkle_path: bool = True
    training_run_id: str | None = None
    checkpoint_id: str | None = None


class SaveRequest(Request):
    """Arguments of `save`.

    Attributes:
        name: of the checkpoint; None is `checkpoint-step-<number of backward calls>`, as in a local run.
        save_optimizer: include optimizer, scheduler and counters.
        is_sampler: save for sampling: `sampler_weights`, in PEFT's format.
        consumed_train_samples: returned by `resume_from_checkpoint`.
        overwrite: replace a checkpoint of this name.
        ttl_seconds: lifetime; None is unlimited.
        user_metadata: kept with the checkpoint.
    """

    name: Text
    save_optimizer: bool = False
    is_sampler: bool = False
    consumed_train_samples: Number = 0
    overwrite: bool = True
    ttl_seconds: Annotated[int, Field(ge=1)] | None = None
    user_metadata: Metadata | None = None


class SaveResponse(Response):
    """A checkpoint that was saved; `checkpoint_dir` is its path, too: both are taken by `load` and `upload_to_hub`.

    Attributes:
        upload_id: of its upload to a hub, if one was asked for.
    """

    twinkle_path: str
    checkpoint_dir: str
    upload_id: str | None = None

    def __str__(self) -> str:
        return self.twinkle_path


class LoadRequest(Request):
    """Arguments of `load` and `resume_from_checkpoint`.

    Attributes:
        path: `twinkle://<run>/weights/<name>`, or the name of a checkpoint of this model.
        load_optimizer: load optimizer, scheduler and counters, too.
    """

    path: Text
    load_optimizer: bool = False
