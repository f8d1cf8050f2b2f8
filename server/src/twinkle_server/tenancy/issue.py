"""Making, listing and ending keys; what commands and the first start do."""

import re
import time
from collections.abc import Mapping
from typing import Any

from twinkle_server.errors import BadRequest
from twinkle_server.store.opening import Store
from twinkle_server.store.records import AuditEntry, Key
from twinkle_server.tenancy.auth import Role
from twinkle_server.tenancy.keys import make_record, new_key
from twinkle_server.tenancy.quotas import Quotas

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


async def issue(
    store: Store,
    name: str,
    *,
    role: Role = "user",
    tenant: str | None = None,
    quotas: Mapping[str, Any] | None = None,
) -> str:
    """Make a key and return it; nobody can read it again.

    Args:
        store: an open one; a server may run beside it.
        name: that people call it.
        role: what it may do.
        tenant: who it speaks for; by default one of the key's name.
        quotas: see `Quotas`.

    Raises:
        BadRequest: the name is none, is taken, or a quota is unknown.
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
    await _note(store, record, "key.create", now)
    return key


async def revoke(store: Store, name: str) -> Key:
    """End a key by its name.

    Raises:
        NotFound: there is none of that name.
    """
    now = time.time()
    record = await store.keys.revoke(name, now)
    await _note(store, record, "key.revoke", now)
    return record


async def _note(store: Store, record: Key, event: str, now: float) -> None:
    details = {"key": record.id, "name": record.name, "role": record.role}
    await store.audit.record(AuditEntry(now, record.tenant, event, details))
