"""The store of code from hubs, under the cache: trees of files named by their digest, and the tree of each commit.

The listing of a tree has a line `<sha256>  <path>` for each file, sorted, in the format of `sha256sum`; its own SHA-256
is the digest that names the tree. `download` writes the store. Code in it runs only if the lock or the policy allow it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

from ..errors import NotTrusted
from ..naming import CODE_PACKAGE, safe_repr
from ..regular import kind_of, read_regular
from ..settings import CACHE_VARIABLE, HOME_VARIABLE
from .reference import Origin

MAX_FILES = 2_000
MAX_BYTES = 64 * 2**20
MAX_SOURCE_BYTES = 2**20  # for one Python file; parsing takes a hundred times as much memory
MAX_PATH = 400
# Folders and files of version control, downloaders and tools, and compiled code, which is never run.
IGNORED_FOLDERS = frozenset(
    {".git", ".hg", ".svn", ".cache", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
)
IGNORED_ENDINGS = (".pyc", ".pyo")
DIGEST_IN_NAMES = 32
_LINE = re.compile(r"(?P<sha256>[0-9a-f]{64})  (?P<path>.+)")
RENEW = "fetch it again with: twinkle plugins verify --fetch"
LISTING = "files.sha256"


def sha256(content: bytes) -> str:
    """Return the SHA-256 as 64 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def listing_text(files: Mapping[str, str]) -> str:
    """Return the listing of `files`, a map from path to SHA-256."""
    return "".join(f"{files[path]}  {path}\n" for path in sorted(files))


def digest_of(files: Mapping[str, str]) -> str:
    """Return the name of a tree: the SHA-256 of its listing."""
    return sha256(listing_text(files).encode())


