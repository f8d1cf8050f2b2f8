"""What stands behind `twinkle plugins verify`: is everything that the lock lists here, whole, and still trusted?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ComponentNotFound, NotTrusted, TwinkleError
from ..locked import is_frozen
from ..manifest import PluginRecord
from ..naming import canonical
from .adding import OpenHub, refetch
from .fetching import resolve
from .gate import checked_tree
from .installed import distribution_now
from .listing import differences, few, sha256
from .lock import Lock, LockedDistribution, LockedFile, LockedRepository
from .policy import Policy
from .reference import HubReference
from .store import Store


@dataclass(frozen=True)
class Checked:
    """One entry of the lock, and what is wrong with it; an empty text where nothing is."""

    sort: str
    name: str
    version: str
    problem: str = ""


def verify(
    records: Iterable[PluginRecord], open_hub: OpenHub, *, fetch: bool = False, online: bool = False
) -> list[Checked]:
    """Check every entry of the lock of this run.

    Args:
        records: All installed plugins.
        open_hub: Returns the hub of a scheme; called with `fetch` or `online` only.
        fetch: Bring what the store lacks, or has damaged, from its hub; it is compared with the lock.
        online: Ask each hub whether references still lead to the commits that are locked.

    Raises:
        ComponentNotFound: There is no lock.
        NotTrusted: It lies in a folder that is not trusted.
        SettingsError: The lock is damaged, or `[trust]` is wrong.
    """
    Policy.load(fetch=True)  # whoever has a lock of distributions alone is told too that the policy cannot be read
    lock = Lock.load()
    if not lock.path.is_file():
        raise ComponentNotFound(f"there is no {lock.path}; make it with: twinkle plugins lock")
    lock.require_trust(f"verify {lock.path}")
    known = list(records)
    return [
        *(_repository(entry, open_hub, fetch=fetch, online=online) for entry in lock.hub),
        *(_distribution(entry, known) for entry in lock.pypi),
        *_unlocked(lock, known),
        *(_file(entry, lock) for entry in lock.file),
    ]


def _repository(entry: LockedRepository, open_hub: OpenHub, *, fetch: bool, online: bool) -> Checked:
    try:
        if fetch and not _is_whole(entry):
            refetch(entry, open_hub(entry.origin.scheme))
        checked_tree(entry.digest, asked=entry.reference)
        problem = _moved(entry, open_hub) if online else ""
    except (TwinkleError, ModuleNotFoundError) as error:
        problem = str(error)
    return Checked("hub", entry.reference, entry.commit, problem)


def _is_whole(entry: LockedRepository) -> bool:
    try:
        tree = Store().tree(entry.digest)
        if tree is not None:
            tree.verify()
    except NotTrusted:
        return False
    return tree is not None


def _moved(entry: LockedRepository, open_hub: OpenHub) -> str:
    reference = HubReference.parse(entry.reference, asked=entry.reference)
    now = resolve(open_hub(reference.scheme), reference, asked=entry.reference)
    if now.place != entry.repository:
        return f"it leads to {now.place} now, {entry.repository} is locked; look at it: twinkle plugins add {reference}"
    if now.commit != entry.commit:
        return f"it is at {now.commit} now, {entry.commit} is locked; look at it: twinkle plugins add {reference}"
    return ""


def _distribution(entry: LockedDistribution, records: list[PluginRecord]) -> Checked:
    problem, version = "", entry.version
    try:
        now = distribution_now(entry.name, records)
    except ComponentNotFound:
        return Checked("pypi", entry.name, version, f"not installed; run: pip install '{entry.name}=={entry.version}'")
    if now.version != entry.version:
        problem = (
            f"{now.version} is installed; run: pip install '{entry.name}=={entry.version}', or twinkle plugins lock"
        )
    elif found := differences(entry.files, now.files):
        problem = f"not as it was locked: {few(found)}; reinstall it, or run: twinkle plugins lock"
    return Checked("pypi", entry.name, version, problem)


def _unlocked(lock: Lock, records: list[PluginRecord]) -> Iterator[Checked]:
    """Yield the installed plugins that no entry covers; a lock that lists no distribution is of Hub code alone.

    A frozen run refuses each of them, whatever the lock is of.
    """
    locked = {canonical(entry.name) for entry in lock.pypi}
    installed = {canonical(r.dist): r for r in records if "://" not in r.dist}
    for record in installed.values() if locked or is_frozen() else ():
        if canonical(record.dist) not in locked:
            yield Checked("pypi", record.dist, record.version, "installed and not locked; run: twinkle plugins lock")


def _file(entry: LockedFile, lock: Lock) -> Checked:
    file, problem = Path(lock.path.parent / entry.path), ""
    try:
        if sha256(file.read_bytes()) != entry.sha256:
            problem = f"it was changed since it was locked; look at it: twinkle plugins add {entry.path}"
    except OSError as error:
        problem = f"it cannot be read ({error.strerror}); put it back, or run: twinkle plugins remove {entry.path}"
    return Checked("file", entry.path, "", problem)
