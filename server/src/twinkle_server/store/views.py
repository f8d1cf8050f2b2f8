"""What the dashboard shows of the tables, for one tenant or, for operators, for all."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Table, func, or_, select

from twinkle_server.errors import NotFound
from twinkle_server.ports import Database
from twinkle_server.store import rows
from twinkle_server.store.models import record_of
from twinkle_server.store.records import Checkpoint, Model, Page
from twinkle_server.store.tables import checkpoints, keys, models, operations, usage
from twinkle_server.store.tenants import KINDS, day_of


@dataclass(frozen=True, slots=True)
class Failure:
    """An operation that failed.

    Attributes:
        time: of its end, UTC seconds.
        tenant: its owner.
        queue_id: the model or sampling session.
        number: sequence number.
        kind: of the operation.
        category: who caused the failure.
        error: the message for the client, or the beginning of an old one.
    """

    time: float
    tenant: str
    queue_id: str
    number: int
    kind: str
    category: str
    error: str


@dataclass(slots=True)
class TenantSummary:
    """A tenant at a glance.

    Attributes:
        tenant: its id.
        models: number of models by status.
        tokens: tokens of today by kind of usage.
        bytes: of its checkpoints.
        keys: number of active keys.
    """

    tenant: str
    models: dict[str, int]
    tokens: dict[str, int]
    bytes: int = 0
    keys: int = 0


class Views:
    """Reads for the dashboard; `tenant` is None for operators, who see all tenants."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def models(
        self, tenant: str | None, limit: int, offset: int = 0, statuses: Sequence[str] = ()
    ) -> Page[Model]:
        """Across tenants: return models of a tenant, or of all if it is None, by their last request, newest first."""
        where = _own(models, tenant) + ([models.c.status.in_(statuses)] if statuses else [])

        def work(connection: Connection) -> Page[Model]:
            total = connection.execute(select(func.count()).select_from(models).where(*where)).scalar_one()
            newest = select(models).where(*where).order_by(models.c.last_request.desc(), models.c.id.desc())
            return Page([record_of(row) for row in connection.execute(newest.limit(limit).offset(offset))], total)

        return await self._database.read(work)

    async def model(self, tenant: str | None, model: str) -> Model:
        """Across tenants: return a model of a tenant, or of any if it is None.

        Raises:
            NotFound: there is no such model.
        """
        query = select(models).where(*_own(models, tenant), models.c.id == model)
        row = await self._database.read(lambda connection: connection.execute(query).one_or_none())
        if row is None:
            raise NotFound(f"model {model[:120]!r} does not exist")
        return record_of(row)

    async def checkpoints(
        self, tenant: str | None, limit: int, offset: int = 0, run: str | None = None
    ) -> Page[Checkpoint]:
        """Across tenants: return checkpoints of a tenant, or of all if it is None, newest first."""
        now = time.time()
        alive = checkpoints.c.deleted.is_(None) & or_(checkpoints.c.expires.is_(None), checkpoints.c.expires > now)
        where = [*_own(checkpoints, tenant), alive] + ([checkpoints.c.run == run] if run is not None else [])
        return await self._database.read(
            lambda connection: rows.page(connection, Checkpoint, checkpoints, where, limit, offset)
        )

    async def failures(self, tenant: str | None, limit: int, run: str | None = None) -> list[Failure]:
        """Across tenants: return failed operations of a tenant, or of all if it is None, newest first."""
        where = [*_own(operations, tenant), operations.c.status == "failed"]
        where += [operations.c.lane == run] if run is not None else []
        columns = (
            operations.c.finished, operations.c.tenant, operations.c.lane, operations.c.number, operations.c.kind,
            operations.c.category, operations.c.error,
        )  # fmt: skip
        query = select(*columns).where(*where).order_by(operations.c.finished.desc()).limit(limit)
        return await self._database.read(
            lambda connection: [
                Failure(row[0], row[1], row[2], row[3], row[4], row[5] or "unknown", row[6] or "")
                for row in connection.execute(query)
            ]
        )

    async def tenants(self, tenant: str | None) -> list[TenantSummary]:
        """Across tenants: summarize a tenant, or all if it is None, by name."""
        today = day_of(time.time())
        now = time.time()
        alive = checkpoints.c.deleted.is_(None) & or_(checkpoints.c.expires.is_(None), checkpoints.c.expires > now)
        counted = (
            select(models.c.tenant, models.c.status, func.count())
            .where(*_own(models, tenant))
            .group_by(models.c.tenant, models.c.status)
        )
        tokens = usage.c.kind.in_(sorted(set(KINDS.values())))  # not `REQUESTS`, which are no tokens
        used = select(usage.c.tenant, usage.c.kind, usage.c.tokens).where(
            *_own(usage, tenant), usage.c.day == today, tokens
        )
        stored = select(checkpoints.c.tenant, func.sum(checkpoints.c.size)).where(*_own(checkpoints, tenant), alive)
        issued = select(keys.c.tenant, func.count()).where(*_own(keys, tenant), keys.c.revoked.is_(None))

        def work(connection: Connection) -> list[TenantSummary]:
            found: dict[str, TenantSummary] = {}

            def of(name: str) -> TenantSummary:
                return found.setdefault(name, TenantSummary(name, {}, {}))

            for owner, status, count in connection.execute(counted):
                of(owner).models[status] = count
            for owner, kind, tokens in connection.execute(used):
                of(owner).tokens[kind] = tokens
            for owner, size in connection.execute(stored.group_by(checkpoints.c.tenant)):
                of(owner).bytes = int(size)
            for owner, count in connection.execute(issued.group_by(keys.c.tenant)):
                of(owner).keys = count
            return [found[name] for name in sorted(found)]

        return await self._database.read(work)


def _own(table: Table, tenant: str | None) -> list[Any]:
    return [] if tenant is None else [table.c.tenant == tenant]
