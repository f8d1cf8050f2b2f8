"""Status of a running server for commands on the same machine.

The server writes its address into a file (`announce`). Its status is requested by HTTP, or read from the database.
"""

import hashlib
import http.client
import os
import ssl
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
from sqlalchemy import Connection, func, select

from twinkle_server.engine.files import TEMPORARY
from twinkle_server.ids import new_id
from twinkle_server.ports import Database
from twinkle_server.store.tables import checkpoints, keys, models, operations, sessions, tenants, usage
from twinkle_server.store.tenants import REQUESTS, day_of

FILE = "server.json"
FOLDER_TOKEN = "X-Twinkle-Folder"
"""Header with the token of the file, known only to processes that can read the data folder."""


@dataclass(frozen=True, slots=True)
class Presence:
    """A server that starts, runs, or was killed.

    Attributes:
        pid: of its API process.
        url: for clients on this machine.
        name: of the model for clients.
        started: UTC seconds.
        token: proves to the server that the client can read the file; see `health.Access`.
        ready: whether it has become ready; before, its URL may not respond yet.
        certificate: SHA-256 of its certificate; "" without TLS.
    """

    pid: int
    url: str
    name: str
    started: float
    token: str = ""
    ready: bool = True
    certificate: str = ""


def announce(data: Path, presence: Presence) -> None:
    """Write the file atomically."""
    work = data / f"{TEMPORARY}{new_id()}"
    work.touch(mode=0o600, exist_ok=False)  # set the mode before writing the token
    work.write_bytes(orjson.dumps(asdict(presence)))
    work.replace(data / FILE)


def withdraw(data: Path) -> None:
    """Remove the file, unless a server in another process has written it."""
    presence = find(data)
    if presence is None or presence.pid == os.getpid():
        (data / FILE).unlink(missing_ok=True)