def parse_listing(text: str) -> dict[str, str]:
    """Return the map from path to SHA-256 that `listing_text` wrote.

    Raises:
        ValueError: A line is not of that form.
    """
    files = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"{line[:80]!r} is not a line of a listing")
        files[match["path"]] = match["sha256"]
    return files


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return how the files differ from those of `old`: `path changed`, `path removed`, `path added`."""
    both = sorted({*old, *new})
    words = {path: "added" if path not in old else "removed" if path not in new else "changed" for path in both}
    return [f"{safe_repr(path)} {words[path]}" for path in both if old.get(path) != new.get(path)]


def first_few(texts: list[str]) -> str:
    """Join the first five texts for a message."""
    return ", ".join(texts[:5]) + (f" and {len(texts) - 5} more" if len(texts) > 5 else "")


def hash_folder(folder: Path, *, context: str) -> dict[str, str]:
    """Return path and SHA-256 of every file below `folder` that belongs to the code.

    Raises:
        NotTrusted: It has links or devices, unportable names, or too many files or bytes.
    """
    files: dict[str, str] = {}
    total = 0
    for path in _walk(folder, context):
        relative = path.relative_to(folder).as_posix()
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise NotTrusted(
                f"{context}: {safe_repr(relative)} is {kind_of(status.st_mode)}; code must consist of regular files"
            )
        check_path(relative, context=context)
        total += status.st_size
        _check_size(relative, status.st_size, len(files) + 1, total, context)
        content = _read(path, relative, context)
        if relative.endswith(".py"):
            _check_encoding(relative, content, context)
        files[relative] = sha256(content)
    check_names(files, context=context)
    return files


def check_path(path: str, *, context: str) -> None:
    """Refuse a path that leaves the folder, or that other systems interpret differently."""
    pure = PurePosixPath(path)
    parts = path.split("/")
    wrong = (
        pure.is_absolute()
        or any(part in ("", ".", "..") or part.endswith((" ", ".")) for part in parts)
        or any(c in '\\:*?"<>|' or not c.isprintable() for c in path)
        or len(path) > MAX_PATH
    )
    if wrong:
        raise NotTrusted(
            f"{context}: the path {safe_repr(path)} is refused; names must have printable characters without "
            f'\\ : * ? " < > |, stay inside the repository, and have at most {MAX_PATH} characters'
        )


def check_names(files: Iterable[str], *, context: str) -> None:
    """Refuse names that shadow each other: by case, by Unicode form, or a module beside a package of its name."""
    seen: dict[str, str] = {}
    for path in files:
        module = path.removesuffix("/__init__.py") if path.endswith("/__init__.py") else path.removesuffix(".py")
        for name in {path, module}:
            key = unicodedata.normalize("NFKC", name).casefold()
            twin = seen.setdefault(key, path)
            if twin != path:
                raise NotTrusted(f"{context}: {safe_repr(twin)} and {safe_repr(path)} shadow each other; rename one")


def _walk(folder: Path, context: str) -> Iterator[Path]:
    for root, folders, names in os.walk(folder, followlinks=False):
        here = Path(root)
        for name in [name for name in folders if (here / name).is_symlink()]:
            raise NotTrusted(f"{context}: {safe_repr(name)} is a link to a folder; code must consist of regular files")
        folders[:] = sorted(name for name in folders if name not in IGNORED_FOLDERS)
        yield from (here / name for name in sorted(names) if not name.endswith(IGNORED_ENDINGS))


def _check_size(path: str, size: int, count: int, total: int, context: str) -> None:
    if path.endswith(".py") and size > MAX_SOURCE_BYTES:
        raise NotTrusted(
            f"{context}: {safe_repr(path)} has {size} bytes; a Python file must have at most {MAX_SOURCE_BYTES}"
        )
    if count > MAX_FILES or total > MAX_BYTES:
        raise NotTrusted(
            f"{context}: more than {MAX_FILES} files or {MAX_BYTES // 2**20} MiB; put weights and data into a "
            "repository of their own"
        )


def _check_encoding(path: str, content: bytes, context: str) -> None:
    """Refuse encodings that hide code from a reader: in UTF-7, a comment may be code."""
    import io
    import tokenize

    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    except SyntaxError as error:
        raise NotTrusted(f"{context}: {safe_repr(path)} cannot be read as text: {error.msg}") from error
    if encoding not in ("utf-8", "utf-8-sig"):
        raise NotTrusted(f"{context}: {safe_repr(path)} is written in {safe_repr(encoding)}; source must be UTF-8")


def _read(path: Path, relative: str, context: str) -> bytes:
    """Return the bytes of a file, even if it was replaced since its type was checked."""
    try:
        return read_regular(path, follow=False)
    except OSError as error:
        raise NotTrusted(f"{context}: {safe_repr(relative)} cannot be read: {error.strerror}") from error


@dataclass(frozen=True)
class Tree:
    """The files of one version of one repository.

    Attributes:
        folder: Their folder.
        files: Map from path, relative and with `/`, to SHA-256. Files that are not listed are ignored.
    """

    folder: Path
    files: Mapping[str, str]

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the listing, which names the tree."""
        return digest_of(self.files)

    @cached_property
    def folders(self) -> frozenset[str]:
        """Every folder that contains a file, at any depth; the empty path is the tree itself."""
        return frozenset(str(parent) for path in self.files for parent in _parents(path))

    def read(self, path: str) -> bytes:
        """Return the bytes of a listed file.

        Raises:
            NotTrusted: The file is missing or differs from the one that was added.
            FileNotFoundError: The file is not listed.
        """
        if path not in self.files:
            raise FileNotFoundError(f"{safe_repr(path)} is not among the files of {self.folder}")
        try:
            content = read_regular(self.folder / path)
        except OSError as error:
            raise NotTrusted(
                f"{self.folder / path} was added, but cannot be read now ({error.strerror}); {RENEW}"
            ) from error
        if sha256(content) != self.files[path]:
            raise NotTrusted(
                f"{self.folder / path} was changed after it was added: its SHA-256 is {sha256(content)[:16]}..., "
                f"expected {self.files[path][:16]}...; it was not run, {RENEW}"
            )
        return content

    def verify(self) -> None:
        """Read every file; the first one that differs from what was added raises `NotTrusted`."""
        for path in self.files:
            self.read(path)

    def module_name(self, repository: str) -> str:
        """Return the module name of the tree: the name of its repository and the digest."""
        stem = repository.rstrip("/").rpartition("/")[2].lower()
        word = "".join(c if c.isascii() and c.isalnum() else "_" for c in stem).strip("_") or "code"
        return f"{CODE_PACKAGE}.{word}_{self.digest[:DIGEST_IN_NAMES]}"


