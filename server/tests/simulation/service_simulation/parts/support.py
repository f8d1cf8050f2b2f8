"""What several parts need: stores in folders of their own, and what must be refused."""

import os
import random
import sqlite3
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from service_simulation.disk import Disk, SimulatedDatabase, use_disk
from service_simulation.reference import demand
from service_simulation.virtual import Still

from twinkle_server.errors import StoreError
from twinkle_server.operations import Operation
from twinkle_server.store import (
    Store,
    open_store,
)
from twinkle_server.store.inspection import DATABASE

TENANTS = ("ada", "bob")
_MEMORY = Path("/dev/shm")
FRAME = 512
"""Bytes that a message takes beside its payload."""


def operation(number: int, tenant: str = "ada", queue: str = "m", kind: Any = "optim_step", **fields: Any) -> Operation:
    """Return an operation."""
    return Operation(number + 1, f"r{queue}{number}", tenant, queue, number, kind, 1, **fields)


@contextmanager
def folder() -> Iterator[Path]:
    """Make a folder, and remove it."""
    with tempfile.TemporaryDirectory(prefix="part-", dir=_MEMORY if _MEMORY.is_dir() else None) as name:
        yield Path(name)


@contextmanager
def opened(draw: random.Random, **options: Any) -> Iterator[Store]:
    """Open a store in a new directory, and close it."""
    with folder() as root:
        use_disk(Disk(Still(draw.getrandbits(32))))
        store = open_store(root / "data", database=SimulatedDatabase, **options)
        try:
            yield store
        finally:
            store.close()


async def refused(work: Awaitable[Any], kind: type[Exception], words: str = "") -> None:
    """Demand that something is refused."""
    try:
        await work
    except kind as error:
        demand(words in str(error), f"{error}, not {words}")
        return
    demand(False, f"it is not refused: {words or kind}")


def rows_of(store: Store, query: str, *values: Any) -> list[Any]:
    """Return rows as another process reads them."""
    with closing(sqlite3.connect(store.data / DATABASE)) as raw:
        return raw.execute(query, values).fetchall()


def declined(work: Callable[[], Any], *words: str) -> None:
    """Demand that a directory is refused, with words that say why."""
    try:
        work()
    except StoreError as error:
        demand(all(word in str(error) for word in words), f"{error}, without {words}")
        return
    demand(False, f"it is not refused: {words}")


@contextmanager
def synced() -> Iterator[list[str]]:
    """Note what is synced: names of files and folders."""
    found: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        found.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        real(handle)

    with mock.patch.object(os, "fsync", fsync):
        yield found


def newest(found: list[Any]) -> list[Any]:
    return sorted(found, key=lambda each: (each.created, each.id), reverse=True)
