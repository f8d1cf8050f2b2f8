"""The forms a component may be written in as text, told apart without looking anything up."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from .errors import ComponentNotFound

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://")
_PATH_STARTS = ("./", "../", "/", "~", ".\\", "..\\")


class Reference(NamedTuple):
    """One parsed text.

    Attributes:
        form: `name` (`Name`, `dist/Name`), `module` (`package.module:Attr`), `file` (`./file.py:Name`) or `hub`
            (`hf://org/repo@revision#Name`).
        place: The plugin, module, file or scheme; empty for a bare name.
        name: What is wanted from there; for a Hub, the whole text.
    """

    form: Literal["name", "module", "file", "hub"]
    place: str
    name: str


def parse_reference(text: str, kind: str) -> Reference:
    """Tell which form `text` has; `kind` is only for the error of one that has none."""
    if scheme := _SCHEME.match(text):
        return Reference("hub", scheme[1], text)
    place, colon, name = text.rpartition(":")
    if text.endswith(".py") or (text.startswith(_PATH_STARTS) and not (colon and name)):
        raise ComponentNotFound(f"{kind} {text!r} is a file; say what you want from it: '{text.rstrip(':')}:Name'")
    if colon and (place.endswith(".py") or place.startswith(_PATH_STARTS)):
        return Reference("file", place, name)
    if colon:
        if not place or not all(part.isidentifier() for part in [*place.split("."), *name.split(".")]):
            raise ComponentNotFound(f"{kind} {text!r} is not of the form 'package.module:Attr'")
        return Reference("module", place, name)
    dist, _, name = text.rpartition("/")
    if not name:
        raise ComponentNotFound(f"{kind} {text!r} has no name; {FORMS}")
    return Reference("name", dist, name)


FORMS = "write a name, 'plugin/Name', 'package.module:Attr', './file.py:Name' or 'hf://org/repo@revision#Name'"
