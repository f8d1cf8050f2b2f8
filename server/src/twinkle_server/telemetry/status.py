"""What a data directory's service does: asked of the server that runs, or read from the database."""

import http.client
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
from sqlalchemy import Connection, func, select

from twinkle_server.ports import Database
from twinkle_server.store.tables import checkpoints, keys, models, operations, sessions
from twinkle_server.telemetry import presence

_SECONDS = 5.0
_LARGEST = 2**20


def ask(data: Path) -> dict[str, Any] | None:
    """Return what the running server says of itself; None if none runs, or it does not answer."""
    here = presence.find(data)
    if here is None:
        return None
    place = urlsplit(here.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=_SECONDS)
    try:
        connection.request("GET", "/twinkle/status", headers={presence.FOLDER_TOKEN: here.token})
        answer = connection.getresponse()
        said = orjson.loads(answer.read(_LARGEST))
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    if answer.status != 200 or not isinstance(said, dict):
        return None
    return {"pid": here.pid, "url": here.url, "model": here.name, "started": here.started, **said}


async def read_figures(database: Database) -> dict[str, Any]:
    """Return what the database knows: sessions, models, operations, checkpoints, keys."""
    return await database.read(_figures)


def _figures(connection: Connection) -> dict[str, Any]:
    """Across tenants: count, for the operator."""
    now = time.time()
    there = (checkpoints.c.deleted.is_(None), checkpoints.c.expires.is_(None) | (checkpoints.c.expires > now))
    saved = connection.execute(select(func.count(), func.coalesce(func.sum(checkpoints.c.size), 0)).where(*there)).one()
    waiting = connection.execute(
        select(func.count(), func.min(operations.c.created)).where(operations.c.status == "pending")
    ).one()
    return {
        "sessions": _by(connection, sessions.c.status),
        "models": _by(connection, models.c.status),
        "operations": {"waiting": waiting[0], "oldest_seconds": round(now - waiting[1], 1) if waiting[1] else 0.0},
        "checkpoints": {"count": saved[0], "bytes": int(saved[1])},
        "keys": connection.execute(select(func.count()).where(keys.c.revoked.is_(None))).scalar_one(),
    }


def _by(connection: Connection, status: Any) -> dict[str, int]:
    query = select(status, func.count()).group_by(status).order_by(status)
    return {name: count for name, count in connection.execute(query)}
