"""Verifies backups, and makes a data folder of one."""

import os
import shutil
import sqlite3
from pathlib import Path
from typing import Final

from twinkle_server.backup.generations import LISTING, Listing, copy, digest_of, newest
from twinkle_server.engine.files import sync_directory
from twinkle_server.errors import StoreError
from twinkle_server.failpoints import reach
from twinkle_server.store import schema
from twinkle_server.store.filesystem import check_local
from twinkle_server.store.inspection import DATABASE, damage

_WORK: Final = ".tmp-restore"
_SHOWN: Final = 5


def verify_backup(folder: Path) -> tuple[Path, Listing, list[str]]:
    """Compare all files of a backup with its list, and check its database.

    Args:
        folder: a backup folder, of which the newest generation is verified, or a generation.

    Returns:
        The generation, its list, and all problems; the backup is intact if there are none.

    Raises:
        StoreError: there is no complete backup, or its list cannot be read.
    """
    generation = newest(folder)
    listing = Listing.read(generation)
    problems = []
    for name, (sha256, size) in sorted(listing.files.items()):
        try:
            found = digest_of(generation / name)
        except OSError as error:
            problems.append(f"{name}: cannot be read ({error.strerror})")
            continue
        if found[1] != size:
            problems.append(f"{name}: has {found[1]} bytes, and {size} in the list of the backup")
        elif found[0] != sha256:
            problems.append(f"{name}: its content has changed since the backup (same size, other SHA-256)")
    present = {path.relative_to(generation).as_posix() for path in generation.rglob("*") if not path.is_dir()}
    problems += [f"{name}: is not part of the backup" for name in sorted(present - {*listing.files, LISTING})]
    if DATABASE not in listing.files:
        problems.append(f"{DATABASE}: missing from {LISTING}")
    elif not problems:
        problems += [f"{DATABASE}: {line}" for line in damage(generation / DATABASE, full=True)]
    return generation, listing, problems


def restore_backup(folder: Path, data: Path) -> tuple[Path, Listing]:
    """Make a data folder of a backup.

    The database is placed last, so that no service starts on a folder that a crash left incomplete.

    Args:
        folder: a backup folder, of which the newest generation is restored, or a generation.
        data: the new data folder, which must be empty or missing.

    Returns:
        The generation, and its list.

    Raises:
        StoreError: the target is not empty, the backup is damaged or of a newer version, or the disk is full or
            failed.
    """
    if data.exists() and (not data.is_dir() or any(path.name not in (_WORK, "lost+found") for path in data.iterdir())):
        raise StoreError(f"{data} is not an empty folder; choose a new folder for --data")
    generation, listing, problems = verify_backup(folder)
    if listing.schema not in schema.VERSIONS:
        raise StoreError(
            f"the backup {generation} has the database version {listing.schema!r}, which is newer than "
            f"{schema.VERSIONS[-1]!r} of this program; install the twinkle-server that wrote it, or a newer one"
        )
    if problems:
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise StoreError(
            f"the backup {generation} is damaged: {'; '.join(problems[:_SHOWN])}{more}; "
            "restore another generation with --from, or replace the damaged files"
        )
    try:
        _place(generation, listing, data)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"cannot restore to {data}: {error}; empty this folder and repeat the command") from error
    return generation, listing


def _place(generation: Path, listing: Listing, data: Path) -> None:
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_local(data)
    work = data / _WORK
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(mode=0o700)
    for name, expected in listing.files.items():
        target = work / name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        reach("restore.before_copy")
        if copy(generation / name, target) != expected:
            raise StoreError(f"{generation / name} changed while it was restored; verify the backup again")
    for parent, _, _ in os.walk(work):
        sync_directory(Path(parent))
    for path in sorted(work.iterdir(), key=lambda path: (path.name == DATABASE, path.name)):
        reach("restore.before_move")
        path.rename(data / path.name)
        sync_directory(data)
    work.rmdir()
    sync_directory(data)
