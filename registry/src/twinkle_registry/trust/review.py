"""The summary of code that a person reviews before trusting it: files and sizes, imports and calls, and changes.

Text from the repository is escaped before it is printed: a file may contain terminal escape sequences.
"""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from ..errors import NotTrusted
from ..manifest import PluginRecord
from ..naming import canonical
from ..validation import missing_requirements
from .lock import Lock, LockedDistribution, LockedFile, LockedRepository
from .reference import HubReference
from .store import Store, Tree, differences

# This list cannot be complete: it shows where to look first, not what is safe.
_METHODS_OF_FILES = (".read_text", ".read_bytes", ".write_text", ".write_bytes")
_REACHES = {
    "starts processes": (
        "subprocess",
        "multiprocessing",
        "pty",
        "os.system",
        "os.popen",
        "os.exec",
        "os.spawn",
        "os.fork",
    ),
    "uses the network": ("socket", "ssl", "http", "urllib", "ftplib", "smtplib", "requests", "httpx", "aiohttp"),
    "runs text as code": ("eval", "exec", "compile", "__import__", "importlib", "runpy", "code", "marshal"),
    "unpickles": ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "torch.load"),
    "calls native code": ("ctypes", "cffi", "_ctypes"),
    "reads the environment": ("os.environ", "os.getenv"),
    "opens files": ("open", "io", "codecs", "tempfile", "os.open", ".open", *_METHODS_OF_FILES),
    "removes files": ("os.remove", "os.unlink", "os.rmdir", "shutil.rmtree", ".unlink", ".rmdir"),
}
_NATIVE = (".so", ".pyd", ".dll", ".dylib")
MAX_DIFF_LINES = 400
MAX_LINE = 1_000
MAX_DIFF_BYTES = 256 * 1024
MAX_COMPARED_LINES = 5_000  # difflib takes hours on files crafted for that purpose
Sort = Literal["hub", "pypi", "file"]


@dataclass(frozen=True)
class FileReview:
    """One file: its size in bytes, its imports and the risky capabilities that its source shows."""

    path: str
    size: int
    imports: tuple[str, ...] = ()
    reaches: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Review:
    """The review of one tree, compared with the previously trusted one, if any; `diff` is printable."""

    files: tuple[FileReview, ...]
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    diff: tuple[str, ...] = field(default=())

    @property
    def size(self) -> int:
        """Total size of all files in bytes."""
        return sum(file.size for file in self.files)

    @property
    def imports(self) -> list[str]:
        """Top-level packages that it imports, without the standard library and without imports of its tests."""
        return sorted(_packages(file for file in self.files if not _is_test(file.path)))

    @property
    def imports_of_tests(self) -> list[str]:
        """Top-level packages that only its tests import."""
        return sorted(_packages(file for file in self.files if _is_test(file.path)) - {*self.imports})


def review(tree: Tree, before: Tree | None = None) -> Review:
    """Review a tree; `before` is the tree of this repository that was trusted last."""
    files = tuple(review_file(path, tree.read(path)) for path in sorted(tree.files))
    if before is None:
        return Review(files)
    both = tree.files.keys() & before.files.keys()
    changed = sorted(path for path in both if tree.files[path] != before.files[path])
    return Review(
        files,
        added=tuple(sorted(tree.files.keys() - before.files.keys())),
        removed=tuple(sorted(before.files.keys() - tree.files.keys())),
        changed=tuple(changed),
        diff=tuple(_limited(_diff(tree, before))),
    )


def review_file(path: str, content: bytes) -> FileReview:
    """Review one file."""
    if not path.endswith(".py"):
        native = path.lower().endswith(_NATIVE) or ".so." in path.lower()
        return FileReview(path, len(content), reaches=("is native code",) if native else ())
    try:
        parsed = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return FileReview(path, len(content), problem=printable(f"cannot be parsed: {error}"))
    names = [name for node in ast.walk(parsed) for name in _imported(node)]
    used = [*names, *(name for node in ast.walk(parsed) for name in _named(node))]
    reaches = [what for what, marks in _REACHES.items() if any(_is_below(name, marks) for name in used)]
    return FileReview(path, len(content), tuple(sorted(set(names))), tuple(reaches))


def printable(text: str) -> str:
    """Return a line with control characters and marks of direction escaped; tabs are kept."""
    return "".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in text)


def _packages(files: Iterable[FileReview]) -> set[str]:
    return {name.partition(".")[0] for file in files for name in file.imports} - sys.stdlib_module_names


