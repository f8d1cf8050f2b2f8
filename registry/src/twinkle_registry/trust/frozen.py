"""Hashes of installed distributions, and the frozen run, which refuses all code that differs from the lock."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from ..errors import ComponentNotFound, NotTrusted
from ..files import source_of
from ..manifest import PluginRecord
from ..naming import CODE_PACKAGE, canonical, nearest_or_all
from ..settings import LOCK_VARIABLE
from .lock import Lock, LockedDistribution
from .store import IGNORED_ENDINGS, IGNORED_FOLDERS, differences, first_few, sha256

# These files of the installer differ between machines that run the same code.
_OF_INSTALLERS = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json")
_CODE = f"{CODE_PACKAGE}."


def installed_distribution(name: str, records: Iterable[PluginRecord]) -> LockedDistribution:
    """Return the distribution `name` as it is installed now.

    Args:
        name: Name of the distribution, or of one of its plugins.
        records: All installed plugins.

    Raises:
        ComponentNotFound: No installed plugin belongs to such a distribution.
    """
    pip = [record for record in records if "://" not in record.dist]
    own = [r for r in pip if canonical(name) in (canonical(r.dist), canonical(r.name))]
    if not own:
        raise ComponentNotFound(
            f"no plugin {name!r} is installed; {nearest_or_all(name, (r.name for r in pip))}; write code from a hub as "
            "'hf://org/repo', and a file as './file.py'"
        )
    own = [record for record in pip if canonical(record.dist) == canonical(own[0].dist)]
    files = {path: sha256(place.read_bytes()) for path, place in installed_files(own).items()}
    return LockedDistribution(own[0].dist, own[0].version, files)


def installed_files(records: list[PluginRecord]) -> dict[str, Path]:
    """Return every file of one distribution that affects its behaviour, by its name in the lock."""
    files: dict[str, Path] = {}
    dist = _distribution(records[0].dist)
    if dist is not None and not _is_editable(dist):
        for file in dist.files or ():
            place = Path(os.path.normpath(str(file.locate())))
            if _counts(file.as_posix()) and place.is_file():
                files[file.as_posix()] = place
    for record in records:
        folder = Path(record.location).parent
        for place in sorted(folder.rglob("*")) if record.location and folder.is_dir() else ():
            path = f"{record.package}/{place.relative_to(folder).as_posix()}"
            if _counts(path) and place.is_file():
                files[path] = place
    return files


def check_record_file(name: str) -> None:
    """Raise `NotTrusted` if files of a distribution do not match its RECORD: they were edited after installation."""
    dist = _distribution(name)
    edited = []
    for file in (dist.files if dist is not None else None) or ():
        place = Path(str(file.locate()))
        if file.hash is None or file.hash.mode != "sha256" or not _counts(file.as_posix()):
            continue
        recorded = base64.urlsafe_b64decode(file.hash.value + "=" * (-len(file.hash.value) % 4)).hex()
        if not place.is_file() or sha256(place.read_bytes()) != recorded:
            edited.append(file.as_posix())
    if edited:
        raise NotTrusted(
            f"{name} was changed after its installation ({first_few(edited)}); "
            f"run: pip install --force-reinstall --no-deps {name}"
        )


def _counts(path: str) -> bool:
    parts = path.split("/")
    outside = path.startswith(("..", "/"))  # scripts and man pages contain the path of the environment
    of_installer = parts[0].endswith(".dist-info") and parts[-1] in _OF_INSTALLERS
    return not (outside or of_installer or IGNORED_FOLDERS & {*parts} or path.endswith(IGNORED_ENDINGS))


def _distribution(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _is_editable(dist: Distribution) -> bool:
    try:
        return bool(json.loads(dist.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable"))
    except (ValueError, AttributeError):
        return False


class Frozen:
    """Refuses code that is not locked, for one registry. Code from a hub is checked by its finder instead."""

    def __init__(self) -> None:
        """Read the lock of this run."""
        self.lock = Lock.load()
        self._checked: set[str] = set()

    def why_not(self, record: PluginRecord) -> str:
        """Return why a plugin may not be used, judging by its name and version alone, or an empty string."""
        if record.package.startswith(_CODE):
            return ""
        locked = self.lock.of_distribution(record.dist)
        if locked is None:
            way = f"run 'twinkle plugins lock', or set {LOCK_VARIABLE} to the right lock"
            return f"this run is frozen, and {self.lock.lacks(record.dist)}; {way}"
        if locked.version != record.version:
            return (
                f"this run is frozen, and {self.lock.path} has {locked.name} {locked.version}, but version "
                f"{record.version} is installed; run: pip install '{locked.name}=={locked.version}'"
            )
        return ""

    def check(self, record: PluginRecord, records: list[PluginRecord]) -> None:
        """Check every file of the distribution of a plugin against the lock, once.

        Raises:
            NotTrusted: It is not locked, or one of its files differs from the lock.
        """
        if record.package.startswith(_CODE) or record.dist in self._checked:
            return
        if reason := self.why_not(record):
            raise NotTrusted(f"plugin {record.name}: {reason}")
        locked = self.lock.of_distribution(record.dist)
        if locked is not None:
            self._compare(locked, records)
        self._checked.add(record.dist)

    def source(self, path: str, *, context: str) -> bytes:
        """Return the content of a local file, which must match the lock.

        Raises:
            NotTrusted: It is not locked, or was changed since.
        """
        file = Path(path).expanduser().absolute()
        locked = self.lock.of_file(file)
        if locked is None:
            self.lock.refuse_unlocked(context)
        source = source_of(file, context)
        if locked is not None and sha256(source) != locked.sha256:
            raise NotTrusted(
                f"{context}: this run is frozen, and {file} was changed since it was locked; unfreeze the run, then "
                f"run: twinkle plugins add {path}"
            )
        return source

    def check_module(self, module: str, records: list[PluginRecord], *, context: str) -> None:
        """Check the distribution that a module belongs to, for `package.module:Attr`.

        Raises:
            NotTrusted: It belongs to no locked distribution.
        """
        if f"{module}.".startswith(_CODE):
            return
        top = module.partition(".")[0]
        try:
            spec = find_spec(top)
        except (ImportError, ValueError, AttributeError):  # `__main__`, and third-party finders
            spec = None
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        for record in records:
            own = installed_files([record]) if self.lock.of_distribution(record.dist) else {}
            if origin is not None and any(place.resolve() == origin for place in own.values()):
                self.check(record, records)
                return
        if not self.lock.is_obeyed:
            self.lock.refuse_unlocked(context)
        raise NotTrusted(
            f"{context}: this run is frozen, and {top!r} belongs to no plugin that {self.lock.path} lists; name a "
            "component of a locked plugin"
        )

    def _compare(self, locked: LockedDistribution, records: list[PluginRecord]) -> None:
        try:
            installed = installed_distribution(locked.name, records)
        except ComponentNotFound as error:
            raise NotTrusted(f"{locked.name} is locked, but not installed") from error
        if changes := differences(locked.files, installed.files):
            raise NotTrusted(
                f"{locked.name} {locked.version}: this run is frozen, and its files differ from the lock "
                f"({first_few(changes)}); run: "
                f"pip install --force-reinstall --no-deps '{locked.name}=={locked.version}'"
            )
