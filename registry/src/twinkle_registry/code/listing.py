"""The listing of a folder of code: a line `<sha256>  <path>` for each file, sorted. Its own SHA-256 names the tree.

The format is that of `sha256sum`, so a person can check a tree by hand.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from ..errors import NotTrusted
from ..regular import kind_of, read_regular

MAX_FILES = 2_000
MAX_BYTES = 64 * 2**20
MAX_SOURCE_BYTES = 2**20  # for one Python file; its syntax tree takes a hundred times as much memory
MAX_PATH = 400
# What version control, downloaders and tools leave behind, and compiled code, which is never run.
LEFT_OUT_FOLDERS = frozenset(
    {".git", ".hg", ".svn", ".cache", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
)
LEFT_OUT_ENDINGS = (".pyc", ".pyo")
DIGEST_IN_NAMES = 32
_LINE = re.compile(r"(?P<sha256>[0-9a-f]{64})  (?P<path>.+)")


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
    """Return what became of the files of `old`: `path changed`, `path removed`, `path added`."""
    both = sorted({*old, *new})
    words = {path: "added" if path not in old else "removed" if path not in new else "changed" for path in both}
    return [f"{shown(path)} {words[path]}" for path in both if old.get(path) != new.get(path)]


def few(texts: list[str]) -> str:
    """Join the first of some texts for a message."""
    return ", ".join(texts[:5]) + (f" and {len(texts) - 5} more" if len(texts) > 5 else "")


def scan(folder: Path, *, asked: str) -> dict[str, str]:
    """Return path and SHA-256 of every file below `folder` that belongs to the code.

    Raises:
        NotTrusted: It holds links or devices, names that do not mean the same everywhere, too many files or bytes.
    """
    files: dict[str, str] = {}
    total = 0
    for path in _walk(folder, asked):
        relative = path.relative_to(folder).as_posix()
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise NotTrusted(f"{asked}: {shown(relative)} is {kind_of(status.st_mode)}; code is made of plain files")
        check_path(relative, asked=asked)
        total += status.st_size
        _check_size(relative, status.st_size, len(files) + 1, total, asked)
        content = _read(path, relative, asked)
        if relative.endswith(".py"):
            _check_encoding(relative, content, asked)
        files[relative] = sha256(content)
    check_names(files, asked=asked)
    return files


def check_path(path: str, *, asked: str) -> None:
    """Refuse a path that leaves the folder, or means something else on another system."""
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
            f'{asked}: the path {shown(path)} is refused; names have printable characters without \\ : * ? " < > |, '
            f"stay inside the repository, and have at most {MAX_PATH} characters"
        )


def check_names(files: Iterable[str], *, asked: str) -> None:
    """Refuse names that shadow each other: by case, by Unicode form, or a module beside a package of its name."""
    seen: dict[str, str] = {}
    for path in files:
        module = path.removesuffix("/__init__.py") if path.endswith("/__init__.py") else path.removesuffix(".py")
        for name in {path, module}:
            key = unicodedata.normalize("NFKC", name).casefold()
            twin = seen.setdefault(key, path)
            if twin != path:
                raise NotTrusted(f"{asked}: {shown(twin)} and {shown(path)} shadow each other; rename one")


def shown(text: str) -> str:
    """Return a text of a stranger as it may be put on a terminal: quoted, without control and direction marks."""
    kept = "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text[:200])
    return f"'{kept}'" + ("..." if len(text) > 200 else "")


def _walk(folder: Path, asked: str) -> Iterator[Path]:
    for root, folders, names in os.walk(folder, followlinks=False):
        here = Path(root)
        for name in [name for name in folders if (here / name).is_symlink()]:
            raise NotTrusted(f"{asked}: {shown(name)} is a link to a folder; code is made of plain files")
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT_FOLDERS)
        yield from (here / name for name in sorted(names) if not name.endswith(LEFT_OUT_ENDINGS))


def _check_size(path: str, size: int, count: int, total: int, asked: str) -> None:
    if path.endswith(".py") and size > MAX_SOURCE_BYTES:
        raise NotTrusted(f"{asked}: {shown(path)} has {size} bytes; a Python file has at most {MAX_SOURCE_BYTES}")
    if count > MAX_FILES or total > MAX_BYTES:
        raise NotTrusted(
            f"{asked}: more than {MAX_FILES} files or {MAX_BYTES // 2**20} MiB; a plugin is code, weights and data "
            "belong into a repository of their own"
        )


def _check_encoding(path: str, content: bytes, asked: str) -> None:
    """Refuse source that Python would read otherwise than a person does: in UTF-7 a comment may be code."""
    import io
    import tokenize

    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    except SyntaxError as error:
        raise NotTrusted(f"{asked}: {shown(path)} cannot be read as text: {error.msg}") from error
    if encoding not in ("utf-8", "utf-8-sig"):
        raise NotTrusted(f"{asked}: {shown(path)} is written in {shown(encoding)}; source is UTF-8, as it is shown")


def _read(path: Path, relative: str, asked: str) -> bytes:
    """Return the bytes of a file that was a regular one a moment ago."""
    try:
        return read_regular(path, follow=False)
    except OSError as error:
        raise NotTrusted(f"{asked}: {shown(relative)} cannot be read: {error.strerror}") from error
