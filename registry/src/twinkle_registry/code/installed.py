"""What pip installed, by hash: the files of a distribution that has plugins."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from ..errors import ComponentNotFound, NotTrusted
from ..manifest import PluginRecord
from ..naming import canonical, nearest_or_all
from .listing import LEFT_OUT_ENDINGS, LEFT_OUT_FOLDERS, few, sha256
from .lock import LockedDistribution

# What an installer writes for itself differs between machines that run the same code.
_OF_INSTALLERS = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json")


def distribution_now(name: str, records: Iterable[PluginRecord]) -> LockedDistribution:
    """Return the distribution `name` as it is installed now.

    Args:
        name: Of the distribution, or of one of its plugins.
        records: All installed plugins.

    Raises:
        ComponentNotFound: No installed plugin belongs to such a distribution.
    """
    pip = [record for record in records if "://" not in record.dist]
    own = [r for r in pip if canonical(name) in (canonical(r.dist), canonical(r.name))]
    if not own:
        raise ComponentNotFound(
            f"no plugin {name!r} is installed; {nearest_or_all(name, (r.name for r in pip))}; code of a Hub is written "
            "'hf://org/repo', a file './file.py'"
        )
    own = [record for record in pip if canonical(record.dist) == canonical(own[0].dist)]
    files = {path: sha256(place.read_bytes()) for path, place in installed_files(own).items()}
    return LockedDistribution(own[0].dist, own[0].version, files)


def installed_files(records: list[PluginRecord]) -> dict[str, Path]:
    """Return every file of one distribution that matters for what it does, as the lock calls it, with its place."""
    found: dict[str, Path] = {}
    dist = _distribution(records[0].dist)
    if dist is not None and not _is_editable(dist):
        for file in dist.files or ():
            place = Path(os.path.normpath(str(file.locate())))
            if _counts(file.as_posix()) and place.is_file():
                found[file.as_posix()] = place
    for record in records:
        folder = Path(record.location).parent
        for place in sorted(folder.rglob("*")) if record.location and folder.is_dir() else ():
            path = f"{record.package}/{place.relative_to(folder).as_posix()}"
            if _counts(path) and place.is_file():
                found[path] = place
    return found


def check_record_file(name: str) -> None:
    """Raise `NotTrusted` if files of a distribution are not what its RECORD says: it was edited after installation."""
    dist = _distribution(name)
    edited = []
    for file in (dist.files if dist is not None else None) or ():
        place = Path(str(file.locate()))
        if file.hash is None or file.hash.mode != "sha256" or not _counts(file.as_posix()):
            continue
        said = base64.urlsafe_b64decode(file.hash.value + "=" * (-len(file.hash.value) % 4)).hex()
        if not place.is_file() or sha256(place.read_bytes()) != said:
            edited.append(file.as_posix())
    if edited:
        raise NotTrusted(
            f"{name} is not as it was installed ({few(edited)}); run: pip install --force-reinstall --no-deps {name}"
        )


def _counts(path: str) -> bool:
    parts = path.split("/")
    outside = path.startswith(("..", "/"))  # scripts and man pages: they name the environment
    of_installer = parts[0].endswith(".dist-info") and parts[-1] in _OF_INSTALLERS
    return not (outside or of_installer or LEFT_OUT_FOLDERS & {*parts} or path.endswith(LEFT_OUT_ENDINGS))


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