def find(data: Path) -> Presence | None:
    """Return the server that starts or runs on a data folder; None if there is none."""
    try:
        presence = Presence(**orjson.loads((data / FILE).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
    try:
        os.kill(presence.pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # it runs as another user
        pass
    return presence


_SECONDS = 5.0
_LARGEST = 2**20


def ask(data: Path) -> dict[str, Any] | None:
    """Request the status of the running server; None if no server runs or it does not respond."""
    presence = find(data)
    answer = None if presence is None else _get(presence, "/twinkle/status")
    if presence is None or answer is None or answer[0] != 200:
        return None
    return {"pid": presence.pid, "url": presence.url, "model": presence.name, "started": presence.started, **answer[1]}


def ask_ready(data: Path) -> tuple[bool, dict[str, Any]]:
    """Return whether the server on a data folder is ready, and its answer; it is empty without an answer."""
    presence = find(data)
    answer = None if presence is None else _get(presence, "/readyz")
    return (False, {}) if answer is None else (answer[0] == 200, answer[1])


def _get(presence: Presence, path: str) -> tuple[int, dict[str, Any]] | None:
    """Return the status and the JSON of a response; None if the server does not respond."""
    try:
        with closing(connect(presence)) as connection:
            connection.request("GET", path, headers={FOLDER_TOKEN: presence.token})
            response = connection.getresponse()
            fields = orjson.loads(response.read(_LARGEST))
    except (OSError, http.client.HTTPException, ValueError):
        return None
    return (response.status, fields) if isinstance(fields, dict) else None


def connect(presence: Presence) -> http.client.HTTPConnection:
    """Return an open connection to a server on this machine, which has the certificate that the server announced.

    Raises:
        OSError: the server does not respond, or another program has its port.
    """
    connection = _connection(presence)
    try:
        connection.connect()
        if not _is_server(connection, presence):
            raise ConnectionError("the certificate is not that of the server; another program may use its port")
    except BaseException:
        connection.close()
        raise
    return connection


def _connection(presence: Presence) -> http.client.HTTPConnection:
    url = urlsplit(presence.url)
    if url.scheme != "https":
        return http.client.HTTPConnection(url.hostname or "", url.port, timeout=_SECONDS)
    unverified = ssl.create_default_context()  # the certificate is for the public name; `_is_server` compares it
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(url.hostname or "", url.port, timeout=_SECONDS, context=unverified)


def _is_server(connection: http.client.HTTPConnection, presence: Presence) -> bool:
    """Return whether the other end of a TLS connection has the server's certificate; True without TLS."""
    if not isinstance(connection.sock, ssl.SSLSocket):
        return not presence.certificate
    certificate = connection.sock.getpeercert(binary_form=True) or b""
    return hashlib.sha256(certificate).hexdigest() == presence.certificate


async def read_figures(database: Database) -> dict[str, Any]:
    """Return the figures of the database: sessions, models, operations, checkpoints, keys, tenants."""
    return await database.read(_figures)


def _figures(connection: Connection) -> dict[str, Any]:
    """Across tenants: count rows, for the operator."""
    now = time.time()
    stored = (checkpoints.c.deleted.is_(None), checkpoints.c.expires.is_(None) | (checkpoints.c.expires > now))
    saved = connection.execute(
        select(func.count(), func.coalesce(func.sum(checkpoints.c.size), 0)).where(*stored)
    ).one()
    waiting = connection.execute(
        select(func.count(), func.min(operations.c.created)).where(operations.c.status == "pending")
    ).one()
    return {
        "sessions": _by(connection, sessions.c.status),
        "models": _by(connection, models.c.status),
        "operations": {"waiting": waiting[0], "oldest_seconds": round(now - waiting[1], 1) if waiting[1] else 0.0},
        "checkpoints": {"count": saved[0], "bytes": int(saved[1])},
        "keys": connection.execute(select(func.count()).where(keys.c.revoked.is_(None))).scalar_one(),
        "tenants": _tenants(connection, stored),
    }


def _tenants(connection: Connection, stored: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Across tenants: return what each tenant uses, for the operator.

    Tokens and requests are written every ten seconds.
    """
    found: dict[str, dict[str, Any]] = {}

    def of(tenant: str) -> dict[str, Any]:
        return found.setdefault(tenant, {**_NOTHING, "checkpoints": {"count": 0, "bytes": 0}})

    for (tenant,) in connection.execute(select(tenants.c.id).order_by(tenants.c.id)):
        of(tenant)
    today = usage.c.day == day_of(time.time())
    spent = select(usage.c.tenant, usage.c.kind, func.sum(usage.c.tokens), func.sum(usage.c.tokens).filter(today))
    for tenant, kind, total, of_today in connection.execute(spent.group_by(usage.c.tenant, usage.c.kind)):
        if (name := _USED.get(kind)) is not None:
            of(tenant)[name], of(tenant)[f"{name}_today"] = int(total or 0), int(of_today or 0)
    alive = models.c.status.in_(("creating", "live", "detached"))
    for tenant, count in connection.execute(
        select(models.c.tenant, func.count()).where(alive).group_by(models.c.tenant)
    ):
        of(tenant)["models"] = count
    saved = select(checkpoints.c.tenant, func.count(), func.sum(checkpoints.c.size)).where(*stored)
    for tenant, count, size in connection.execute(saved.group_by(checkpoints.c.tenant)):
        of(tenant)["checkpoints"] = {"count": count, "bytes": int(size)}
    pending = select(operations.c.tenant, func.count()).where(operations.c.status == "pending")
    for tenant, count in connection.execute(pending.group_by(operations.c.tenant)):
        of(tenant)["waiting"] = count
    active = select(keys.c.tenant, keys.c.quotas).where(keys.c.revoked.is_(None))
    for tenant, quotas in connection.execute(active):
        weight = float((quotas or {}).get("weight") or 1.0)
        of(tenant)["weight"] = max(weight, of(tenant)["weight"] or 0.0)
    return found


_USED = {"training": "trained_tokens", "sampling_sample": "sampled_tokens", REQUESTS: "requests"}
_NOTHING: dict[str, Any] = {
    **{name: 0 for used in _USED.values() for name in (used, f"{used}_today")},
    "models": 0,
    "waiting": 0,
    "weight": None,
}


def _by(connection: Connection, status: Any) -> dict[str, int]:
    query = select(status, func.count()).group_by(status).order_by(status)
    return {name: count for name, count in connection.execute(query)}
