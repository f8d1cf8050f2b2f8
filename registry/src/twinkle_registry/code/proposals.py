"""What somebody is asked to trust: one repository, distribution or file, beside what is locked of it now."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from ..errors import NotTrusted
from ..manifest import PluginRecord
from ..naming import canonical
from ..requirements import missing_requirements
from .listing import differences
from .lock import Lock, LockedDistribution, LockedFile, LockedRepository
from .reference import HubReference
from .review import Review, review, review_file
from .store import Store
from .tree import Tree

Sort = Literal["hub", "pypi", "file"]


@dataclass(frozen=True)
class Proposal:
    """One thing that somebody may trust.

    Attributes:
        sort: `hub`, `pypi` or `file`.
        name: How it was asked for, without the name of a component.
        version: The commit or the version; empty for a file.
        origin: Where a reference led after redirects.
        trusted: The commit or version that is locked now, if one is.
        review: Its files and what is new in them; for PyPI, names of files alone.
        offers: `kind Name` of each component, and each command and lifecycle hook.
        missing: Requirements of its components that are not installed.
        state: `new`, `changed` or `same` as what is locked.
        problem: Why it could not be looked at; then it was not accepted.
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
        review=review(tree, _whole(store, before)),
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
    """Return what was trusted last: the entry of this reference, or else the newest of this repository."""
    own = [entry for entry in lock.hub if entry.reference == new.reference]
    near = [entry for entry in lock.hub if entry.repository == new.repository]
    return next(iter([*own, *reversed(near)]), None)


def _whole(store: Store, entry: LockedRepository | None) -> Tree | None:
    """Return the tree of an entry if the store still has it as it was; a damaged one says nothing of what changed."""
    try:
        tree = store.tree(entry.digest) if entry else None
        if tree is not None:
            tree.verify()
    except NotTrusted:
        return None
    return tree


def _offers(record: PluginRecord) -> tuple[str, ...]:
    """Return what a plugin offers, with what of it runs without being named."""
    if record.manifest is None:
        return ()
    offers = [f"{spec.kind} {spec.name}" for spec in record.manifest.components]
    offers += [f"command {command.name}" for command in record.manifest.commands]
    return (*offers, *(f"hook {name}" for name in (record.manifest.hooks.implements if record.manifest.hooks else ())))


def _state(locked: object, now: object) -> Literal["new", "changed", "same"]:
    return "new" if locked is None else "same" if locked == now else "changed"
