"""A frozen run: whatever is not in the lock, or is not as it was locked, is refused before it is imported."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ..errors import ComponentNotFound, NotTrusted
from ..files import source_of
from ..locked import LOCK_VARIABLE
from ..manifest import PluginRecord
from .gate import refuse_unlocked
from .installed import distribution_now, installed_files
from .listing import differences, few, sha256
from .lock import Lock, LockedDistribution

_CODE = f"{__package__}."


class Frozen:
    """What one frozen registry asks. Hub code passes here freely: its finder asks the lock itself."""

    def __init__(self) -> None:
        """Read the lock of this run."""
        self.lock = Lock.load()
        self._checked: set[str] = set()

    def why_not(self, record: PluginRecord) -> str:
        """Return why a plugin may not be used, from its name and version alone, or an empty text."""
        if record.package.startswith(_CODE):
            return ""
        locked = self.lock.of_distribution(record.dist)
        if locked is None:
            way = f"run 'twinkle plugins lock', or name the right lock by {LOCK_VARIABLE}"
            return f"this run is frozen, and {self.lock.lacks(record.dist)}; {way}"
        if locked.version != record.version:
            return (
                f"this run is frozen, and {self.lock.path} has {locked.name} {locked.version}, installed is "
                f"{record.version}; run: pip install '{locked.name}=={locked.version}'"
            )
        return ""

    def check(self, record: PluginRecord, records: list[PluginRecord]) -> None:
        """Check every file of the distribution of a plugin against the lock, once.

        Raises:
            NotTrusted: It is not locked, or one of its files is not as it was locked.
        """
        if record.package.startswith(_CODE) or record.dist in self._checked:
            return
        if reason := self.why_not(record):
            raise NotTrusted(f"plugin {record.name}: {reason}")
        locked = self.lock.of_distribution(record.dist)
        if locked is not None:
            self._compare(locked, records)
        self._checked.add(record.dist)

    def source(self, path: str, *, asked: str) -> bytes:
        """Return the text of a local file that is locked, as it was locked.

        Raises:
            NotTrusted: It is not locked, or was changed since.
        """
        file = Path(path).expanduser().absolute()
        locked = self.lock.of_file(file)
        if locked is None:
            refuse_unlocked(asked, self.lock)
        source = source_of(file, asked)
        if locked is not None and sha256(source) != locked.sha256:
            raise NotTrusted(
                f"{asked}: this run is frozen, and {file} was changed since it was locked; where it is not frozen, "
                f"run: twinkle plugins add {path}"
            )
        return source

    def check_module(self, module: str, records: list[PluginRecord], *, asked: str) -> None:
        """Check the distribution that a module belongs to, for `package.module:Attr`.

        Raises:
            NotTrusted: It belongs to no locked distribution.
        """
        if f"{module}.".startswith(_CODE):
            return
        top = module.partition(".")[0]
        try:
            spec = find_spec(top)
        except (ImportError, ValueError, AttributeError):  # `__main__`, and finders of other people
            spec = None
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        for record in records:
            own = installed_files([record]) if self.lock.of_distribution(record.dist) else {}
            if origin is not None and any(place.resolve() == origin for place in own.values()):
                self.check(record, records)
                return
        if not self.lock.is_obeyed:
            refuse_unlocked(asked, self.lock)
        raise NotTrusted(
            f"{asked}: this run is frozen, and {top!r} belongs to no plugin that {self.lock.path} lists; name a "
            "component of a locked plugin"
        )

    def _compare(self, locked: LockedDistribution, records: list[PluginRecord]) -> None:
        try:
            now = distribution_now(locked.name, records)
        except ComponentNotFound as error:
            raise NotTrusted(f"{locked.name} is locked and not installed") from error
        if found := differences(locked.files, now.files):
            raise NotTrusted(
                f"{locked.name} {locked.version}: this run is frozen, and it is not as it was locked ({few(found)}); "
                f"run: pip install --force-reinstall --no-deps '{locked.name}=={locked.version}'"
            )
