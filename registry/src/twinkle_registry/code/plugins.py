"""Code from a Hub as a plugin: its record, as the registry keeps one for every installed plugin."""

from __future__ import annotations

import tomllib
from dataclasses import replace

from ..discovery import MANIFEST_NAME
from ..errors import ManifestError, NotTrusted, TwinkleError
from ..manifest import Manifest, PluginRecord
from ..reading import parse_manifest, with_problems
from .lock import Lock, LockedRepository
from .policy import Policy, why_not_trusted
from .reference import HubReference, Origin
from .store import Store
from .tree import Tree


def record_of(tree: Tree, origin: Origin) -> PluginRecord:
    """Return the record of one tree; without a manifest it offers nothing by name.

    Raises:
        ManifestError: Its manifest is wrong, or names something outside of the repository.
        NotTrusted: Its manifest was changed.
    """
    root = tree.module_name(origin.repo)
    location = str(tree.folder / MANIFEST_NAME)
    if MANIFEST_NAME not in tree.files:
        return PluginRecord(origin.place, origin.commit, root, str(tree.folder), Manifest(1, "", origin.place))
    where = f"{MANIFEST_NAME} of {origin}"
    try:
        raw = tomllib.loads(tree.read(MANIFEST_NAME).decode())
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{where} cannot be read as TOML: {error}") from error
    name = raw.get("name")
    package = name.replace("-", "_").replace(".", "_") if isinstance(name, str) else ""
    try:
        manifest = parse_manifest(raw, where, origin.place, origin.commit, package=package, root=root)
    except ManifestError as error:
        outside = _outside(error.manifest, root) if isinstance(error.manifest, Manifest) else ""
        raise ManifestError(with_problems(str(error), [outside] if outside else []), error.manifest) from error
    if outside := _outside(manifest, root):
        raise ManifestError(f"{where}: {outside}", manifest)
    return PluginRecord(origin.place, origin.commit, root, location, manifest)


def records_of_lock() -> list[PluginRecord]:
    """Return a record for every Hub repository that the lock lists; what is wrong with one is its reason."""
    lock = Lock.load()
    if not lock.hub:
        return []
    policy, store = Policy.load(), Store()
    return [_locked_record(entry, policy, store) for entry in lock.hub]


def _locked_record(entry: LockedRepository, policy: Policy, store: Store) -> PluginRecord:
    reference = HubReference.parse(entry.reference, asked="twinkle.lock")
    record = PluginRecord(entry.repository, entry.commit, "", "")
    reason = why_not_trusted(policy, reference, entry.origin, locked=True, digest=entry.digest)
    try:
        tree = store.tree(entry.digest)
        if reason and tree is not None:  # what it would offer is known, and is not run
            return replace(record_of(tree, entry.origin), status="broken", reason=reason, cause=NotTrusted(reason))
    except TwinkleError:
        tree = None
    if reason:
        return _broken(record, reason, NotTrusted(reason))
    try:
        tree = store.tree(entry.digest)
        if tree is None:
            return _broken(record, f"its code is not in {store.root}; run: twinkle plugins verify --fetch")
        return record_of(tree, entry.origin)
    except TwinkleError as error:
        return _broken(record, str(error), error)


def why_forbidden(record: PluginRecord, policy: Policy) -> str:
    """Return why a plugin of a Hub that was added before may not be used any more, or an empty text."""
    scheme, colon, repo = record.dist.partition("://")
    if not colon:
        return ""
    origin, digest = Origin(scheme, repo, record.version), record.package.rpartition("_")[2]
    reason = policy.revokes(origin, digest) or policy.forbids(origin)
    return f"code from {origin} must not run any more: {reason}" if reason else ""


def _broken(record: PluginRecord, reason: str, cause: TwinkleError | None = None) -> PluginRecord:
    return PluginRecord(record.dist, record.version, record.package, record.location, None, "broken", reason, cause)


def _refs(manifest: Manifest) -> list[str]:
    refs = [ref for c in manifest.components for ref in (c.ref, c.config) if ref]
    refs += [command.ref for command in manifest.commands]
    return refs + ([manifest.hooks.module] if manifest.hooks else [])


def _outside(manifest: Manifest, root: str) -> str:
    """Return which refs leave the repository and how to write them, or an empty text."""
    outside = [ref for ref in _refs(manifest) if ref.strip(":") and not _lies_below(ref, root)]
    if not outside:
        return ""
    lie = "lies" if len(outside) == 1 else "lie"
    listed = ", ".join(map(repr, outside))
    return f"{listed} {lie} outside of the repository; write refs that start with a dot, such as '.loss:FocalLoss'"


def _lies_below(ref: str, root: str) -> bool:
    module = ref.partition(":")[0]
    return module == root or module.startswith(root + ".")
