"""Checks of the installation for `twinkle plugins doctor`: missing folders and conflicting files."""

import json
import os
import site
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

from twinkle_registry import PluginRecord
from twinkle_registry.naming import canonical


@dataclass(frozen=True)
class Problem:
    """A problem and its remedy (empty if `what` contains it).

    Attributes:
        kind: type of the problem.
        what: description.
        remedy: command or action that solves it.
        optional: it matters only if the component is used, as for an extra that is not installed.
    """

    kind: str
    what: str
    remedy: str = ""
    optional: bool = False


def gone_editables(dists: Iterable[Distribution]) -> dict[str, Problem]:
    """Return a problem for each editable distribution whose folder no longer exists, by canonical name."""
    missing = {}
    for dist in dists:
        folder = _editable_folder(dist)
        if folder is not None and not folder.is_dir():
            name = _name(dist)
            missing[canonical(name)] = Problem(
                "stale editable install",
                f"{name} {dist.version} was installed as editable from {folder}, which no longer exists",
                f"run pip install -e in its new folder, or pip uninstall {name}",
            )
    return missing


def gone_paths(dists: Iterable[Distribution]) -> Iterator[Problem]:
    """Yield lines of `.pth` files with missing folders, except for distributions that are already reported."""
    reported = [folder for dist in dists if (folder := _editable_folder(dist)) and not folder.is_dir()]
    for file, line in _path_lines():
        path = Path(os.path.normpath(file.parent / line))
        if not path.exists() and not any(path.is_relative_to(folder) for folder in reported):
            yield Problem(
                "stale path file",
                f"{file} adds {path} to sys.path, which does not exist",
                f"reinstall the package that it belongs to, or remove {file}",
            )


def second_owners(dists: Iterable[Distribution], records: Iterable[PluginRecord]) -> Iterator[Problem]:
    """Yield distributions with files in the package of another one: the last installed one has overwritten them."""
    owners = {"twinkle": "twinkle-core", "twinkle_registry": "twinkle-registry"}
    owners |= {record.package: record.dist for record in records if record.package and "://" not in record.dist}
    for dist in dists:
        record = f"\n{dist.read_text('RECORD') or ''}"
        for package, owner in owners.items():
            if f"\n{package}/" in record and canonical(name := _name(dist)) != canonical(owner):
                yield Problem(
                    f"second owner of {package}/",
                    f"{name} {dist.version} installs files into the package {package!r}, which belongs to {owner}",
                    f"pip uninstall {name}, then pip install --force-reinstall --no-deps {owner}",
                )


def second_commands(dists: Iterable[Distribution]) -> Iterator[Problem]:
    """Yield other distributions that install a command `twinkle`: the last installed one has overwritten the others."""
    for dist in dists:
        commands = [entry.name for entry in dist.entry_points if entry.group == "console_scripts"]
        if "twinkle" in commands and canonical(name := _name(dist)) != "twinkle-cli":
            yield Problem(
                "second command twinkle",
                f"{name} {dist.version} installs a command 'twinkle', which belongs to twinkle-cli",
                f"pip uninstall {name}, then pip install --force-reinstall --no-deps twinkle-cli; until then: "
                "python -m twinkle.cli",
            )


def _name(dist: Distribution) -> str:
    return dist.metadata["Name"] or "?"  # an interrupted uninstall leaves metadata without a name


def _editable_folder(dist: Distribution) -> Path | None:
    """Return the folder that an editable distribution was installed from; None for any other distribution."""
    try:
        origin = json.loads(dist.read_text("direct_url.json") or "{}")
        url = urlparse(origin["url"]) if origin["dir_info"]["editable"] else None
    except (ValueError, KeyError, TypeError):
        return None
    return Path(url2pathname(url.path)) if url is not None and url.scheme == "file" else None


def _path_lines() -> Iterator[tuple[Path, str]]:
    folders = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
    for folder in dict.fromkeys(folders):
        for file in sorted(Path(folder).glob("*.pth")):
            try:
                lines = file.read_text("utf-8", errors="replace").splitlines()
            except OSError:
                continue
            for line in map(str.strip, lines):
                if line and not line.startswith(("#", "import ", "import\t")):
                    yield file, line