def _parents(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[:count]) for count in range(len(parts) + 1)]


@dataclass(frozen=True)
class Snapshot(Tree):
    """A tree during one load: each file is read and hashed once, and its bytes stay in memory."""

    _contents: dict[str, bytes] = field(default_factory=dict, compare=False, repr=False)

    def read(self, path: str) -> bytes:
        """Return the bytes of a listed file; see `Tree.read`."""
        if path not in self._contents:
            self._contents[path] = super().read(path)
        return self._contents[path]


class Store:
    """One folder: `trees/<digest>/{files.sha256,files/...}` and `commits/<origin>` for each downloaded commit."""

    def __init__(self, root: Path | None = None) -> None:
        """Use `root`, or `code` in the cache of this user."""
        self.root = _usual_root() if root is None else root

    def tree(self, digest: str) -> Tree | None:
        """Return the tree whose digest begins with `digest` (at least 32 digits), or None; its files are not read.

        Raises:
            NotTrusted: Its listing was changed after it was stored.
        """
        folder = self.tree_folder(digest)
        try:
            listing = (folder / LISTING).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise NotTrusted(f"{folder / LISTING} cannot be read ({error.strerror}); {RENEW}") from error
        if not sha256(listing).startswith(digest):
            raise NotTrusted(f"{folder / LISTING} was changed after it was stored; no file of it was run; {RENEW}")
        return Tree(folder / "files", parse_listing(listing.decode()))

    def tree_of(self, origin: Origin) -> Tree | None:
        """Return the tree that was downloaded as this commit, or None."""
        note = self.commit_file(origin)
        try:
            if not _is_own(note):
                return None
            digest, _, recorded_origin = note.read_text("utf-8").partition(" ")
        except (OSError, ValueError):
            return None
        return self.tree(digest) if recorded_origin == str(origin) and len(digest) >= DIGEST_IN_NAMES else None

    def origins(self, digest: str) -> list[Origin]:
        """Return the commits that were downloaded as this tree."""
        origins = []
        for note in sorted((self.root / "commits").glob("[0-9a-f]*")):
            with contextlib.suppress(OSError, ValueError):
                recorded_digest, _, recorded_origin = note.read_text("utf-8").partition(" ")
                if _is_own(note) and recorded_digest.startswith(digest):
                    place, _, commit = recorded_origin.rpartition("@")
                    scheme, _, repo = place.partition("://")
                    origins.append(Origin(scheme, repo, commit))
        return origins

    def has_intact(self, digest: str) -> bool:
        """Return whether the store has a tree with every file unchanged."""
        try:
            tree = self.tree(digest)
            if tree is None:
                return False
            tree.verify()
        except NotTrusted:
            return False
        return True

    def tree_folder(self, digest: str) -> Path:
        """Return the folder of a tree."""
        return self.root / "trees" / digest[:DIGEST_IN_NAMES]

    def commit_file(self, origin: Origin) -> Path:
        """Return the file that maps a commit to its tree."""
        return self.root / "commits" / sha256(str(origin).encode())[:DIGEST_IN_NAMES]


def _usual_root() -> Path:
    named = os.environ.get(CACHE_VARIABLE)
    usual = Path(os.environ.get(HOME_VARIABLE) or "~/.cache") / "twinkle"
    return (Path(named) if named else usual).expanduser().absolute() / "code"


def _is_own(path: Path) -> bool:
    # In a shared cache folder, another user could map a commit to another tree.
    return not hasattr(os, "getuid") or path.stat().st_uid == os.getuid()
