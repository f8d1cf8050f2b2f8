"""`twinkle.lock`: which code this project runs, by hash: Hub repositories, PyPI distributions and local files.

A TOML file that is easy to read and to compare. It is replaced atomically, under a file lock against other
writers, and read strictly: an unknown key, a wrong type or a digest that does not match its files is an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

from ..errors import ComponentConflict, NotTrusted, SettingsError, TwinkleError
from ..naming import canonical, nearest_or_all, quoted
from ..settings import LOCK_VARIABLE, is_frozen, is_trusted_lock, lock_is_named, lock_path, untrusted_notice
from .folders import record_own_write
from .reference import HubReference, Origin
from .store import check_names, check_path, digest_of

_Entry = TypeVar("_Entry")
SCHEMA = 1
HEAD = "# Written by `twinkle plugins add|lock|remove`: which code this project runs. Keep it with the project.\n"
_HEX = re.compile(r"[0-9a-f]{64}")
_TOP = ("schema", "hub", "pypi", "file")
_MEND = "restore it from version control, or remove it and add its plugins again"


@dataclass(frozen=True)
class LockedRepository:
    """One hub repository at one commit.

    Attributes:
        reference: The reference that was added, without a name: `hf://org/repo` or `hf://org/repo@revision`.
        repository: Its repository after redirects: `hf://org/repo`.
        commit: The commit that was reviewed.
        files: Path to SHA-256.
    """

    reference: str
    repository: str
    commit: str
    files: Mapping[str, str] = field(hash=False)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the listing, which names the tree."""
        return digest_of(self.files)

    @property
    def origin(self) -> Origin:
        """Repository and commit."""
        scheme, _, repo = self.repository.partition("://")
        return Origin(scheme, repo, self.commit)


@dataclass(frozen=True, slots=True)
class LockedDistribution:
    """One distribution that pip installed: its files with their SHA-256."""

    name: str
    version: str
    files: Mapping[str, str] = field(hash=False)

    @property
    def digest(self) -> str:
        """The SHA-256 of the listing of its files."""
        return digest_of(self.files)


@dataclass(frozen=True, slots=True)
class LockedFile:
    """One local file, `path` relative to the folder of the lock."""

    path: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Lock:
    """The content of one lock file; `path` is its path, whether it exists or not.

    `is_obeyed` is False if the file is in a folder that is not trusted; then the lock has no entries.
    """

    path: Path
    hub: tuple[LockedRepository, ...] = ()
    pypi: tuple[LockedDistribution, ...] = ()
    file: tuple[LockedFile, ...] = ()
    is_obeyed: bool = True

    @classmethod
    def load(cls, path: Path | None = None) -> Lock:
        """Read the lock of this run; if it does not exist or is not trusted, return an empty one.

        A lock that is given or named by `TWINKLE_LOCK` is trusted.

        Raises:
            SettingsError: The file cannot be read, is damaged, or is of a newer version.
        """
        is_given, path = path is not None, Path(lock_path()) if path is None else path
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return cls(path)
        except OSError as error:
            raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
        if not (is_given or is_trusted_lock(str(path), content)):
            return cls(path, is_obeyed=False)

        return _parsed(content, path)

    def lacks(self, what: str) -> str:
        """Return the part of an error that says why the lock does not list something."""
        if not self.is_obeyed:
            return untrusted_notice() or f"{self.path} is not trusted"
        return f"{self.path} does not list {what}" if self.path.is_file() else f"there is no {self.path}"

    def require_trust(self, action: str) -> None:
        """Raise `NotTrusted` if the file is in a folder that is not trusted, and so was not read."""
        if not self.is_obeyed:
            raise NotTrusted(f"cannot {action}: {self.lacks('it')}")

    def refuse_unlocked(self, context: str) -> None:
        """Raise `NotTrusted` if this run is frozen; called for code that the lock does not list."""
        if is_frozen():
            raise NotTrusted(
                f"{context}: this run is frozen, and {self.lacks('it')}; "
                f"add it with 'twinkle plugins add' where it is not frozen, or "
                f"set {LOCK_VARIABLE} to the right lock"
            )

    def find(self, reference: HubReference) -> LockedRepository | None:
        """Return the entry of a reference, or None.

        For a reference with a revision, this is the entry for that revision or commit; for one without, the entry
        that was added without, or else the only one of its repository.

        Raises:
            ComponentConflict: The reference has no revision, and several are locked.
        """
        of_repo = [entry for entry in self.hub if reference.place in (_place(entry.reference), entry.repository)]
        if reference.revision:
            matching = [e for e in of_repo if str(reference) == e.reference or e.commit == reference.revision]
            return next(iter(matching), None)
        if plain := [entry for entry in of_repo if entry.reference == reference.place]:
            return plain[0]
        if len(of_repo) > 1:
            raise ComponentConflict(
                f"{reference.place} is locked at several revisions: {quoted(e.reference for e in of_repo)}; write one "
                f"of them, or remove the others: twinkle plugins remove {of_repo[0].reference}"
            )
        return next(iter(of_repo), None)

    def of_origin(self, origin: Origin) -> LockedRepository | None:
        """Return the entry for this commit of this repository, or None."""
        return next((entry for entry in self.hub if entry.origin == origin), None)

    def of_tree(self, digest: str) -> list[LockedRepository]:
        """Return the entries whose tree has this digest, or one that begins with it."""
        return [entry for entry in self.hub if entry.digest.startswith(digest)]

    def of_distribution(self, name: str) -> LockedDistribution | None:
        """Return the entry of a distribution, or None."""
        return next((entry for entry in self.pypi if canonical(entry.name) == canonical(name)), None)

    def of_file(self, file: Path) -> LockedFile | None:
        """Return the entry of a local file, or None."""
        path = self.relative(file)
        return next((entry for entry in self.file if entry.path == path), None)

    def relative(self, file: Path) -> str:
        """Return the name of a local file in the lock: its path relative to the folder of the lock."""
        return Path(os.path.relpath(file.expanduser().absolute(), self.path.parent)).as_posix()

    def with_repository(self, entry: LockedRepository) -> Lock:
        """Return the lock with `entry` in the place of the one with its reference."""
        return replace(self, hub=_with(self.hub, entry, lambda e: e.reference))

    def with_distribution(self, entry: LockedDistribution) -> Lock:
        """Return the lock with `entry` in the place of the one with its name."""
        return replace(self, pypi=_with(self.pypi, entry, lambda e: canonical(e.name)))

    def with_file(self, entry: LockedFile) -> Lock:
        """Return the lock with `entry` in the place of the one with its path."""
        return replace(self, file=_with(self.file, entry, lambda e: e.path))