def _is_test(path: str) -> bool:
    *folders, name = path.split("/")
    return bool({"test", "tests"} & {*folders}) or name == "conftest.py" or name.startswith("test_")


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (printable(alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
        yield printable(node.module)


def _named(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and not node.level:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Attribute):
        yield f".{node.attr}"  # a method of any object
        if isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        yield node.func.id


def _is_below(name: str, marks: Iterable[str]) -> bool:
    return any(
        name == mark or name.startswith(f"{mark}.") or (mark.startswith("os.") and name.startswith(mark))
        for mark in marks
    )


def _diff(tree: Tree, before: Tree) -> Iterator[str]:
    for path in sorted({*tree.files, *before.files}):
        if tree.files.get(path) == before.files.get(path):
            continue
        old = before.read(path) if path in before.files else b""
        new = tree.read(path) if path in tree.files else b""
        both = old + new
        if len(both) > MAX_DIFF_BYTES or both.count(b"\n") > MAX_COMPARED_LINES or b"\0" in both:
            yield f"{printable(path)}: {len(old)} bytes before, {len(new)} now; too large, or not text"
            continue
        was, now = (printable_lines(content) for content in (old, new))
        lines = difflib.unified_diff(was, now, f"trusted/{path}", f"new/{path}", lineterm="")
        yield from (_shortened(line) for line in lines)


def printable_lines(content: bytes) -> list[str]:
    """Return the printable lines of a file; only line feeds end a line."""
    lines = content.decode("utf-8", "backslashreplace").split("\n")
    return [printable(line.removesuffix("\r")) for line in (lines[:-1] if lines[-1] == "" else lines)]


def _shortened(line: str) -> str:
    more = len(line) - MAX_LINE
    return f"{line[:MAX_LINE]}... and {more} more characters" if more > 0 else line


def _limited(lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        if number == MAX_DIFF_LINES:
            yield f"... more than {MAX_DIFF_LINES} lines; read the rest in the files"
            return
        yield line


@dataclass(frozen=True)
class Proposal:
    """A repository, distribution or file to review before it is trusted.

    Attributes:
        sort: `hub`, `pypi` or `file`.
        name: The requested reference, without the name of a component.
        version: The commit or the version; empty for a file.
        origin: The repository and commit of a reference, after redirects.
        trusted: The commit or version that is locked, or empty.
        review: Its files and what is new in them; for PyPI, names of files only.
        offers: `kind Name` of each component, and each command and lifecycle hook.
        missing: Requirements of its components that are not installed.
        state: `new`, `changed` or `same` as what is locked.
        problem: Why it could not be read, in which case it was not accepted; or empty.
    """

    sort: Sort
    name: str
    version: str = ""
    origin: str = ""
    trusted: str = ""
    review: Review = field(default_factory=lambda: Review(()))
    offers: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    state: Literal["new", "changed", "same"] = "new"
    problem: str = ""


Decide = Callable[[Proposal], bool]


def of_repository(
    reference: HubReference, entry: LockedRepository, record: PluginRecord, tree: Tree, lock: Lock, store: Store
) -> Proposal:
    """Propose `entry`, whose files are those of `tree` and whose plugin is `record`."""
    before = _before(lock, entry)
    specs = record.manifest.components if record.manifest else ()
    missing = dict.fromkeys(str(lack) for spec in specs for lack in missing_requirements(spec))
    return Proposal(
        "hub",
        str(reference),
        entry.commit,
        origin=entry.repository,
        trusted=before.commit if before else "",
        review=review(tree, _intact_tree(store, before)),
        offers=_offers(record),
        missing=tuple(missing),
        state="same" if entry in lock.hub else "changed" if before else "new",
    )


def of_distribution(now: LockedDistribution, records: Iterable[PluginRecord], lock: Lock) -> Proposal:
    """Propose a distribution as it is installed; `records` are those of all installed plugins."""
    locked = lock.of_distribution(now.name)
    own = [record for record in records if canonical(record.dist) == canonical(now.name)]
    changed = tuple(differences(locked.files, now.files)) if locked else ()
    return Proposal(
        "pypi",
        now.name,
        now.version,
        trusted=locked.version if locked else "",
        review=Review((), changed=changed),
        offers=tuple(offer for record in own for offer in _offers(record)),
        state=_state(locked, now),
    )


def of_file(entry: LockedFile, source: bytes, lock: Lock) -> Proposal:
    """Propose a local file with the text `source`."""
    locked = next((known for known in lock.file if known.path == entry.path), None)
    seen = Review((review_file(entry.path, source),))
    return Proposal("file", entry.path, review=seen, state=_state(locked, entry))


def _before(lock: Lock, new: LockedRepository) -> LockedRepository | None:
    """Return the previously trusted entry: that of this reference, or else the newest one of this repository."""
    own = [entry for entry in lock.hub if entry.reference == new.reference]
    near = [entry for entry in lock.hub if entry.repository == new.repository]
    return next(iter([*own, *reversed(near)]), None)


def _intact_tree(store: Store, entry: LockedRepository | None) -> Tree | None:
    """Return the tree of an entry, or None if the store does not have it intact."""
    try:
        tree = store.tree(entry.digest) if entry else None
        if tree is not None:
            tree.verify()
    except NotTrusted:
        return None
    return tree


def _offers(record: PluginRecord) -> tuple[str, ...]:
    """Return the components of a plugin, and its commands and hooks, which run without being named."""
    if record.manifest is None:
        return ()
    offers = [f"{spec.kind} {spec.name}" for spec in record.manifest.components]
    offers += [f"command {command.name}" for command in record.manifest.commands]
    return (*offers, *(f"hook {name}" for name in (record.manifest.hooks.implements if record.manifest.hooks else ())))


def _state(locked: object, now: object) -> Literal["new", "changed", "same"]:
    return "new" if locked is None else "same" if locked == now else "changed"
