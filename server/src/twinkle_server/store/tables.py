"""The tables of `twinkle.db`. Times are UTC seconds; rows of tenants have a tenant column.

Payloads, results and compositions have their own tables, because SQLite rewrites a whole row when one column changes.
"""

from typing import Any, Final

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    text,
)

metadata: Final = MetaData()


def _table(name: str, *parts: Column[object] | Index | UniqueConstraint, **options: Any) -> Table:
    return Table(name, metadata, *parts, **options)


def _text(name: str, *, null: bool = False, key: bool = False) -> Column[object]:
    return Column(name, String, nullable=null, primary_key=key)


def _time(name: str, *, null: bool = False) -> Column[object]:
    return Column(name, Float, nullable=null)


def _number(name: str, *, null: bool = False) -> Column[object]:
    return Column(name, Integer, nullable=null)


def _flag(name: str) -> Column[object]:
    return Column(name, Boolean, nullable=False)


def _json(name: str) -> Column[object]:
    return Column(name, JSON(none_as_null=True), nullable=True)


def _serial(name: str = "id") -> Column[object]:
    return Column(name, Integer, primary_key=True, autoincrement=True)


def _bytes(name: str) -> Table:
    key: Column[object] = Column("operation", Integer, primary_key=True, autoincrement=False)
    return _table(name, key, Column("data", LargeBinary, nullable=False))


meta: Final = _table("meta", _text("name", key=True), _text("value"))

lease: Final = _table(
    "lease",
    Column("id", Integer, primary_key=True, autoincrement=False),  # always 1
    _number("epoch"),
    _text("host"),
    _number("pid"),
    _number("started"),  # clock ticks since boot
    _text("boot"),
    _time("since"),
    _flag("released"),
)

tenants: Final = _table("tenants", _text("id", key=True), _time("created"))

keys: Final = _table(
    "keys",
    _text("id", key=True),
    _text("tenant"),
    _text("name"),
    _text("role"),
    _text("prefix"),
    _text("hash"),
    _json("quotas"),
    _time("created"),
    _time("revoked", null=True),
    Index("keys_prefix", "prefix", unique=True),
    Index("keys_name", "name", unique=True, sqlite_where=text("revoked IS NULL")),
)

sessions: Final = _table(
    "sessions",
    _text("id", key=True),
    _text("tenant"),
    _text("status"),
    _time("created"),
    _time("last_heartbeat"),
    _time("ended", null=True),
    _text("reason", null=True),
    _text("detail", null=True),
    _text("sdk", null=True),
    _json("tags"),
    _json("metadata"),
    _text("project", null=True),
    _text("display_name", null=True),
    Index("sessions_of_tenant", "tenant", "created", "id"),
    Index("sessions_by_heartbeat", "status", "last_heartbeat"),
)

models: Final = _table(
    "models",
    _text("id", key=True),
    _text("tenant"),
    Column("session", String, ForeignKey("sessions.id"), nullable=False),
    _number("number"),
    _text("base"),
    _number("rank"),
    _number("seed", null=True),
    _flag("train_attn"),
    _flag("train_mlp"),
    _flag("train_unembed"),
    _json("metadata"),
    _text("project", null=True),
    _text("status"),
    _text("reason", null=True),
    _time("created"),
    _time("last_request"),
    _time("detached", null=True),
    _number("snapshot_number", null=True),
    _text("snapshot_folder", null=True),
    _text("snapshot_digest", null=True),
    _number("snapshot_size", null=True),
    _time("snapshot_at", null=True),
    UniqueConstraint("session", "number", name="models_number"),
    Index("models_of_tenant", "tenant", "created", "id"),
    Index("models_by_status", "status", "detached"),
)

samplers: Final = _table(
    "samplers",
    _text("id", key=True),
    _text("tenant"),
    Column("session", String, ForeignKey("sessions.id"), nullable=False),
    _number("number"),
    _text("base"),
    _text("path", null=True),
    _text("folder", null=True),
    _text("inflight", null=True),
    _number("clones"),
    _time("created"),
    _time("ended", null=True),
    UniqueConstraint("session", "number", name="samplers_number"),
    Index("samplers_by_folder", "folder"),
    Index("samplers_inflight", "inflight"),
)

