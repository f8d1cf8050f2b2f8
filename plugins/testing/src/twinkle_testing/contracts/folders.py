"""Plugins in folders: their package is imported from the folder, even if another one is installed."""

import hashlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from typing import Any, ClassVar

from twinkle.errors import ComponentNotFound, ManifestError
from twinkle_registry import MANIFEST_NAME, Manifest, PluginRecord, read_manifest


def plugin_in(folder: Path) -> PluginRecord:
    """Return the plugin whose manifest is in a folder, in a package in it, or in one of its `src/`.

    In this process it replaces an installed plugin of the same name.

    Args:
        folder: a project, a package, or a repository of a hub with the manifest at its top.

    Raises:
        ComponentNotFound: the folder has no plugin or several, or the package cannot be imported from there.
        ManifestError: the manifest cannot be read, or has problems.
    """
    from twinkle._registry import registry

    manifest = manifest_in(folder)
    for known in registry().records:
        if known.location and Path(known.location).resolve() == manifest:
            return known
    package = manifest.parent
    if package == folder.resolve() and _is_repository(package):
        root = _RepositoryFinder.name_of(package)
        return _added(_manifest_of_repository(manifest, root), root, manifest)
    if not package.name.isidentifier():
        raise ManifestError(f"{manifest} lies in {package.name!r}, which cannot be imported; put it into a package")
    _make_importable(package)
    return _added(read_manifest(manifest, package.name, "0", package=package.name), package.name, manifest)


def manifest_in(folder: Path) -> Path:
    """Return the one manifest of a folder, a package in it, or a package of its `src/`; nothing is imported.

    Raises:
        ComponentNotFound: there is no manifest, or there are several.
    """
    places = [p for pattern in ("", "*/", "src/*/") for p in sorted(folder.glob(pattern + MANIFEST_NAME))]
    if not places:
        raise ComponentNotFound(f"{folder} holds no {MANIFEST_NAME}, nor does a package in it or in its src/")
    if len(places) > 1:
        raise ComponentNotFound(
            f"{folder} holds several plugins; name one of {', '.join(str(p.parent) for p in places)}"
        )
    return places[0].resolve()


def _manifest_of_repository(path: Path, root: str) -> Manifest:
    """Read a manifest whose refs may begin with a dot or with the plugin's name as a package, as on a hub."""
    from twinkle_registry.reading import parse_manifest, read_toml

    raw = read_toml(path)
    name = raw.get("name")
    package = name.replace("-", "_").replace(".", "_") if isinstance(name, str) else ""
    return parse_manifest(raw, str(path), path.parent.name, "0", package=package, root=root)


def _added(manifest: Manifest, root: str, path: Path) -> PluginRecord:
    from twinkle._registry import registry

    registry().withdraw(manifest.name)
    return registry().add(PluginRecord(manifest.name, "0", root, str(path), manifest))


def _is_repository(folder: Path) -> bool:
    """Return whether a folder with a manifest at its top cannot be imported as a package by its name."""
    return not folder.name.isidentifier() or not (folder / "__init__.py").is_file()


class _RepositoryFinder:
    """Imports repositories as packages under unique names, like code from a hub."""

    folders: ClassVar[dict[str, Path]] = {}

    @classmethod
    def name_of(cls, folder: Path) -> str:
        """Register the repository in a folder, and return the name under which it is imported."""
        word = "".join(c if c.isascii() and c.isalnum() else "_" for c in folder.name)
        name = f"twinkle_repository_{word}_{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"
        cls.folders[name] = folder
        if cls not in sys.meta_path:
            sys.meta_path.append(cls)
        return name

    @classmethod
    def find_spec(cls, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a repository; Python finds its submodules by the path."""
        folder = cls.folders.get(fullname)
        if folder is None:
            return None
        init = folder / "__init__.py"
        if init.is_file():
            return spec_from_file_location(fullname, init, submodule_search_locations=[str(folder)])
        spec = ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec


def _make_importable(package: Path) -> None:
    """Make this process import the package from its folder."""
    place = str(package.parent)
    if place not in sys.path:
        sys.path.insert(0, place)
    spec = find_spec(package.name)
    found = Path(spec.origin).resolve().parent if spec and spec.origin else None
    if found != package:
        raise ComponentNotFound(
            f"{package} has no __init__.py, or {found} is imported in its place; rename one of them"
        )
