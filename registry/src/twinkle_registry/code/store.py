"""The store of code from Hubs, under the cache: trees named by their digest, and which commit is which tree.

Nothing is run from here unless the lock or the policy says so. `receiving` writes what is read here.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ..cache import DIRECTORY_VARIABLE, HOME_VARIABLE
from ..errors import NotTrusted
from .listing import DIGEST_IN_NAMES, parse_listing, sha256
from .reference import Origin
from .tree import RENEW, Tree

LISTING = "files.sha256"


class Store:
    """One folder: `trees/<digest>/{files.sha256,files/...}` and a note `commits/<origin>` for each commit fetched."""

    def __init__(self, root: Path | None = None) -> None:
        """Use `root`, or `code` in the cache of this user."""
        self.root = _usual_root() if root is None else root

    def tree(self, digest: str) -> Tree | None:
        """Return the tree whose digest begins with `digest` (at least 32 digits), or None; its files are not read.

        Raises:
            NotTrusted: There is such a tree, and its listing is not the one that was stored.
        """
        folder = self.place(digest)
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
        note = self.note(origin)
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

    def has_whole(self, digest: str) -> bool:
        """Say whether a tree is there with every file as it must be."""
        try:
            there = self.tree(digest)
            if there is None:
                return False
            there.verify()
        except NotTrusted:
            return False
        return True

    def place(self, digest: str) -> Path:
        """Return the folder of a tree."""
        return self.root / "trees" / digest[:DIGEST_IN_NAMES]

    def note(self, origin: Origin) -> Path:
        """Return the file that says which tree a commit is."""
        return self.root / "commits" / sha256(str(origin).encode())[:DIGEST_IN_NAMES]


def _usual_root() -> Path:
    named = os.environ.get(DIRECTORY_VARIABLE)
    usual = Path(os.environ.get(HOME_VARIABLE) or "~/.cache") / "twinkle"
    return (Path(named) if named else usual).expanduser().absolute() / "code"


def _is_own(path: Path) -> bool:
    # In a shared cache folder another user could say which code a commit is.
    return not hasattr(os, "getuid") or path.stat().st_uid == os.getuid()
