"""The store of code from Hubs, under the cache: trees named by their digest, and which commit is which tree.

A tree appears whole, by one rename, or not at all. Nothing is run from here unless the lock or the policy says so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ..cache import DIRECTORY_VARIABLE, HOME_VARIABLE
from ..errors import NotTrusted
from .listing import DIGEST_IN_NAMES, listing_text, parse_listing, sha256
from .reference import Origin
from .tree import RENEW, Tree

LISTING = "files.sha256"
_DAY = 86_400.0


class Store:
    """One folder: `trees/<digest>/{files.sha256,files/...}`, `commits/<origin>` and `incoming/` for what is fetched."""

    def __init__(self, root: Path | None = None) -> None:
        """Use `root`, or `code` in the cache of this user."""
        self.root = _usual_root() if root is None else root

    def tree(self, digest: str) -> Tree | None:
        """Return the tree whose digest begins with `digest` (at least 32 digits), or None; its files are not read.

        Raises:
            NotTrusted: There is such a tree, and its listing is not the one that was stored.
        """
        folder = self.root / "trees" / digest[:DIGEST_IN_NAMES]
        try:
            listing = (folder / LISTING).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise NotTrusted(f"{folder / LISTING} cannot be read ({error.strerror}); {RENEW}") from error
        if not sha256(listing).startswith(digest):
            raise NotTrusted(f"{folder / LISTING} was changed after it was stored; nothing of it is run; {RENEW}")
        return Tree(folder / "files", parse_listing(listing.decode()))

    def tree_of(self, origin: Origin) -> Tree | None:
        """Return the tree that was once fetched as this commit, or None."""
        note = self._note(origin)
        try:
            if not _is_own(note):
                return None
            digest, _, said = note.read_text("utf-8").partition(" ")
        except (OSError, ValueError):
            return None
        return self.tree(digest) if said == str(origin) and len(digest) >= DIGEST_IN_NAMES else None

    def origins(self, digest: str) -> list[Origin]:
        """Return the commits that were fetched as this tree."""
        found = []
        for note in sorted((self.root / "commits").glob("[0-9a-f]*")):
            with contextlib.suppress(OSError, ValueError):
                noted, _, said = note.read_text("utf-8").partition(" ")
                if _is_own(note) and noted.startswith(digest):
                    place, _, commit = said.rpartition("@")
                    scheme, _, repo = place.partition("://")
                    found.append(Origin(scheme, repo, commit))
        return found

    @contextlib.contextmanager
    def incoming(self) -> Iterator[Path]:
        """Give an empty folder for a download; whatever is not kept is gone when the block ends."""
        place = self.root / "incoming"
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        _clear(place)
        work = Path(tempfile.mkdtemp(dir=place))
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def keep(self, arrived: Tree, origin: Origin) -> Tree:
        """Move a tree of `incoming` into the store, and note which commit it is; return the tree there."""
        arrived.verify()
        target = self.root / "trees" / arrived.digest[:DIGEST_IN_NAMES]
        if not self._has_whole(arrived.digest):
            self._place(arrived, target)
        self._note(origin).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(self._note(origin), f"{arrived.digest} {origin}")
        return Tree(target / "files", arrived.files)

    def _has_whole(self, digest: str) -> bool:
        try:
            there = self.tree(digest)
            if there is None:
                return False
            there.verify()
        except NotTrusted:
            return False
        return True

    def _place(self, arrived: Tree, target: Path) -> None:
        work = arrived.folder.parent / "tree"
        work.mkdir()
        for path in arrived.files:
            (work / "files" / path).parent.mkdir(parents=True, exist_ok=True)
            (arrived.folder / path).rename(work / "files" / path)
        (work / LISTING).write_text(listing_text(arrived.files), "utf-8", newline="\n")
        for file in work.rglob("*"):
            if file.is_file():
                _sync(file)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for _ in range(10):
            with contextlib.suppress(OSError):
                work.rename(target)
                return
            # Another process stored the same tree, which is then whole, or what is there is damaged.
            if self._has_whole(arrived.digest):
                return
            with contextlib.suppress(OSError):
                target.rename(arrived.folder.parent / f"damaged-{time.monotonic_ns()}")
        work.rename(target)

    def _note(self, origin: Origin) -> Path:
        return self.root / "commits" / sha256(str(origin).encode())[:DIGEST_IN_NAMES]


def _usual_root() -> Path:
    named = os.environ.get(DIRECTORY_VARIABLE)
    usual = Path(os.environ.get(HOME_VARIABLE) or "~/.cache") / "twinkle"
    return (Path(named) if named else usual).expanduser().absolute() / "code"


def _is_own(path: Path) -> bool:
    # In a shared cache folder another user could say which code a commit is.
    return not hasattr(os, "getuid") or path.stat().st_uid == os.getuid()


def _clear(place: Path) -> None:
    """Remove what killed processes left a day ago."""
    for left in place.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _DAY:
                shutil.rmtree(left, ignore_errors=True)


def _write(path: Path, text: str) -> None:
    handle, work = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    Path(work).replace(path)


def _sync(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
