"""Implements `twinkle plugins add`, `lock`, `remove` and `verify`: changes the lock, or checks the installation.

A `Decide` function is called with each proposal; only accepted proposals change the store and the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ComponentNotFound, NotTrusted, SettingsError, TwinkleError
from ..files import source_of
from ..manifest import PluginRecord
from ..naming import canonical, nearest_or_all
from ..settings import FROZEN_VARIABLE, LOCK_NAME, is_frozen
from .download import CodeHub, downloaded, fetch, resolve, store_tree
from .frozen import check_record_file, installed_distribution
from .loading import Load, valid_record
from .lock import Lock, LockedDistribution, LockedFile, LockedRepository, change_lock
from .policy import Policy, require_trust, why_not_trusted
from .reference import HubReference, Origin
from .review import Decide, Proposal, Sort, of_distribution, of_file, of_repository
from .store import Store, Tree, differences, first_few, sha256

if TYPE_CHECKING:
    from ..registry import Registry

OpenHub = Callable[[str], CodeHub]


class LockEditor:
    """Adds entries to the lock of this run, updates and removes them."""

    def __init__(self, registry: Registry, open_hub: OpenHub, decide: Decide) -> None:
        """Create an editor for one registry.

        Args:
            registry: Provides the installed plugins, and validates those of a hub.
            open_hub: Returns the hub of a scheme.
            decide: Is called with each proposal that would change the lock; returns whether it is accepted.

        Raises:
            SettingsError: The run is frozen, so that its lock must not change.
            NotTrusted: There is a lock already, in a folder that is not trusted.
        """
        if is_frozen():
            raise SettingsError(
                f"cannot change the lock: this run is frozen; unset {FROZEN_VARIABLE} or remove --frozen"
            )
        Lock.load().require_trust(f"change {LOCK_NAME}")
        self._registry, self._open_hub, self._decide = registry, open_hub, decide

    def add(self, target: str) -> Proposal | None:
        """Trust a target: `scheme://repo@revision`, `./file.py`, `./folder` or an installed distribution.

        Returns:
            The accepted proposal, or None if it was declined.
        """
        if "://" in target:
            return self._add_repository(replace(HubReference.parse(target, context=f"add {target}"), name=""))
        path = target.rpartition(":")[0] if ".py:" in target else target
        if path.endswith(".py"):
            return self._add_file(path)
        if target.startswith((".", "/", "~")):
            return self.add(_folder(target))
        return self._add_distribution(target)

    def renew(self) -> list[Proposal]:
        """Update the whole lock: installed plugins, branches that moved, local files that were edited.

        Returns:
            The accepted proposals and those with a problem. Declined entries are not changed.

        Raises:
            SettingsError: The lock or `[trust]` cannot be read; nothing has changed.
        """
        Policy.load()
        lock = Lock.load()
        installed = list(dict.fromkeys(r.dist for r in self._records() if r.manifest is not None))
        gone = [entry.name for entry in lock.pypi if canonical(entry.name) not in map(canonical, installed)]
        if gone:
            change_lock(lambda now: replace(now, pypi=tuple(e for e in now.pypi if e.name not in gone)))
        proposals = [self._renewed("pypi", dist, self._add_distribution) for dist in installed]
        proposals += [self._renewed("hub", entry.reference, self._renew_repository) for entry in lock.hub]
        proposals += [self._renewed("file", str(lock.path.parent / file.path), self._add_file) for file in lock.file]
        return [proposal for proposal in proposals if proposal is not None]

    def _renewed(self, sort: Sort, target: str, renew: Callable[[str], Proposal | None]) -> Proposal | None:
        try:
            return renew(target)
        except (TwinkleError, OSError) as error:  # one failure must not stop the others
            return Proposal(sort, target, problem=str(error))

    def _renew_repository(self, target: str) -> Proposal | None:
        reference, lock = HubReference.parse(target, context=f"lock {target}"), Lock.load()
        entry = lock.find(reference)
        if entry is not None and reference.is_commit and Store().has_intact(entry.digest):
            return Proposal("hub", target, entry.commit, entry.repository, entry.commit, state="same")
        return self._add_repository(reference)

    def _add_repository(self, reference: HubReference) -> Proposal | None:
        context, policy = f"add {reference}", Policy.load(fetch=True)
        _refuse(policy.denies(reference.place), reference.place, context)
        hub = self._open_hub(reference.scheme)
        origin = resolve(hub, reference, context=context)
        _refuse(policy.forbids(origin), origin.place, context)
        _refuse_another_publisher(reference, origin, context)
        lock, store = Lock.load(), Store()
        with downloaded(hub, origin, store, context=context) as tree:
            record = valid_record(tree, origin, self._registry, context=context)
            require_trust(policy, [(reference, origin)], tree, locked=True, context=context)
            entry = LockedRepository(str(reference), origin.place, origin.commit, tree.files)
            proposal = of_repository(reference, entry, record, tree, lock, store)
            if proposal.state != "same" and not self._decide(proposal):
                return None
            tree.verify()  # the lock may have changed while the user decided
            store_tree(store, tree, origin)
            change_lock(lambda now: now.with_repository(entry))
        return proposal

    def _add_file(self, path: str) -> Proposal | None:
        file, lock = Path(path).expanduser().absolute(), Lock.load()
        source = source_of(file, f"add {path}")
        entry = LockedFile(lock.relative(file), sha256(source))
        proposal = of_file(entry, source, lock)
        if proposal.state != "same":
            if not self._decide(proposal):
                return None
            change_lock(lambda now: now.with_file(entry))
        return proposal

    def _add_distribution(self, name: str) -> Proposal | None:
        now = installed_distribution(name, self._records())
        check_record_file(now.name)
        proposal = of_distribution(now, self._records(), Lock.load())
        if proposal.state != "same":
            if not self._decide(proposal):
                return None
            change_lock(lambda lock: lock.with_distribution(now))
        return proposal

    def _records(self) -> list[PluginRecord]:
        return [record for record in self._registry.records if "://" not in record.dist]


def remove(target: str) -> list[str]:
    """Remove the entries of a target from the lock and return their names.

    Args:
        target: `scheme://repo` (every revision of it), `scheme://repo@revision`, `./folder`, `./file.py` or a
            distribution.

    Raises:
        ComponentNotFound: The lock has no such entry.
        SettingsError: The run is frozen.
    """
    if is_frozen():
        raise SettingsError(f"cannot change the lock: this run is frozen; unset {FROZEN_VARIABLE} or remove --frozen")
    removed: list[str] = []

    def change(lock: Lock) -> Lock:
        gone = [key for key in _keys(lock) if _matches(target, key, lock)]
        if not gone:
            raise ComponentNotFound(f"{lock.path} does not list {target!r}; {nearest_or_all(target, _keys(lock))}")
        removed.extend(gone)
        return replace(
            lock,
            hub=tuple(e for e in lock.hub if e.reference not in gone),
            pypi=tuple(e for e in lock.pypi if e.name not in gone),
            file=tuple(e for e in lock.file if e.path not in gone),
        )

    change_lock(change)
    return removed


def still_trusted(removed: Iterable[str], open_hub: OpenHub) -> list[str]:
    """Return a sentence for each removed reference that may still run, because the code it resolves to is trusted.

    Args:
        removed: The result of `remove`.
        open_hub: Returns the hub of a scheme; called only if other code of that hub is trusted.
    """
    lock, policy = Lock.load(), Policy.load()
    sentences = []
    for text in removed:
        if "://" not in text:
            continue
        reference = HubReference.parse(text, context=f"remove {text}")
        trusted = any(entry.origin.scheme == reference.scheme for entry in lock.hub)
        if not (trusted or policy.allow or policy.trusts_all):
            continue
        try:
            entry = lock.find(reference)
            origin = entry.origin if entry else resolve(open_hub(reference.scheme), reference, context=f"remove {text}")
        except TwinkleError:  # the hub does not answer; the entry has been removed anyway
            continue
        entry = entry or lock.of_origin(origin)
        if not why_not_trusted(policy, reference, origin, locked=entry is not None):
            way = f"remove that too: twinkle plugins remove {entry.reference}" if entry else "[trust] allows that"
            sentences.append(f"{text} still resolves to {origin}, which is trusted; {way}")
    return sentences


def _folder(target: str) -> str:
    """Return the reference of a local folder."""
    folder = Path(target).expanduser().resolve()
    if not folder.is_dir():
        raise ComponentNotFound(f"add {target}: there is no folder {folder}; a Python file ends in .py")
    return f"file://{folder.as_posix()}"


def _keys(lock: Lock) -> list[str]:
    return [*(e.reference for e in lock.hub), *(e.name for e in lock.pypi), *(e.path for e in lock.file)]


def _matches(target: str, key: str, lock: Lock) -> bool:
    if target.startswith((".", "/", "~")) and not target.endswith(".py"):
        target = f"file://{Path(target).expanduser().resolve().as_posix()}"
    if "://" in target:
        reference = str(replace(HubReference.parse(target, context=f"remove {target}"), name=""))
        return key == reference or key.startswith(f"{reference}@")
    if key.endswith(".py"):
        return key in (target, lock.relative(Path(target)))
    return "://" not in key and canonical(key) == canonical(target)


def _refuse(reason: str, place: str, context: str) -> None:
    if reason:
        raise NotTrusted(f"{context}: code from {place} is forbidden: {reason}; ask the owner of that file")


def _refuse_another_publisher(reference: HubReference, origin: Origin, context: str) -> None:
    """Refuse a redirect to another owner: trust in a publisher does not extend to another one."""
    if reference.scheme != "file" and reference.repo.partition("/")[0] != origin.repo.partition("/")[0]:
        raise NotTrusted(
            f"{context}: {reference.place} has moved to {origin.place}, which is another publisher; if you trust it "
            f"too, run: twinkle plugins add {origin.place}"
        )


def refetch(entry: LockedRepository, hub: CodeHub) -> Tree:
    """Download a locked tree into the store again; see `fetch` for the checks."""
    context = f"fetch {entry.reference}"
    _refuse(Policy.load().forbids(entry.origin), entry.repository, context)
    return fetch(hub, entry.origin, Store(), context=context, expected=entry)


@dataclass(frozen=True)
class EntryCheck:
    """One entry of the lock and its problem, or an empty string."""

    sort: str
    name: str
    version: str
    problem: str = ""


def verify(
    records: Iterable[PluginRecord], open_hub: OpenHub, *, fetch: bool = False, online: bool = False
) -> list[EntryCheck]:
    """Check every entry of the lock of this run.

    Args:
        records: All installed plugins.
        open_hub: Returns the hub of a scheme; called with `fetch` or `online` only.
        fetch: Download trees that are missing or damaged in the store; they are compared with the lock.
        online: Check with each hub whether references still resolve to the locked commits.

    Raises:
        ComponentNotFound: There is no lock.
        NotTrusted: It is in a folder that is not trusted.
        SettingsError: The lock is damaged, or `[trust]` is wrong.
    """
    Policy.load(fetch=True)  # reports an invalid policy even if the lock lists no code of a hub
    lock = Lock.load()
    if not lock.path.is_file():
        raise ComponentNotFound(f"there is no {lock.path}; create it with: twinkle plugins lock")
    lock.require_trust(f"verify {lock.path}")
    known = list(records)
    return [
        *(_check_repository(entry, open_hub, fetch=fetch, online=online) for entry in lock.hub),
        *(_check_distribution(entry, known) for entry in lock.pypi),
        *_unlocked(lock, known),
        *(_check_file(entry, lock) for entry in lock.file),
    ]


def _check_repository(entry: LockedRepository, open_hub: OpenHub, *, fetch: bool, online: bool) -> EntryCheck:
    try:
        if fetch and not Store().has_intact(entry.digest):
            refetch(entry, open_hub(entry.origin.scheme))
        Load().checked_tree(entry.digest, context=entry.reference)
        problem = _moved(entry, open_hub) if online else ""
    except (TwinkleError, ModuleNotFoundError) as error:
        problem = str(error)
    return EntryCheck("hub", entry.reference, entry.commit, problem)


def _moved(entry: LockedRepository, open_hub: OpenHub) -> str:
    reference = HubReference.parse(entry.reference, context=entry.reference)
    now = resolve(open_hub(reference.scheme), reference, context=entry.reference)
    if now.place != entry.repository:
        way = f"review it: twinkle plugins add {reference}"
        return f"it resolves to {now.place} now, but {entry.repository} is locked; {way}"
    if now.commit != entry.commit:
        return f"it is at {now.commit} now, but {entry.commit} is locked; review it: twinkle plugins add {reference}"
    return ""


def _check_distribution(entry: LockedDistribution, records: list[PluginRecord]) -> EntryCheck:
    problem, version = "", entry.version
    try:
        now = installed_distribution(entry.name, records)
    except ComponentNotFound:
        return EntryCheck(
            "pypi", entry.name, version, f"not installed; run: pip install '{entry.name}=={entry.version}'"
        )
    if now.version != entry.version:
        ways = f"pip install '{entry.name}=={entry.version}', or twinkle plugins lock"
        problem = f"version {now.version} is installed; run: {ways}"
    elif changes := differences(entry.files, now.files):
        problem = f"files differ from the lock: {first_few(changes)}; reinstall it, or run: twinkle plugins lock"
    return EntryCheck("pypi", entry.name, version, problem)


def _unlocked(lock: Lock, records: list[PluginRecord]) -> Iterator[EntryCheck]:
    """Yield the installed plugins that no entry covers; none if the lock lists no distribution.

    A frozen run refuses each of them in any case.
    """
    locked = {canonical(entry.name) for entry in lock.pypi}
    installed = {canonical(r.dist): r for r in records if "://" not in r.dist}
    for record in installed.values() if locked or is_frozen() else ():
        if canonical(record.dist) not in locked:
            yield EntryCheck(
                "pypi", record.dist, record.version, "installed, but not locked; run: twinkle plugins lock"
            )


def _check_file(entry: LockedFile, lock: Lock) -> EntryCheck:
    file, problem = Path(lock.path.parent / entry.path), ""
    try:
        if sha256(file.read_bytes()) != entry.sha256:
            problem = f"it was changed since it was locked; review it: twinkle plugins add {entry.path}"
    except OSError as error:
        problem = f"it cannot be read ({error.strerror}); put it back, or run: twinkle plugins remove {entry.path}"
    return EntryCheck("file", entry.path, "", problem)
