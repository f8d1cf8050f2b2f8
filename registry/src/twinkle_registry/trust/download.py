"""Downloads code from a hub into the store: resolves a reference to a commit, and stores the tree of a commit.

A tree is stored atomically, by one rename.
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
        """Return the repository after redirects, and the current commit of `revision` (or of the default branch)."""
        ...

    def download_code(self, repo: str, commit: str, target: Path) -> None:
        """Write the files of one commit into the empty folder `target`."""
        ...


def resolve(hub: CodeHub, reference: HubReference, *, context: str) -> Origin:
    """Resolve a reference to a commit, and follow redirects of its repository.

    Raises:
        NotTrusted: The reference has a commit, and the hub answers with another one.
        TwinkleError: Raised by the hub, for example without a network.
    """
    with _reported(reference.scheme, context):
        repo, commit = hub.commit_of(reference.repo, reference.revision or None)
    origin = Origin.checked(reference.scheme, repo, commit, context=context)
    if reference.is_commit and commit != reference.revision:
        raise NotTrusted(f"{context}: the hub answered with commit {commit}, expected {reference.revision}")
    return origin


@contextlib.contextmanager
def downloaded(hub: CodeHub, origin: Origin, store: Store, *, context: str) -> Iterator[Tree]:
    """Download one commit into the staging folder and yield its tree; it is deleted at the end unless it was stored.

    Raises:
        NotTrusted: It contains files that no plugin may have; see `hash_folder`.
        TwinkleError: Raised by the hub, for example if the repository disappears meanwhile.
    """
    with staging_folder(store) as work:
        folder = work / "arrived"
        folder.mkdir()
        with _reported(origin.scheme, context):
            hub.download_code(origin.repo, origin.commit, folder)
            files = hash_folder(folder, context=context)
        if not any(path.endswith(".py") for path in files):
            raise NotTrusted(f"{context}: {origin} contains no Python file, so it is not a plugin")
        yield Tree(folder, files)


def fetch(hub: CodeHub, origin: Origin, store: Store, *, context: str, expected: LockedRepository | None) -> Tree:
    """Download one commit into the store and return its tree.

    Raises:
        NotTrusted: The commit is locked, and its files on the hub differ from the lock; nothing is stored.
    """
    with downloaded(hub, origin, store, context=context) as tree:
        if expected is not None and tree.digest != expected.digest:
            changed = first_few(differences(expected.files, tree.files))
            raise NotTrusted(
                f"{context}: the files of {origin} on the hub differ from those that were added ({changed}); nothing "
                f"was stored. If you expected this, review the change: twinkle plugins add {expected.reference}"
            )
        return store_tree(store, tree, origin)


@contextlib.contextmanager
def _reported(scheme: str, context: str) -> Iterator[None]:
    try:
        yield
    except TwinkleError:
        raise
    except Exception as error:  # a hub is a plugin, and may raise anything
        raise PluginBroken(f"{context}: the hub {scheme}:// failed: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def staging_folder(store: Store) -> Iterator[Path]:
    """Yield an empty folder for a download; files that were not moved to the store are deleted at the end of the block.

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


def store_tree(store: Store, downloaded_tree: Tree, origin: Origin) -> Tree:
    """Move a tree out of the staging folder into the store, and record which commit it is; return the stored tree.

    Raises:
        SettingsError: The store cannot be written; it was not changed.
    """
    with _writable(store):
        if not store.has_intact(downloaded_tree.digest):
            _move_into_store(store, downloaded_tree)
        note = store.commit_file(origin)
        note.parent.mkdir(exist_ok=True)
        _write(note, f"{downloaded_tree.digest} {origin}")
    return Tree(store.tree_folder(downloaded_tree.digest) / "files", downloaded_tree.files)


@contextlib.contextmanager
def _writable(store: Store) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SettingsError(
            f"cannot write to the code store {store.root}: {error.strerror or error}; free some space, or set "
            f"{CACHE_VARIABLE} to another cache folder"
        ) from error


def _move_into_store(store: Store, downloaded_tree: Tree) -> None:
    target, work = store.tree_folder(downloaded_tree.digest), downloaded_tree.folder.parent / "tree"
    work.mkdir()
    for path in downloaded_tree.files:
        (work / "files" / path).parent.mkdir(parents=True, exist_ok=True)
        (downloaded_tree.folder / path).rename(work / "files" / path)
    (work / LISTING).write_text(listing_text(downloaded_tree.files), "utf-8", newline="\n")
    for file in work.rglob("*"):
        if file.is_file():
            _sync(file)
    target.parent.mkdir(exist_ok=True)
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(OSError):
            work.rename(target)
            return
        # Another process stored the same tree, which is then intact, or the stored tree is damaged.
        if store.has_intact(downloaded_tree.digest):
            return
        with contextlib.suppress(OSError):
            target.rename(downloaded_tree.folder.parent / f"damaged-{time.monotonic_ns()}")
    work.rename(target)


def _clear(place: Path) -> None:
    """Remove files older than a day, which killed processes left."""
    for folder in place.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _DAY:
                shutil.rmtree(folder, ignore_errors=True)


def _write(path: Path, text: str) -> None:
    handle, work = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    Path(work).replace(path)


def _sync(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
