"""Rows of the store, as the rest of the service sees them; one dataclass a table, fields named as its columns."""

import base64
import binascii
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from twinkle_server.errors import BadRequest
from twinkle_server.ids import CheckpointPath
from twinkle_server.operations import Snapshot

R = TypeVar("R")
SessionStatus = Literal["active", "finished", "expired"]
ModelStatus = Literal["creating", "live", "detached", "gone", "corrupted"]


@dataclass(slots=True)
class Session:
    """A client's session.

    Attributes:
        id: 128 random bits, or as many of a hash of the request's idempotency key.
        tenant: whose it is.
        created: when.
        last_heartbeat: when it was last heard of; `created` at first.
        status: "active" until it finishes or expires.
        ended: when it did.
        reason: why it ended ("success", "errored", "interrupted", "expired").
        detail: of the client, to the reason.
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
    """A training run: an adapter, and the queue of its operations.

    Attributes:
        id: `<session>:train:<number>`.
        tenant: whose it is.
        session: that made it.
        number: in its session.
        base: name of the base model.
        rank: of the adapter.
        created: when.
        last_request: when an operation was last asked for.
        seed: of the first weights.
        train_attn: attention is adapted.
        train_mlp: the MLPs are.
        train_unembed: the head is.
        metadata: of the client.
        project: of the client.
        status: "creating" until its first operation is done; "detached" when only its snapshot is kept; "gone" after
            unload or when nothing is kept; "corrupted" when it cannot be made again by this service.
        reason: why it is gone or corrupted.
        detached: when it was detached, or could not be made again.
        snapshot: its newest one.
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


@dataclass(slots=True)
class Sampler:
    """A sampling session.

    Attributes:
        id: `<session>:sample:<number>`.
        tenant: whose it is.
        session: that made it.
        number: in its session.
        base: name of the base model.
        created: when.
        path: `tinker://` path that it was made from; None for the base model and for unnamed saves.
        folder: of the checkpoint that it samples from, relative to the data directory; None is the base model, or an
            inflight one before its first save.
        inflight: id of the model whose newest inflight save it follows; `folder` moves with it.
        clones: clients that joined it.
        ended: when its session ended.
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
        tenant: whose it is.
        run: id of the model that was saved.
        kind: "weights", "sampler_weights" or "external_weights".
        name: in its path.
        folder: relative to the data directory.
        size: bytes.
        digest: SHA-256 of its manifest.
        base: name of the base model.
        rank: of the adapter.
        created: when.
        expires: when it goes; None is never.
        train_attn: attention is adapted.
        train_mlp: the MLPs are.
        train_unembed: the head is.
        has_optimizer: the optimizer's state is in it.
        public: anybody may load it.
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
    def path(self) -> CheckpointPath:
        """Its `tinker://` path."""
        return CheckpointPath(self.run, self.kind, self.name)


@dataclass(slots=True)
class Key:
    """An API key, without its secret.

    Attributes:
        id: 128 random bits.
        tenant: who it speaks for.
        name: that people call it; unique among keys that are not revoked.
        role: "operator" or "user".
        prefix: by which it is found; not part of the secret.
        hash: of the secret.
        created: when.
        quotas: limits of its own.
        revoked: when.
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
    """Something that somebody did.

    Attributes:
        time: when.
        tenant: who.
        event: what, as a word.
        details: no secrets.
    """

    time: float
    tenant: str
    event: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tenant used in a day.

    Attributes:
        tenant: who.
        day: `YYYY-MM-DD`, UTC.
        kind: "training", "sampling_prefill", "sampling_sample", "checkpoint" or "storage".
        tokens: of the model.
        bytes: that were written.
    """

    tenant: str
    day: str
    kind: str
    tokens: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Page(Generic[R]):
    """A part of a list.

    Attributes:
        rows: newest first.
        total: rows of the whole list.
        cursor: where the next part begins, for lists that are read by cursor; None at the end.
    """

    rows: list[R]
    total: int
    cursor: str | None = None


def write_cursor(created: float, key: str) -> str:
    """Return the text that stands for a row's place in a list that is ordered by time and id."""
    return base64.urlsafe_b64encode(f"{created!r} {key}".encode()).decode()


def read_cursor(text: str) -> tuple[float, str]:
    """Read what `write_cursor` wrote.

    Raises:
        BadRequest: it did not.
    """
    try:
        created, _, key = base64.b64decode(text, altchars=b"-_", validate=True).decode().partition(" ")
        return float(created), key
    except (ValueError, binascii.Error) as error:
        raise BadRequest(f"the cursor must be the next_cursor of a previous response, got {text[:80]!r}") from error
