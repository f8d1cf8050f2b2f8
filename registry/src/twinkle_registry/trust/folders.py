"""The folders that the user trusts: only in them may a `twinkle.toml` or `twinkle.lock` let code run.

A checkout of another person's project contains such files. They take effect once the user trusts them, and must be
trusted again after every edit that Twinkle did not make: a record has the path and the SHA-256 of the content. Records
are kept in the state folder of the user, one small file for each path, so that two processes never lose a record.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import SettingsError

# This runs at the start in a folder with such a file, and os.path is ten times faster than pathlib.
# ruff: noqa: PTH100, PTH103, PTH105, PTH108, PTH111, PTH117, PTH118, PTH120, PTH123, PTH208


FOLDER_VARIABLE = "TWINKLE_TRUST_FOLDER"
STATE_VARIABLE = "TWINKLE_STATE_DIR"
HOME_VARIABLE = "XDG_STATE_HOME"


@dataclass(frozen=True)
class TrustedPath:
    """One record.

    Attributes:
        path: A file, or a folder whose code `twinkle plugins test` may run; links are resolved.
        digests: The SHA-256 of each content of the file that is trusted; empty for a folder.
    """

    path: str
    digests: tuple[str, ...] = ()


def state_folder() -> str:
    """Return the folder for state that must outlive the cache: `$TWINKLE_STATE_DIR`, else the user's usual one.

    Raises:
        SettingsError: The variable is not an absolute path: a checkout could contain records of its own.
    """
    if named := os.path.expanduser(os.environ.get(STATE_VARIABLE, "")):
        if not os.path.isabs(named):
            raise SettingsError(f"{STATE_VARIABLE} must be the absolute path of a folder, got {named!r}")
        return os.path.normpath(named)
    usual = os.environ.get(HOME_VARIABLE, "")  # its specification says that a relative path must be ignored
    return os.path.join(usual if os.path.isabs(usual) else os.path.expanduser("~/.local/state"), "twinkle")


def is_trusted_file(path: str, content: bytes) -> bool:
    """Return whether a settings file or lock with this content may let code run."""
    path = _resolved(path)
    if _is_named(os.path.dirname(path)):
        return True
    record = _read(_record_file(path))
    return record is not None and hashlib.sha256(content).hexdigest() in record.digests


def is_trusted_folder(folder: str) -> bool:
    """Return whether code in a folder may be run by `twinkle plugins test`: it or a parent is trusted."""
    folder = os.path.realpath(folder)
    while True:
        if _is_named(folder) or _read(_record_file(folder)) is not None:
            return True
        parent = os.path.dirname(folder)
        if parent == folder:
            return False
        folder = parent


def trust(path: str, contents: Iterable[bytes] = ()) -> None:
    """Record that the user trusts a file with any of these contents, and with no other; or a folder.

    Raises:
        SettingsError: The record cannot be written.
    """
    path = _resolved(path) if (trusted := list(contents)) else os.path.realpath(path)
    record = {"path": path, "sha256": [hashlib.sha256(content).hexdigest() for content in trusted]}
    target = _record_file(path)
    work = f"{target}.{os.getpid()}.tmp"
    try:
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        with open(os.open(work, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.replace(work, target)
    except OSError as error:
        raise SettingsError(
            f"cannot record that {path} is trusted: {error.strerror or error}; set {STATE_VARIABLE} to a folder "
            f"that can be written, or trust the folder for one process with {FOLDER_VARIABLE}"
        ) from error


def record_own_write(path: str, before: bytes, now: bytes) -> None:
    """Keep a file trusted that Twinkle changes: call it with both contents before the write, and the new one after."""
    if not _is_named(os.path.dirname(_resolved(path))):
        trust(path, dict.fromkeys((before, now)))


def untrust(folder: str) -> list[str]:
    """Remove the records of a folder and of the files in it, and return their paths."""
    folder = os.path.realpath(folder)
    records = trusted_paths()
    # A folder inside of it that was trusted for itself stays trusted.
    gone = [r.path for r in records if folder == r.path or (r.digests and folder == os.path.dirname(r.path))]
    for path in gone:
        os.unlink(_record_file(path))
    return gone


def trusted_paths() -> list[TrustedPath]:
    """Return every record, sorted by path."""
    place = os.path.dirname(_record_file(""))
    try:
        names = os.listdir(place)
    except OSError:
        return []
    records = [_read(f"{place}/{name}") for name in names if name.endswith(".json")]
    return sorted((record for record in records if record is not None), key=lambda record: record.path)


def named_folders() -> list[str]:
    """Return the folders that `TWINKLE_TRUST_FOLDER` trusts for this process and those that it starts.

    Raises:
        SettingsError: One of them is not an absolute path: its meaning would depend on the working directory.
    """
    folders = [part for part in os.environ.get(FOLDER_VARIABLE, "").split(os.pathsep) if part]
    for folder in folders:
        if not os.path.isabs(folder):
            raise SettingsError(
                f"{FOLDER_VARIABLE} must be absolute paths of folders separated by {os.pathsep!r}, got {folder!r}; "
                f'write {FOLDER_VARIABLE}="$PWD" to trust the folder that you are in'
            )
    return [os.path.realpath(folder) for folder in folders]


def _is_named(folder: str) -> bool:
    return bool(os.environ.get(FOLDER_VARIABLE)) and folder in named_folders()


def _resolved(path: str) -> str:
    """Return a file's path with the links of its folder resolved; the file itself may be a link."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name)


def _record_file(path: str) -> str:
    name = hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return f"{state_folder()}/trusted/{name}.json"


def _read(file: str) -> TrustedPath | None:
    try:
        with open(file, "rb") as stream:
            # In a shared state folder, another user could write records of what this user trusts.
            if hasattr(os, "getuid") and os.fstat(stream.fileno()).st_uid != os.getuid():
                return None
            fields = json.load(stream)
        record = TrustedPath(fields["path"], tuple(fields["sha256"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if _record_file(record.path) == file else None
