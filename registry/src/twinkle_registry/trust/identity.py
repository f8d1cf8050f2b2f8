"""Which code a component is: its plugin, the version, and a digest of the plugin's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ComponentNotFound
from ..manifest import ComponentSpec, PluginRecord
from ..naming import CODE_PACKAGE
from .frozen import installed_distribution
from .store import Store


@dataclass(frozen=True, slots=True)
class CodeIdentity:
    """The code of one plugin.

    Attributes:
        plugin: Name of the plugin.
        version: Version of its distribution, or the commit of its repository.
        sha256: SHA-256 of the listing of its files. For a repository it is the `digest` in `twinkle.lock`; for a
            distribution it is that of the files that the lock lists.
    """

    plugin: str
    version: str
    sha256: str


def identity_of(spec: ComponentSpec, records: Sequence[PluginRecord]) -> CodeIdentity:
    """Return the identity of a component's code; the files of a distribution are read, nothing is imported.

    Args:
        spec: The component.
        records: All installed plugins.

    Raises:
        ComponentNotFound: Its plugin is no longer installed, or its repository not in the store.
        NotTrusted: The listing of its repository was changed.
    """
    if spec.root.startswith(f"{CODE_PACKAGE}."):
        tree = Store().tree(spec.root.rpartition("_")[2])
        if tree is None:
            raise ComponentNotFound(f"the code of {spec} is not in {Store().root}; run: twinkle plugins verify --fetch")
        return CodeIdentity(spec.dist, spec.version, tree.digest)
    installed = installed_distribution(spec.dist, records)
    return CodeIdentity(spec.dist, installed.version, installed.digest)