# Cached: a process reads the lock at its start and at each load, and it rarely changes.
@lru_cache(maxsize=4)
def _parsed(content: bytes, path: Path) -> Lock:
    return parse_lock(content, path)


def change_lock(change: Callable[[Lock], Lock]) -> Lock:
    """Read the lock, change it and replace the file, under an exclusive file lock; return the new lock.

    Raises:
        SettingsError: The lock is damaged, or its folder cannot be written; the file stays as it was.
        NotTrusted: The folder is not trusted: entries that were not reviewed would become trusted with the new one.
    """
    path = Path(lock_path())
    try:
        with _guard(path.parent):
            lock = Lock.load()
            lock.require_trust(f"change {path}")
            changed = change(lock)
            _write_trusted(path, to_toml(changed))
    except NotTrusted:  # `NotTrusted` is an OSError, too
        raise
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}; it was not changed") from error
    return changed


def _write_trusted(path: Path, text: str) -> None:
    """Replace a lock that is trusted, so that it stays trusted; a lock named by a variable needs no record."""
    if lock_is_named():
        _replace(path, text)
        return
    before, now = path.read_bytes() if path.exists() else b"", text.encode()
    record_own_write(str(path), before, now)
    _replace(path, text)
    record_own_write(str(path), now, now)


def to_toml(lock: Lock) -> str:
    """Return the text of a lock file; entries are sorted, so that a diff shows changes only."""
    lines = [HEAD, f"schema = {SCHEMA}\n"]
    for repository in sorted(lock.hub, key=lambda e: e.reference):
        lines += _table("hub", repository, ("reference", "repository", "commit", "digest"))
        lines += _files("hub", repository.files)
    for dist in sorted(lock.pypi, key=lambda e: canonical(e.name)):
        lines += _table("pypi", dist, ("name", "version"))
        lines += _files("pypi", dist.files)
    for file in sorted(lock.file, key=lambda e: e.path):
        lines += _table("file", file, ("path", "sha256"))
    return "".join(lines)


def _with(entries: tuple[_Entry, ...], entry: _Entry, key: Callable[[_Entry], str]) -> tuple[_Entry, ...]:
    return (*(e for e in entries if key(e) != key(entry)), entry)


def _place(reference: str) -> str:
    return str(HubReference.parse(reference, context="twinkle.lock").place)


def _table(sort: str, entry: object, keys: tuple[str, ...]) -> list[str]:
    return [f"\n[[{sort}]]\n", *(f"{key} = {_string(getattr(entry, key))}\n" for key in keys)]


