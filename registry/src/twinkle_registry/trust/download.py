"""Brings code from a Hub into the store: from a reference to a commit, and from a commit to a stored tree.

The hub only knows repositories and bytes. A tree appears in the store whole, by one rename, or not at all.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from ..errors import NotTrusted, PluginBroken, SettingsError, TwinkleError
from ..settings import CACHE_VARIABLE
from .lock import LockedRepository
from .reference import HubReference, Origin
from .store import LISTING, Store, Tree, differences, first_few, hash_folder, listing_text

_DAY = 86_400.0
_ATTEMPTS = 10


class CodeHub(Protocol):
    """The methods of a component of kind `hub` that loading code needs."""

    def commit_of(self, repo: str, revision: str | None) -> tuple[str, str]:
        """Return the repository after redirects, and the commit that `revision` (or the default branch) means now."""
        ...

    def download_code(self, repo: str, commit: str, target: Path) -> None:
        """Write the files of one commit into the empty folder `target`."""
        ...


def resolve(hub: CodeHub, reference: HubReference, *, asked: str) -> Origin:
    """Ask the hub which commit a reference means, and where its repository is now.

    Raises:
        NotTrusted: A commit was requested, and the hub answers with another.
        TwinkleError: What the hub raises, for instance without a network.
    """
    with _reported(reference.scheme, asked):
        repo, commit = hub.commit_of(reference.repo, reference.revision or None)
    origin = Origin.checked(reference.scheme, repo, commit, asked=asked)
    if reference.is_commit and commit != reference.revision:
        raise NotTrusted(f"{asked}: commit {reference.revision} was asked for, and the hub answered with {commit}")
    return origin


@contextlib.contextmanager
def downloaded(hub: CodeHub, origin: Origin, store: Store, *, asked: str) -> Iterator[Tree]:
    """Download one commit into the staging folder and yield its tree; what is not stored is deleted at the end.

    Raises:
        NotTrusted: It contains files that no plugin may have; see `hash_folder`.
        TwinkleError: What the hub raises, for instance when the repository vanishes meanwhile.
    """
    with staging_folder(store) as work:
        folder = work / "arrived"
        folder.mkdir()
        with _reported(origin.scheme, asked):
            hub.download_code(origin.repo, origin.commit, folder)
            files = hash_folder(folder, asked=asked)
        if not any(path.endswith(".py") for path in files):
            raise NotTrusted(f"{asked}: {origin} holds no Python file, so it is not a plugin")
        yield Tree(folder, files)


def fetch(hub: CodeHub, origin: Origin, store: Store, *, asked: str, expected: LockedRepository | None) -> Tree:
    """Bring one commit into the store and return its tree.

    Raises:
        NotTrusted: It is locked, and the hub has other files for this commit; nothing is stored.
    """
    with downloaded(hub, origin, store, asked=asked) as tree:
        if expected is not None and tree.digest != expected.digest:
            changed = first_few(differences(expected.files, tree.files))
            raise NotTrusted(
                f"{asked}: the hub has other files for {origin} than those that were added ({changed}); nothing "
                f"was stored. If you expected this, review it: twinkle plugins add {expected.reference}"
            )
        return store_tree(store, tree, origin)


@contextlib.contextmanager
def _reported(scheme: str, asked: str) -> Iterator[None]:
    try:
        yield
    except TwinkleError:
        raise
    except Exception as error:  # a hub is a plugin, and may raise anything
        raise PluginBroken(f"{asked}: the hub {scheme}:// failed: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def staging_folder(store: Store) -> Iterator[Path]:
    """Yield an empty folder for a download; what is not moved to the store is deleted when the block ends.

    Raises:
        SettingsError: The store cannot be written.
    """
    with _writable(store):
        store.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = store.root / "incoming"
        place.mkdir(exist_ok=True)
        _clear(place)
        work = Path(tempfile.mkdtemp(dir=place))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def store_tree(store: Store, arrived: Tree, origin: Origin) -> Tree:
    """Move a tree out of the staging folder into the store, and record which commit it is; return the stored tree.

    Raises:
        SettingsError: The store cannot be written; it was not changed.
    """
    with _writable(store):
        if not store.has_intact(arrived.digest):
            _place(store, arrived)
        note = store.commit_file(origin)
        note.parent.mkdir(exist_ok=True)
        _write(note, f"{arrived.digest} {origin}")
    return Tree(store.tree_folder(arrived.digest) / "files", arrived.files)


@contextlib.contextmanager
def _writable(store: Store) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SettingsError(
            f"the store of code, {store.root}, cannot be written: {error.strerror or error}; free some space, or set "
            f"{CACHE_VARIABLE} to another cache folder"
        ) from error


def _place(store: Store, arrived: Tree) -> None:
    target, work = store.tree_folder(arrived.digest), arrived.folder.parent / "tree"
    work.mkdir()
    for path in arrived.files:
        (work / "files" / path).parent.mkdir(parents=True, exist_ok=True)
        (arrived.folder / path).rename(work / "files" / path)
    (work / LISTING).write_text(listing_text(arrived.files), "utf-8", newline="\n")
    for file in work.rglob("*"):
        if file.is_file():
            _sync(file)
    target.parent.mkdir(exist_ok=True)
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(OSError):
            work.rename(target)
            return
        # Another process stored the same tree, which is then intact, or the stored tree is damaged.
        if store.has_intact(arrived.digest):
            return
        with contextlib.suppress(OSError):
            target.rename(arrived.folder.parent / f"damaged-{time.monotonic_ns()}")
    work.rename(target)


def _clear(place: Path) -> None:
    """Remove what killed processes left more than a day ago."""
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
