"""Checks of the name of a new plugin."""

import keyword
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from twinkle.errors import ArgumentError
from twinkle_registry import nearest

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_TAKEN = ("twinkle", "test", "tests", "benchmarks")
MAX_LENGTH = 50


def check_kind(kind: str, known: tuple[str, ...]) -> str:
    """Return the scaffold of `kind`; hyphens and underscores are interchangeable.

    Raises:
        ArgumentError: the scaffold does not exist; the message suggests the nearest.
    """
    from twinkle.kinds import KINDS

    alike = {name.replace("-", "_"): name for name in known}
    if (plain := kind.replace("-", "_")) in alike:
        return alike[plain]
    if plain in KINDS:
        raise ArgumentError(f"there is no scaffold for kind {plain!r}; there are {', '.join(known)}")
    close = nearest(kind, known, 1)
    hint = f"nearest: {close[0]!r}" if close else f"there are {', '.join(known)}"
    raise ArgumentError(f"unknown kind {kind!r}; {hint}")


def check_name(name: str) -> str:
    """Return `name` if it is valid for a distribution and, with underscores, for a package.

    Raises:
        ArgumentError: the name is not valid; the message says why and suggests the nearest valid name.
    """
    if not _NAME.fullmatch(name):
        raise ArgumentError(f"{name!r} is not a valid plugin name: {_hint(name)}")
    if len(name) > MAX_LENGTH:
        raise ArgumentError(f"{name!r} has {len(name)} characters; a name has at most {MAX_LENGTH}")
    package = name.replace("-", "_")
    if keyword.iskeyword(package) or package in sys.stdlib_module_names:
        raise ArgumentError(f"{name!r} would be the package {package!r}, which is Python's own; try 'acme-{name}'")
    if package in _TAKEN or package.startswith("twinkle_"):
        rest = name.removeprefix("twinkle-")
        raise ArgumentError(f"{name!r} would be the package {package!r}, which is taken; try 'acme-{rest}'")
    if place := _installed(name, package):
        other = f"try 'acme-{name}'" if not name.startswith("acme-") else "choose another name"
        raise ArgumentError(f"{name!r} would take the place of what is installed already: {place}; {other}")
    return name


def _installed(name: str, package: str) -> str:
    """Return where something of that name is installed, except a project below the current folder."""
    spec = find_spec(package)
    if spec is not None:
        places = [Path(place) for place in (spec.origin, *(spec.submodule_search_locations or ())) if place]
        if any(_is_ours(place.resolve()) for place in places):
            return ""
        return f"the package {package!r}{f' at {places[0]}' if places else ''}"
    try:
        return f"the distribution {name!r} {distribution(name).version}"
    except PackageNotFoundError:
        return ""


def _is_ours(place: Path) -> bool:
    """Return whether a path is below the current folder, and not in a virtual environment there."""
    return place.is_relative_to(Path.cwd()) and not {"site-packages", "dist-packages"} & set(place.parts)


def _hint(name: str) -> str:
    words = "it is lower-case words and digits with hyphens between them, and begins with a letter"
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()
    tried = re.sub(r"[^a-z0-9]+", "-", split).lstrip("-0123456789").rstrip("-")
    return f"{words}; try {tried!r}" if _NAME.fullmatch(tried) else f"{words}, such as 'acme-focal'"
