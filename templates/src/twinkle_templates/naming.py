"""What a new plugin may be called."""

import keyword
import re
import sys

from twinkle.errors import ArgumentError
from twinkle_registry import nearest

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_TAKEN = ("twinkle", "test", "tests", "benchmarks")
MAX_LENGTH = 50


def check_kind(kind: str, known: tuple[str, ...]) -> str:
    """Return the scaffold that `kind` names; hyphens may stand for underscores and the other way round.

    Raises:
        ArgumentError: there is no such scaffold; names the nearest, or why there is none.
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
    """Return `name` if a distribution and, with underscores, a package may have it.

    Raises:
        ArgumentError: it may not; says what is wrong and offers the nearest name that will do.
    """
    if not _NAME.fullmatch(name):
        raise ArgumentError(f"{name!r} is no name for a plugin: {_hint(name)}")
    if len(name) > MAX_LENGTH:
        raise ArgumentError(f"{name!r} has {len(name)} characters; a name has at most {MAX_LENGTH}")
    package = name.replace("-", "_")
    if keyword.iskeyword(package) or package in sys.stdlib_module_names:
        raise ArgumentError(f"{name!r} would be the package {package!r}, which is Python's own; try 'acme-{name}'")
    if package in _TAKEN or package.startswith("twinkle_"):
        last = name.rpartition("-")[2]
        raise ArgumentError(f"{name!r} would be the package {package!r}, which is taken; try 'acme-{last}'")
    return name


def _hint(name: str) -> str:
    words = "it is lower-case words and digits with hyphens between them, and begins with a letter"
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()
    tried = re.sub(r"[^a-z0-9]+", "-", split).strip("-0123456789")
    return f"{words}; try {tried!r}" if _NAME.fullmatch(tried) else f"{words}, such as 'acme-focal'"
