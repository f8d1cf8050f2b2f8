"""What stands behind `twinkle plugins add`, `lock` and `remove`: look at code, have it accepted, write the lock.

Nothing enters the store or the lock before somebody accepted it; a `Decide` is asked with what there is to see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..errors import ComponentNotFound, NotTrusted, SettingsError, TwinkleError
from ..files import source_of
from ..locked import FROZEN_VARIABLE, is_frozen
from ..manifest import PluginRecord
from ..naming import canonical, nearest_or_all
from ..requirements import missing_requirements
from .fetching import CodeHub, arrived, resolve
from .gate import allow
from .installed import check_record_file, distribution_now
from .listing import differences, sha256
from .loading import usable
from .lock import Lock, LockedDistribution, LockedFile, LockedRepository, change_lock
from .plugins import record_of
from .policy import Policy
from .receiving import keep
from .reference import HubReference, Origin
from .review import Review, review, review_file
from .store import Store
from .tree import Tree

if TYPE_CHECKING:
    from ..registry import Registry

Sort = Literal["hub", "pypi", "file"]
OpenHub = Callable[[str], CodeHub]


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


class Keeper:
    """Adds to, renews and takes from the lock of this run."""

    def __init__(self, registry: Registry, open_hub: OpenHub, decide: Decide) -> None:
        """Work for one registry.

        Args:
            registry: Knows the installed plugins, and judges those of a Hub.
            open_hub: Returns the hub of a scheme.
            decide: Is shown each proposal that would change the lock, and says whether it is accepted.

        Raises:
            SettingsError: The run is frozen, so that its lock must not change.
        """
        if is_frozen():
            raise SettingsError(f"this run is frozen, so its lock does not change; unset {FROZEN_VARIABLE} or --frozen")
        self._registry, self._open_hub, self._decide = registry, open_hub, decide

    def add(self, asked: str) -> Proposal | None:
        """Trust what a text names: `scheme://repo@revision`, `./file.py` or an installed distribution.

        Returns:
            What was accepted, or None if it was declined; then nothing has changed.
        """
        if "://" in asked:
            return self._add_repository(replace(HubReference.parse(asked, asked=f"add {asked}"), name=""))
        path = asked.rpartition(":")[0] if ".py:" in asked else asked
        if path.endswith(".py"):
            return self._add_file(path)
        return self._add_distribution(asked)

    def renew(self) -> list[Proposal]:
        """Bring the whole lock up to date: installed plugins, branches that moved, local files that were edited.

        Returns:
            What was accepted, and what has a problem. What was declined stays as it was.
        """
        lock = Lock.load()
        installed = list(dict.fromkeys(r.dist for r in self._records() if r.manifest is not None))
        gone = [entry.name for entry in lock.pypi if canonical(entry.name) not in map(canonical, installed)]
        if gone:
            change_lock(lambda now: replace(now, pypi=tuple(e for e in now.pypi if e.name not in gone)))
        proposals = [self._renewed("pypi", dist, self._add_distribution) for dist in installed]
        proposals += [self._renewed("hub", entry.reference, self.add) for entry in lock.hub]
        proposals += [self._renewed("file", str(lock.path.parent / file.path), self._add_file) for file in lock.file]
        return [proposal for proposal in proposals if proposal is not None]

    def _renewed(self, sort: Sort, asked: str, renew: Callable[[str], Proposal | None]) -> Proposal | None:
        try:
            return renew(asked)
        except (TwinkleError, OSError) as error:  # what cannot be renewed must not keep the rest back
            return Proposal(sort, asked, problem=str(error))

    def _add_repository(self, reference: HubReference) -> Proposal | None:
        asked, policy = f"add {reference}", Policy.load()
        _refuse_forbidden(policy, reference.place, "", asked)
        hub = self._open_hub(reference.scheme)
        origin = resolve(hub, reference, asked=asked)
        _refuse_forbidden(policy, origin.place, origin.commit, asked)
        lock, store = Lock.load(), Store()
        before = _before(lock, reference, origin)
        with arrived(hub, origin, store, asked=asked) as tree:
            record = usable(self._registry.judge(record_of(tree, origin)), asked=asked)
            allow(policy, [(reference, origin)], tree, locked=True, asked=asked)
            entry = LockedRepository(str(reference), origin.place, origin.commit, tree.files)
            proposal = _proposal(reference, origin, tree, record, before, store, same=entry in lock.hub)
            if proposal.state != "same" and not self._decide(proposal):
                return None
            keep(store, tree, origin)
            change_lock(lambda now: now.with_repository(entry))
        return proposal

    def _add_file(self, path: str) -> Proposal | None:
        file, lock = Path(path).expanduser().absolute(), Lock.load()
        source = source_of(file, f"add {path}")
        entry, locked = LockedFile(lock.relative(file), sha256(source)), lock.of_file(file)
        seen = Review((review_file(entry.path, source),))
        proposal = Proposal("file", entry.path, review=seen, state=_state(locked, entry))
        if proposal.state != "same":
            if not self._decide(proposal):
                return None
            change_lock(lambda now: now.with_file(entry))
        return proposal

    def _add_distribution(self, name: str) -> Proposal | None:
        now = distribution_now(name, self._records())
        check_record_file(now.name)
        locked = Lock.load().of_distribution(now.name)
        records = [r for r in self._records() if canonical(r.dist) == canonical(now.name)]
        proposal = Proposal(
            "pypi",
            now.name,
            now.version,
            trusted=locked.version if locked else "",
            review=_of_distribution(now, locked),
            offers=tuple(offer for record in records for offer in _offers(record)),
            state=_state(locked, now),
        )
        if proposal.state != "same":
            if not self._decide(proposal):
                return None
            change_lock(lambda lock: lock.with_distribution(now))
        return proposal

    def _records(self) -> list[PluginRecord]:
        return [record for record in self._registry.records if "://" not in record.dist]


def remove(asked: str) -> list[str]:
    """Take what a text names out of the lock and return how the lock called it.

    Args:
        asked: `scheme://repo` (every revision of it), `scheme://repo@revision`, `./file.py` or a distribution.

    Raises:
        ComponentNotFound: The lock has no such entry.
        SettingsError: The run is frozen.
    """
    if is_frozen():
        raise SettingsError(f"this run is frozen, so its lock does not change; unset {FROZEN_VARIABLE} or --frozen")
    removed: list[str] = []

    def change(lock: Lock) -> Lock:
        gone = [key for key in _keys(lock) if _is_meant(asked, key, lock)]
        if not gone:
            raise ComponentNotFound(f"{lock.path} does not list {asked!r}; {nearest_or_all(asked, _keys(lock))}")
        removed.extend(gone)
        return replace(
            lock,
            hub=tuple(e for e in lock.hub if e.reference not in gone),
            pypi=tuple(e for e in lock.pypi if e.name not in gone),
            file=tuple(e for e in lock.file if e.path not in gone),
        )

    change_lock(change)
    return removed


def _keys(lock: Lock) -> list[str]:
    return [*(e.reference for e in lock.hub), *(e.name for e in lock.pypi), *(e.path for e in lock.file)]


def _is_meant(asked: str, key: str, lock: Lock) -> bool:
    if "://" in asked:
        reference = str(replace(HubReference.parse(asked, asked=f"remove {asked}"), name=""))
        return key == reference or key.startswith(f"{reference}@")
    if key.endswith(".py"):
        return key in (asked, lock.relative(Path(asked)))
    return "://" not in key and canonical(key) == canonical(asked)


def _before(lock: Lock, reference: HubReference, origin: Origin) -> LockedRepository | None:
    """Return what was trusted last: the entry of this reference, or else the newest of this repository."""
    own = [entry for entry in lock.hub if entry.reference == str(reference)]
    near = [entry for entry in lock.hub if entry.repository == origin.place]
    return next(iter([*own, *reversed(near)]), None)


def _proposal(
    reference: HubReference,
    origin: Origin,
    tree: Tree,
    record: PluginRecord,
    before: LockedRepository | None,
    store: Store,
    *,
    same: bool,
) -> Proposal:
    specs = record.manifest.components if record.manifest else ()
    missing = dict.fromkeys(str(lack) for spec in specs for lack in missing_requirements(spec))
    old = _whole(store, before)
    return Proposal(
        "hub",
        str(reference),
        origin.commit,
        origin=origin.place,
        trusted=before.commit if before else "",
        review=review(tree, old),
        offers=_offers(record),
        missing=tuple(missing),
        state="same" if same else "changed" if before else "new",
    )


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


def _of_distribution(now: LockedDistribution, locked: LockedDistribution | None) -> Review:
    return Review((), changed=tuple(differences(locked.files, now.files)) if locked else ())


def _state(locked: object, now: object) -> Literal["new", "changed", "same"]:
    return "new" if locked is None else "same" if locked == now else "changed"


def _refuse_forbidden(policy: Policy, place: str, commit: str, asked: str) -> None:
    if reason := policy.forbids(place, commit):
        raise NotTrusted(f"{asked}: code from {place} is forbidden: {reason}; ask whoever keeps that file")


def refetch(entry: LockedRepository, hub: CodeHub) -> Tree:
    """Bring what the lock lists into the store once more; see `fetch` for what it checks."""
    from .fetching import fetch

    asked = f"fetch {entry.reference}"
    _refuse_forbidden(Policy.load(), entry.repository, entry.commit, asked)
    return fetch(hub, entry.origin, Store(), asked=asked, expected=entry)
