"""The index of published components that may not be installed; `twinkle plugins search` and errors use it.

The index is a few TOML files, `registry/index/` in the repository, which are part of every wheel of the registry.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .errors import ManifestError, TwinkleError
from .naming import canonical, quoted
from .reading import KIND, NAME, PLUGIN, Table, matches, read_toml

SCHEMA = 1
OWN_FILE = "twinkle.toml"
"""The generated file with our own distributions; `[[successor]]` is read from this file only."""
_REPOSITORY = re.compile(r"(hf|ms)://[\w.-]+/[\w.-]+(@[\w.+/-]+)?")
_LINE = re.compile(r"\S(.*\S)?")
_URL = re.compile(r"https://\S+")
_KEYS = ("kind", "name", "package", "repository", "summary", "author", "licence", "homepage")


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One published component.

    Attributes:
        kind: Its kind.
        name: Its name in scripts, once it is installed.
        summary: One line of description.
        author: Its author.
        package: The distribution that pip installs; empty for code of a hub.
        repository: `hf://org/repo` or `ms://org/repo`; empty for a distribution.
        licence: Its licence as an SPDX expression, or empty.
        homepage: A URL, or empty.
    """

    kind: str
    name: str
    summary: str
    author: str
    package: str = ""
    repository: str = ""
    licence: str = ""
    homepage: str = ""

    @property
    def place(self) -> str:
        """The distribution or the repository."""
        return self.package or self.repository

    @property
    def command(self) -> str:
        """The command that installs it."""
        return f"pip install {self.package}" if self.package else f"twinkle plugins add {self.repository}"


def read_index(path: Path) -> list[IndexEntry]:
    """Return the entries of one file.

    Raises:
        ManifestError: The file cannot be read, or has any problem; all of them are listed at once.
    """
    problems: list[str] = []
    top = Table(read_toml(path), "", problems)
    top.refuse_unknown(("schema", "component", "export", "successor"))
    top.take("schema", _schema)
    entries = [_entry(table) for table in top.tables("component")]
    seen: set[tuple[str, str, str]] = set()
    for entry in entries:
        if (key := (entry.kind, entry.name, entry.place)) in seen:
            problems.append(f"component: {' '.join(key)} is listed twice")
        seen.add(key)
    if problems:
        raise ManifestError("\n  ".join([f"{path}: {len(problems)} wrong", *problems]))
    return entries


@dataclass(frozen=True, slots=True)
class IndexExport:
    """One attribute that a published plugin adds to a namespace of core."""

    module: str
    name: str
    package: str


@cache
def index_exports() -> tuple[IndexExport, ...]:
    """Return every `[[export]]` of the index files; read once."""
    exports = []
    for path in sorted(index_folder().glob("*.toml")):
        problems: list[str] = []
        for table in Table(read_toml(path), "", problems).tables("export"):
            values = [table.take(key, matches(_LINE, "one line of text"), "") for key in ("module", "name", "package")]
            exports.append(IndexExport(*values))
        if problems:
            raise ManifestError("\n  ".join([f"{path}: {len(problems)} wrong", *problems]))
    return tuple(exports)


@cache
def index_entries() -> tuple[IndexEntry, ...]:
    """Return all entries, those of the community's files first; read once."""
    return tuple(entry for path in sorted(index_folder().glob("*.toml")) for entry in read_index(path))


def index_folder() -> Path:
    """Return the folder of the index: `published` beside this module in a wheel, `registry/index` in a checkout."""
    here = Path(__file__).resolve()
    shipped = here.parent / "published"
    return shipped if shipped.is_dir() else here.parents[2] / "index"


@cache
def _successors() -> tuple[tuple[str, str], ...]:
    """Return (package, the package that parts of it belonged to before) for our own distributions; read once."""
    problems: list[str] = []
    own = index_folder() / OWN_FILE
    tables = Table(read_toml(own), "", problems).tables("successor") if own.is_file() else []
    return tuple((canonical(table.raw["package"]), canonical(table.raw["of"])) for table in tables)