def _files(sort: str, files: Mapping[str, str]) -> list[str]:
    return [f"[{sort}.files]\n", *(f"{_string(path)} = {_string(files[path])}\n" for path in sorted(files))]


def _string(text: str) -> str:
    # A JSON string without \\u escapes is also a TOML string, except for DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _replace(path: Path, text: str) -> None:
    import tempfile

    path = path.resolve()  # replace the target of a link, not the link
    handle, work = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(work).chmod(path.stat().st_mode & 0o777 if path.exists() else 0o644)
        Path(work).replace(path)
    except BaseException:
        Path(work).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _guard(folder: Path) -> Iterator[None]:
    """Exclude other writers of locks in this folder; without file locks on this system, rely on the atomic rename."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no file locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def parse_lock(content: bytes, path: Path) -> Lock:
    """Parse a lock file.

    Raises:
        SettingsError: It is damaged; the text has the position and the remedy.
    """
    try:
        raw = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path} is damaged: it cannot be read as TOML ({error}); {_MEND}") from error
    reader = _LockReader(path)
    reader.known("the file", raw, _TOP)
    schema = raw.get("schema")
    if type(schema) is int and schema > SCHEMA:
        raise SettingsError(
            f"{path}: schema = {schema}, but this version reads {SCHEMA}; run: pip install -U twinkle-registry"
        )
    if schema != SCHEMA or type(schema) is not int:
        raise reader.damaged(f"schema must be {SCHEMA}, got {schema!r}")
    return Lock(
        path,
        tuple(reader.repository(table) for table in reader.tables(raw, "hub")),
        tuple(reader.distribution(table) for table in reader.tables(raw, "pypi")),
        tuple(reader.file(table) for table in reader.tables(raw, "file")),
    )


class _LockReader:
    """Parses the tables of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def damaged(self, what: str) -> SettingsError:
        return SettingsError(f"{self.path} is damaged: {what}; {_MEND}")

    def known(self, where: str, table: Mapping[str, Any], keys: tuple[str, ...]) -> None:
        for key in table:
            if key not in keys:
                raise self.damaged(f"{where} has the unknown key {key!r}, {nearest_or_all(key, keys)}")

    def tables(self, raw: Mapping[str, Any], sort: str) -> list[dict[str, Any]]:
        value = raw.get(sort, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.damaged(f"{sort} must be a list of tables [[{sort}]]")
        return value

    def repository(self, table: dict[str, Any]) -> LockedRepository:
        where, files = self._entry(table, "hub", ("reference", "repository", "commit", "digest"))
        try:
            HubReference.parse(table["reference"], context=where)
            context = HubReference.parse(table["repository"], context=where)
            Origin.checked(context.scheme, context.repo, table["commit"], context=where)
            for path in files:
                check_path(path, context=where)
            check_names(files, context=where)
        except TwinkleError as error:
            raise self.damaged(str(error)) from error
        if table["digest"] != digest_of(files):
            raise self.damaged(f"the digest of {where} does not match its files")
        return LockedRepository(table["reference"], table["repository"], table["commit"], files)

    def distribution(self, table: dict[str, Any]) -> LockedDistribution:
        _, files = self._entry(table, "pypi", ("name", "version"))
        return LockedDistribution(table["name"], table["version"], files)

    def file(self, table: dict[str, Any]) -> LockedFile:
        where = self._texts(table, "file", ("path", "sha256"), ())
        if not _HEX.fullmatch(table["sha256"]):
            raise self.damaged(f"the sha256 of {where} is not a SHA-256")
        return LockedFile(table["path"], table["sha256"])

    def _entry(self, table: dict[str, Any], sort: str, keys: tuple[str, ...]) -> tuple[str, dict[str, str]]:
        where = self._texts(table, sort, keys, ("files",))
        files = table.get("files")
        fine = isinstance(files, dict) and all(isinstance(v, str) and _HEX.fullmatch(v) for v in files.values())
        if not fine or not isinstance(files, dict):
            raise self.damaged(f"files of {where} must be a table of paths and SHA-256")
        return where, files

    def _texts(self, table: dict[str, Any], sort: str, keys: tuple[str, ...], more: tuple[str, ...]) -> str:
        where = f"{sort} {table.get(keys[0])!r}"
        self.known(where, table, (*keys, *more))
        for key in keys:
            if not isinstance(table.get(key), str) or not table[key]:
                raise self.damaged(f"{key} of {where} must be a string, got {table.get(key)!r}")
        return where
