"""API keys: `tml-` and 256 random bits, stored as argon2id hashes.

A key is looked up by a short hash, which cannot be guessed: only existing keys cost an argon2 run, and only once.
`issue` and `revoke` are used by commands and by the first start.
"""

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import structlog
from sqlalchemy.exc import SQLAlchemyError

from twinkle_server.errors import BadRequest, ServiceError, Unavailable
from twinkle_server.ids import new_id
from twinkle_server.store.opening import Store
from twinkle_server.store.records import AuditEntry, Key
from twinkle_server.tenancy.auth import Caller, Role
from twinkle_server.tenancy.quotas import Quotas

PREFIX = "tml-"
_LENGTH = len(PREFIX) + 43
_KEPT = 4096  # verified keys in memory
_FRESH = 1.0  # seconds after which revocations are noticed
_BETWEEN = 0.1  # minimum seconds between reads of the table for unknown keys
_AT_ONCE = 2  # concurrent argon2 runs
_log = structlog.get_logger(__name__)


def new_key() -> str:
    """Return a new key; it is shown once and not stored."""
    return PREFIX + secrets.token_urlsafe(32)


def make_record(key: str, name: str, tenant: str, role: Role, created: float) -> Key:
    """Return the row of a key.

    Args:
        key: the key itself.
        name: of the key.
        tenant: that it authenticates.
        role: of the key.
        created: UTC seconds.
    """
    return Key(new_id(), tenant, name, role, lookup(key), hash_key(key), created)


def lookup(key: str) -> str:
    """Return the lookup hash of a key: 64 bits, which leave 192 bits of the key to guess."""
    return hashlib.sha256(b"lookup\0" + key.encode()).hexdigest()[:16]


def hash_key(key: str) -> str:
    """Return the argon2id hash of a key."""
    from argon2 import PasswordHasher

    # OWASP's minimum cost: a key has 256 random bits, so guessing is infeasible at any cost.
    return PasswordHasher(time_cost=2, memory_cost=19 * 1024, parallelism=1).hash(key)


def matches(key: str, hashed: str) -> bool:
    """Return whether a key has a given hash."""
    from argon2 import PasswordHasher
    from argon2.exceptions import InvalidHashError, VerificationError

    try:
        return PasswordHasher().verify(hashed, key)
    except (VerificationError, InvalidHashError):
        return False


class Keyring:
    """The keys of a running service; changes by other processes are noticed within a second.

    Args:
        load: reads all active keys.
    """

    def __init__(self, load: Callable[[], Awaitable[Sequence[Key]]]) -> None:
        self._load = load
        self._salt = secrets.token_bytes(32)
        self._rows: dict[str, Key] = {}
        self._callers: dict[str, Caller] = {}
        self._read = -float("inf")
        self._reading = asyncio.Lock()
        self._verified: OrderedDict[bytes, str] = OrderedDict()
        self._argon = asyncio.Semaphore(_AT_ONCE)

    async def find(self, key: str) -> Caller | None:
        """Return the caller of a key; None if the key is unknown or revoked."""
        if len(key) != _LENGTH or not key.startswith(PREFIX) or not key.isascii():
            return None
        start = time.monotonic()
        if self._read < start - _FRESH:
            await self._refresh(start - _FRESH)
        prefix = lookup(key)
        if prefix not in self._rows:
            await self._refresh(start)
        row = self._rows.get(prefix)
        if row is None or not await self._verify(key, row):
            return None
        return self._callers.get(prefix)

    async def holder(self, prefix: str) -> Caller | None:
        """Return the caller of the key with a lookup hash, for a session that the key has opened; None if revoked."""
        start = time.monotonic()
        if self._read < start - _FRESH:
            await self._refresh(start - _FRESH)
        return self._callers.get(prefix)

    async def _refresh(self, since: float) -> None:
        """Read the table unless a read started after `since`; concurrent requests with unknown keys share a read."""
        if self._read >= since:
            return
        async with self._reading:
            if self._read >= since:
                return
            await asyncio.sleep(max(0.0, self._read + _BETWEEN - time.monotonic()))
            began = time.monotonic()
            try:
                self._rows = {row.prefix: row for row in await self._load()}
            except (ServiceError, SQLAlchemyError, OSError) as error:
                if not self._rows:
                    raise Unavailable("the keys cannot be read at the moment: try again", retry_after=5.0) from error
                _log.error("cannot read the keys; using the cached ones")
            self._callers = {prefix: _caller(row) for prefix, row in self._rows.items()}
            self._read = began

    async def _verify(self, key: str, row: Key) -> bool:
        """Return whether the key belongs to the row; successes are cached under a keyed hash of the key."""
        mark = hmac.digest(self._salt, key.encode(), "sha256")
        if self._verified.get(mark) == row.hash:
            self._verified.move_to_end(mark)
            return True
        async with self._argon:
            if self._verified.get(mark) != row.hash and not await asyncio.to_thread(matches, key, row.hash):
                return False
        self._verified[mark] = row.hash
        while len(self._verified) > _KEPT:
            self._verified.popitem(last=False)
        return True


def _caller(row: Key) -> Caller:
    return Caller(row.tenant, row.id, "operator" if row.role == "operator" else "user", row.quotas)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


async def issue(
    store: Store,
    name: str,
    *,
    role: Role = "user",
    tenant: str | None = None,
    quotas: Mapping[str, Any] | None = None,
) -> str:
    """Create a key and return it; it cannot be read again.

    Args:
        store: an open store; a server may run on the same directory.
        name: of the key.
        role: of the key.
        tenant: that it authenticates; by default the name of the key.
        quotas: see `Quotas`.

    Raises:
        BadRequest: the name is invalid or used, or a quota is unknown.
    """
    for text in (name, tenant or name):
        if not _NAME.fullmatch(text):
            raise BadRequest(
                f"the name of a key or tenant must be 1 to 64 letters, digits, '.', '_', '@' and '-', got {text[:80]!r}"
            )
    Quotas.read(quotas or {})
    key, now = new_key(), time.time()
    record = make_record(key, name, tenant or name, role, now)
    record.quotas = dict(quotas or {})
    await store.keys.create(record)
    await _audit(store, record, "key.create", now)
    return key


async def change(store: Store, name: str, quotas: Mapping[str, float | None]) -> Key:
    """Change quotas of a key by its name; a running service notices it within seconds.

    Args:
        store: an open store; a server may run on the same directory.
        name: of an active key.
        quotas: see `Quotas`; None removes one.

    Raises:
        BadRequest: a quota is unknown or invalid.
        NotFound: no active key has this name.
    """
    Quotas.read({quota: 1 if value is None else value for quota, value in quotas.items()})
    now = time.time()

    def entry(before: Key, after: Key) -> AuditEntry:
        details = {"key": after.id, "name": after.name, "before": before.quotas, "after": after.quotas}
        return AuditEntry(now, after.tenant, "key.quotas", details)

    return await store.keys.change(name, entry, **quotas)


async def revoke(store: Store, name: str) -> Key:
    """Revoke a key by its name.

    Raises:
        NotFound: no active key has this name.
    """
    now = time.time()
    record = await store.keys.revoke(name, now)
    await _audit(store, record, "key.revoke", now)
    return record


async def _audit(store: Store, record: Key, event: str, now: float) -> None:
    details = {"key": record.id, "name": record.name, "role": record.role}
    await store.audit.record(AuditEntry(now, record.tenant, event, details))
