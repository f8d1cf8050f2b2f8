"""Rows of the tables as dataclasses; fields are named like columns. Times are UTC seconds."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, TypeVar

from twinkle_server.errors import BadRequest
from twinkle_server.ids import CheckpointPath
from twinkle_server.operations import EMBEDDING, Snapshot

R = TypeVar("R")
SessionStatus = Literal["active", "finished", "expired"]
ModelStatus = Literal["creating", "live", "detached", "gone", "corrupted"]
EMBEDS: Final[Mapping[str, str]] = {"task": EMBEDDING}
"""Metadata of a model, or of a checkpoint, that was trained for embeddings."""


def embeds(metadata: Mapping[str, str] | None) -> bool:
    """Return whether metadata marks a model or checkpoint as trained for embeddings."""
    return metadata is not None and EMBEDS.items() <= metadata.items()


@dataclass(slots=True)
class Session:
    """A client's session.

    Attributes:
        id: 128 random bits, or part of a hash of the request's idempotency key.
        tenant: its owner.
        created: time of creation.
        last_heartbeat: time of the last heartbeat; `created` at first.
        status: "active" until it finishes or expires.
        ended: time of its end.
        reason: why it ended ("success", "errored", "interrupted", "expired").
        detail: additional text of the client about the reason.
        sdk: version of the client.
        tags: of the client.
        metadata: of the client.
        project: of the client.
        display_name: of the client.
    """

    id: str
    tenant: str
    created: float
    last_heartbeat: float
    status: SessionStatus = "active"
    ended: float | None = None
    reason: str | None = None
    detail: str | None = None
    sdk: str | None = None
    tags: list[str] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    project: str | None = None
    display_name: str | None = None


@dataclass(slots=True)
class Model:
    """A model of a client: an adapter, and the queue of its operations.

    Attributes:
        id: `<session>:train:<number>`.
        tenant: its owner.
        session: the session that created it.
        number: number in the session.
        base: name of the base model.
        rank: of the adapter; 0 trains all parameters of the base model.
        created: time of creation.
        last_request: time of the last submitted operation.
        seed: of the initial weights.
        train_attn: whether attention layers are adapted.
        train_mlp: whether MLP layers are adapted.
        train_unembed: whether the output head is adapted.
        metadata: of the client.
        project: of the client.
        status: "creating" until its first operation is done; "detached" when only its snapshot is kept; "gone" after
            unload or when nothing is kept; "corrupted" when this service cannot restore it.
        reason: why it is gone or corrupted.
        detached: time at which it was detached or became corrupted.
        snapshot: the newest snapshot.
    """

    id: str
    tenant: str
    session: str
    number: int
    base: str
    rank: int
    created: float
    last_request: float
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    metadata: dict[str, str] | None = None
    project: str | None = None
    status: ModelStatus = "creating"
    reason: str | None = None
    detached: float | None = None
    snapshot: Snapshot | None = None

    @property
    def full(self) -> bool:
        """Whether all parameters of the base model are trained."""
        return self.rank == 0


@dataclass(slots=True)
class Sampler:
    """A sampling session.

    Attributes:
        id: `<session>:sample:<number>`.
        tenant: its owner.
        session: the session that created it.
        number: number in the session.
        base: name of the base model.
        created: time of creation.
        path: `tinker://` path of its checkpoint; None for the base model and for unnamed saves.
        folder: of the checkpoint, relative to the data folder; None for the base model, and for an inflight session
            before the first save.
        inflight: id of the model whose newest inflight save it follows; `folder` changes with it.
        clones: number of clients that joined it.
        ended: time at which its session ended.
    """

    id: str
    tenant: str
    session: str
    number: int
    base: str
    created: float
    path: str | None = None
    folder: str | None = None
    inflight: str | None = None
    clones: int = 0
    ended: float | None = None


@dataclass(slots=True)
class Checkpoint:
    """A saved adapter.

    Attributes:
        tenant: its owner.
        run: id of the model that was saved.
        kind: "weights", "sampler_weights" or "external_weights".
        name: last part of its path.
        folder: relative to the data folder.
        size: in bytes.
        digest: SHA-256 of its manifest.
        base: name of the base model.
        rank: of the adapter; 0 is all weights of a model.
        created: time of creation.
        expires: time of expiry; None is never.
        train_attn: whether attention layers are adapted.
        train_mlp: whether MLP layers are adapted.
        train_unembed: whether the output head is adapted.
        has_optimizer: whether it contains the optimizer's state.
        public: whether all tenants may load it.
        metadata: of the client.
        project: of the client.
        id: of its row; 0 before it is written.
    """

    tenant: str
    run: str
    kind: str
    name: str
    folder: str
    size: int
    digest: str
    base: str
    rank: int
    created: float
    expires: float | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    has_optimizer: bool = False
    public: bool = False
    metadata: dict[str, str] | None = None
    project: str | None = None
    id: int = 0

    @property
    def full(self) -> bool:
        """Whether it holds all weights of a model instead of an adapter."""
        return self.rank == 0

    @property
    def path(self) -> CheckpointPath:
        """Its `tinker://` path."""
        return CheckpointPath(self.run, self.kind, self.name)


@dataclass(slots=True)
class Key:
    """An API key, without its secret.

    Attributes:
        id: 128 random bits.
        tenant: the tenant that it authenticates.
        name: unique among keys that are not revoked.
        role: "operator" or "user".
        prefix: identifies the key; not part of the secret.
        hash: of the secret.
        created: time of creation.
        quotas: limits of this key.
        revoked: time of revocation.
    """

    id: str
    tenant: str
    name: str
    role: str
    prefix: str
    hash: str
    created: float
    quotas: dict[str, Any] = field(default_factory=dict)
    revoked: float | None = None


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """An entry of the audit log.

    Attributes:
        time: of the event.
        tenant: that caused it.
        event: name of the event.
        details: of the event, without secrets.
    """

    time: float
    tenant: str
    event: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of a tenant in a day.

    Attributes:
        tenant: the tenant.
        day: `YYYY-MM-DD`, UTC.
        kind: "training", "sampling_prefill", "sampling_sample", "checkpoint" or "storage".
        tokens: number of tokens.
        bytes: number of bytes written.
    """

    tenant: str
    day: str
    kind: str
    tokens: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Page(Generic[R]):
    """A page of a list.

    Attributes:
        rows: newest first.
        total: number of rows of the whole list.
        cursor: start of the next page for lists with cursors; None at the end.
    """

    rows: list[R]
    total: int
    cursor: str | None = None


def write_cursor(created: float, key: str) -> str:
    """Return the cursor of a row in a list ordered by time and id."""
    return base64.urlsafe_b64encode(f"{created!r} {key}".encode()).decode()


def read_cursor(text: str) -> tuple[float, str]:
    """Parse a cursor of `write_cursor`.

    Raises:
        BadRequest: it is invalid.
    """
    try:
        created, _, key = base64.b64decode(text, altchars=b"-_", validate=True).decode().partition(" ")
        return float(created), key
    except (ValueError, binascii.Error) as error:
        raise BadRequest(f"the cursor must be the next_cursor of a previous response, got {text[:80]!r}") from error