def successors_of(packages: Iterable[str]) -> frozenset[str]:
    """Return the distributions that parts of these packages moved to, by canonical name; our own index lists them."""
    names = set(map(canonical, packages))
    return frozenset(successor for successor, former in _successors() if former in names)


def search(words: Iterable[str], kind: str = "", entries: Sequence[IndexEntry] | None = None) -> list[IndexEntry]:
    """Return the entries that contain every word, ignoring case; those with more of the words in their name come first.

    Args:
        words: Search terms for name, kind, summary, author and place; without any, all entries match.
        kind: Only entries of this kind.
        entries: The entries to search, by default the whole index.
    """
    terms = [word.lower() for word in words]
    matching = []
    for entry in index_entries() if entries is None else entries:
        text = " ".join((entry.name, entry.kind, entry.summary, entry.author, entry.place)).lower()
        if kind in ("", entry.kind) and all(word in text for word in terms):
            matching.append(entry)
    return sorted(matching, key=lambda entry: -sum(word in entry.name.lower() for word in terms))


def where_to_get(
    name: str, kind: str = "", dist: str = "", *, installed: Iterable[str] = (), exact: bool = False
) -> str:
    """Return a sentence that says which package or repository has a component, or an empty string.

    Args:
        name: The component, in any case.
        kind: Its kind, or empty for any.
        dist: The plugin that was requested, or empty.
        installed: Distributions and repositories that are installed; they are left out.
        exact: Ignore entries whose names differ in case.
    """
    try:
        entries = index_entries()
    except TwinkleError:  # the caller is about to raise another error, which must not be lost
        return ""
    matching = [entry for entry in entries if entry.name.lower() == name.lower() and kind in ("", entry.kind)]
    matching = [entry for entry in matching if entry.name == name or not exact]
    here = {canonical(place) for place in installed}
    matching = [entry for entry in matching if canonical(entry.place) not in here]
    if dist:
        matching = [entry for entry in matching if canonical(entry.package) == canonical(dist)]
    if not matching:
        return ""
    places = dict.fromkeys(entry.place for entry in matching)
    first = matching[0]
    note = "review it first" if first.repository else "run"
    spelling = "" if first.name == name else f" as {first.name!r}"
    return f"the index lists it{spelling} in {quoted(places)}; {note}: {first.command}"


def where_to_get_export(module: str, name: str) -> str:
    """Return a sentence that says which package exports `module.name`, or an empty string."""
    try:
        packages = [e.package for e in index_exports() if (e.module, e.name) == (module, name)]
    except TwinkleError:  # the caller is about to raise another error, which must not be lost
        return ""
    return f"it is part of {packages[0]}, run: pip install {packages[0]}" if packages else ""


def _entry(table: Table) -> IndexEntry:
    table.refuse_unknown(_KEYS)
    entry = IndexEntry(
        kind=table.take("kind", matches(KIND, "a kind such as 'loss'"), ""),
        name=table.take("name", matches(NAME, "a name without spaces, '/', ':' and '#'"), ""),
        summary=table.take("summary", matches(_LINE, "one line of text"), ""),
        author=table.take("author", matches(_LINE, "a name"), ""),
        package=table.optional("package", matches(PLUGIN, "the name of a distribution"), ""),
        repository=table.optional("repository", matches(_REPOSITORY, "'hf://org/repo' or 'ms://org/repo'"), ""),
        licence=table.optional("licence", matches(_LINE, "an SPDX expression such as 'Apache-2.0'"), ""),
        homepage=table.optional("homepage", matches(_URL, "a URL that starts with https://"), ""),
    )
    if ("package" in table.raw) == ("repository" in table.raw):
        table.complain("package", "set either package or repository")
    return entry


def _schema(value: Any) -> str:
    return "" if type(value) is int and value == SCHEMA else f"the number {SCHEMA}"
