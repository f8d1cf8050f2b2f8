"""From a reference to a commit, and from a commit to files in the store; the hub only knows repositories and bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from ..errors import NotTrusted, PluginBroken, TwinkleError
from .listing import differences, few, scan
from .lock import LockedRepository
from .receiving import incoming, keep
from .reference import HubReference, Origin
from .store import Store
from .tree import Tree


class CodeHub(Protocol):
    """What code from a Hub needs of a component of kind `hub`."""

    def commit_of(self, repo: str, revision: str | None) -> tuple[str, str]:
        """Return the repository after redirects, and the commit that `revision` (or the usual branch) means now."""
        ...

    def download_code(self, repo: str, commit: str, target: Path) -> None:
        """Write the files of one commit into the empty folder `target`."""
        ...


def resolve(hub: CodeHub, reference: HubReference, *, asked: str) -> Origin:
    """Ask the hub which commit a reference means, and where its repository is now.

    Raises:
        NotTrusted: A commit was asked for, and the hub answers with another.
        TwinkleError: What the hub raises, for instance without a network.
    """
    with _reported(reference.scheme, asked):
        repo, commit = hub.commit_of(reference.repo, reference.revision or None)
    origin = Origin.checked(reference.scheme, repo, commit, asked=asked)
    if reference.is_commit and commit != reference.revision:
        raise NotTrusted(f"{asked}: commit {reference.revision} was asked for, and the hub answered with {commit}")
    return origin


@contextlib.contextmanager
def arrived(hub: CodeHub, origin: Origin, store: Store, *, asked: str) -> Iterator[Tree]:
    """Download one commit beside the store and give its tree; what is not kept is gone when the block ends.

    Raises:
        NotTrusted: It holds what no plugin may hold; see `scan`.
        TwinkleError: What the hub raises, for instance when the repository vanishes meanwhile.
    """
    with incoming(store) as work:
        folder = work / "arrived"
        folder.mkdir()
        with _reported(origin.scheme, asked):
            hub.download_code(origin.repo, origin.commit, folder)
            files = scan(folder, asked=asked)
        if not any(path.endswith(".py") for path in files):
            raise NotTrusted(f"{asked}: {origin} holds no Python file, so it is no plugin")
        yield Tree(folder, files)


def fetch(hub: CodeHub, origin: Origin, store: Store, *, asked: str, expected: LockedRepository | None) -> Tree:
    """Bring one commit into the store and return its tree.

    Raises:
        NotTrusted: It is locked, and the hub gives other files for this commit than were added; nothing is stored.
    """
    with arrived(hub, origin, store, asked=asked) as tree:
        if expected is not None and tree.digest != expected.digest:
            changed = few(differences(expected.files, tree.files))
            raise NotTrusted(
                f"{asked}: for {origin} the hub gives other files than those that were added ({changed}); nothing "
                f"of it is stored. If you expected that, look at it: twinkle plugins add {expected.reference}"
            )
        return keep(store, tree, origin)


@contextlib.contextmanager
def _reported(scheme: str, asked: str) -> Iterator[None]:
    try:
        yield
    except TwinkleError:
        raise
    except Exception as error:  # a hub is a plugin, and may raise anything
        raise PluginBroken(f"{asked}: the hub {scheme}:// failed: {type(error).__name__}: {error}") from error