operations: Final = _table(
    "operations",
    _serial(),
    _text("request"),
    _text("tenant"),
    _text("lane"),
    _number("number"),
    _text("kind"),
    _number("tokens"),
    Column("digest", LargeBinary, nullable=False),
    _text("status"),
    _number("attempts"),
    _text("error", null=True),
    _text("category", null=True),
    _number("epoch", null=True),
    _text("payload", null=True),  # "" if in `payloads`, else a file name; NULL after its deletion
    _text("result", null=True),  # likewise
    _flag("dropped"),  # whether the outcome has been deleted
    _time("created"),
    _time("finished", null=True),
    _time("read", null=True),
    UniqueConstraint("request", name="operations_request"),
    UniqueConstraint("lane", "number", name="operations_number"),
    Index("operations_pending", "lane", "number", sqlite_where=text("status = 'pending'")),
    Index("operations_failed", "finished", sqlite_where=text("status = 'failed'")),
    Index("operations_finished", "finished", sqlite_where=text("finished IS NOT NULL")),
    Index("operations_kept", "finished", sqlite_where=text("finished IS NOT NULL AND dropped = 0")),
    Index("operations_read", "read", sqlite_where=text("read IS NOT NULL AND dropped = 0")),
    Index("operations_replayed", "lane", "number", sqlite_where=text("payload IS NOT NULL")),
)

payloads: Final = _bytes("payloads")
results: Final = _bytes("results")
compositions: Final = _bytes("compositions")
"""Compositions of the passes of done operations; kept as long as their payloads."""

checkpoints: Final = _table(
    "checkpoints",
    _serial(),
    _text("tenant"),
    _text("run"),
    _text("kind"),
    _text("name"),
    _text("folder"),
    _number("size"),
    _text("digest"),
    _text("base"),
    _number("rank"),
    _flag("train_attn"),
    _flag("train_mlp"),
    _flag("train_unembed"),
    _flag("has_optimizer"),
    _flag("public"),
    _json("metadata"),
    _text("project", null=True),
    _time("created"),
    _time("expires", null=True),
    _time("deleted", null=True),
    Index("checkpoints_path", "run", "kind", "name", unique=True, sqlite_where=text("deleted IS NULL")),
    Index("checkpoints_of_tenant", "tenant", "created", "id"),
    Index("checkpoints_expiry", "expires", sqlite_where=text("deleted IS NULL AND expires IS NOT NULL")),
    Index("checkpoints_by_folder", "folder"),
)

folders: Final = _table("folders", _text("folder", key=True), _time("named"))
"""Every folder that a committed row ever named, until its removal; other folders are removed only by an operator."""

recorded: Final = _table(
    "recorded",
    Column("lane", String, primary_key=True),  # and number: of the sampling operation
    Column("number", Integer, primary_key=True, autoincrement=False),
    _text("tenant"),
    _text("session"),
    _time("used"),
    Index("recorded_used", "used"),
)

audit: Final = _table(
    "audit",
    _serial(),
    _time("time"),
    _text("tenant"),
    _text("event"),
    _json("details"),
    Index("audit_of_tenant", "tenant", "time"),
    Index("audit_by_time", "time"),
)

usage: Final = _table(
    "usage",
    _text("tenant", key=True),
    _text("day", key=True),  # YYYY-MM-DD, UTC
    _text("kind", key=True),
    _number("tokens"),
    _number("bytes"),
)

figures: Final = _table(
    "figures",
    Column("operation", Integer, primary_key=True, autoincrement=False),
    _text("tenant"),
    _text("run"),
    _number("number"),
    _text("kind"),
    _time("time"),
    _text("data"),
)
"""Figures of training operations (`engine.recording`), written with their outcomes and soon added up into `steps`.

Rows are only appended and have no further index, so that a commit of many models changes few pages.
"""

steps: Final = _table(
    "steps",
    _text("run", key=True),
    Column("step", Integer, primary_key=True, autoincrement=False),  # from 1
    _text("tenant"),
    _number("number"),  # of the optimizer step's operation
    _time("time"),
    _text("data"),
    sqlite_with_rowid=False,
)
"""Figures of a run by optimizer step; those of old steps of a long run are thinned out."""

rollouts: Final = _table(
    "rollouts",
    _serial(),
    _text("tenant"),
    _text("run"),
    _number("number"),  # of the operation
    _time("time"),
    _number("size"),
    _json("about"),
    Column("data", LargeBinary, nullable=False),
    Index("rollouts_of_run", "run", "id"),
    Index("rollouts_by_time", "time"),
)
"""Sampled rows of training operations, to be read by their tenant."""

TENANTS_TABLES: Final = (
    keys, sessions, models, samplers, operations, checkpoints, recorded, audit, usage, figures, steps, rollouts,
)  # fmt: skip
"""Tables whose queries must contain the tenant."""
