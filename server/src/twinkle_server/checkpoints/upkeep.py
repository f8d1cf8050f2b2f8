"""What is done to checkpoints from time to time: expiry, the newest K, and sweeping."""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog
from sqlalchemy import Connection, func, select

from twinkle_server.checkpoints.sweep import AGE, Swept, sweep
from twinkle_server.errors import Unavailable
from twinkle_server.ports import Database
from twinkle_server.store.checkpoints import Checkpoints
from twinkle_server.store.keys import Keys
from twinkle_server.store.records import Key
from twinkle_server.store.retention import Retention
from twinkle_server.store.tables import checkpoints

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Upkept:
    """What a round did.

    Attributes:
        expired: checkpoints whose time was over.
        surplus: checkpoints beyond the newest K.
        swept: folders and files that were removed.
    """

    expired: int
    surplus: int
    swept: Swept


class Upkeep:
    """Looks after the checkpoints of a data directory.

    Args:
        data: the directory.
        database: of it.
        table: its checkpoints.
        keys: its keys, whose quotas say how many checkpoints are kept.
        retention: knows what is needed.

    Attributes:
        held: returns folders that no row names yet, and that are needed all the same.
    """

    def __init__(self, data: Path, database: Database, table: Checkpoints, keys: Keys, retention: Retention) -> None:
        self._data = data
        self._retention = retention
        self._database = database
        self._table = table
        self._keys = keys
        self.held: Callable[[], Collection[str]] = frozenset

    async def run(self, now: float | None = None, age: float = AGE) -> Upkept:
        """Do one round.

        Args:
            now: UTC seconds.
            age: see `sweep`.
        """
        now = time.time() if now is None else now
        try:
            expired = len(await self._table.expire(now))
            surplus = await self._keep_newest(_kept(await self._keys.all()), now)
        except Unavailable:  # a full disk: what the sweep removes may be what it lacks
            expired = surplus = 0
        needed = set(self.held()) | await self._needed()
        swept = await asyncio.to_thread(sweep, self._data, needed, age, now)
        if expired or surplus or swept.entries:
            _log.info("upkeep", expired=expired, surplus=surplus, removed=swept.entries, bytes=swept.size)
        return Upkept(expired, surplus, swept)

    async def _needed(self) -> set[str]:
        """Return all paths, relative to the data directory, that a row names."""
        found = set(await self._retention.referenced())
        found.update(f"payloads/{name}" for name in await self._retention.payload_files())
        found.update(f"results/{name}" for name in await self._retention.result_files())
        return found

    async def _keep_newest(self, kept: Mapping[str, int], now: float) -> int:
        count = 0
        for tenant, keep in kept.items():
            for run, kind in await self._crowded(tenant, keep):
                count += len(await self._table.surplus(tenant, run, kind, keep, now))
        return count

    async def _crowded(self, tenant: str, keep: int) -> list[tuple[str, str]]:
        """Return the runs and kinds of which a tenant has more than so many checkpoints."""
        query = (
            select(checkpoints.c.run, checkpoints.c.kind)
            .where(checkpoints.c.tenant == tenant, checkpoints.c.deleted.is_(None))
            .group_by(checkpoints.c.run, checkpoints.c.kind)
            .having(func.count() > keep)
        )

        def work(connection: Connection) -> list[tuple[str, str]]:
            return [(run, kind) for run, kind in connection.execute(query)]

        return await self._database.read(work)


def _kept(keys: list[Key]) -> dict[str, int]:
    """Return how many checkpoints tenants keep; of several keys the most generous counts."""
    kept: dict[str, int] = {}
    for key in keys:
        if keep := key.quotas.get("keep"):
            kept[key.tenant] = max(int(keep), kept.get(key.tenant, 0))
    return kept
