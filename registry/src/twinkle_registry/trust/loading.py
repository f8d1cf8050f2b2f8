"""Loads code from a hub in this order: commit, policy, lock, compatibility, import.

The finder serves `twinkle_registry.code.<name>_<digest>` and the modules below it from the store only. The bytes that
are hashed are the bytes that are compiled. No `.pyc` is read or written, a file that is not listed does not exist,
and nothing is put on sys.path.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import IO, TYPE_CHECKING, Any

from ..checks import fits, missing_methods
from ..errors import ComponentNotFound, ManifestError, NotTrusted, PluginBroken, PluginIncompatible, TwinkleError
from ..importing import attribute, import_object
from ..manifest import MANIFEST_NAME, ComponentSpec, Manifest, PluginRecord
from ..naming import CODE_PACKAGE, nearest_or_all, quoted
from ..reading import parse_manifest, with_problems
from .download import CodeHub, fetch, resolve
from .lock import Lock, LockedRepository
from .policy import Policy, require_trust, why_not_trusted
from .reference import HubReference, Origin
from .store import DIGEST_IN_NAMES, Snapshot, Store, Tree

if TYPE_CHECKING:
    from ..registry import Registry

OpenHub = Callable[[], CodeHub]
_PREFIX = f"{CODE_PACKAGE}."
_LOADED = re.compile(rf"\w+_(?P<digest>[0-9a-f]{{{DIGEST_IN_NAMES}}})")


def component_from_hub(text: str, kind: str, registry: Registry, open_hub: OpenHub) -> Any:
    """Return the component of a reference, not yet checked against the contract of `kind`.

    Args:
        text: `scheme://repo`, optionally followed by `@revision` and `#Name`.
        kind: Kind of the component; if the repository has one component of this kind, the name can be omitted.
        registry: Validates the plugin, like installed ones.
        open_hub: Returns the hub; called only if the lock and the store do not have the code.

    Raises:
        NotTrusted: This code is not trusted, was changed after it was added, or is not locked in a frozen run.
        ComponentNotFound: It has no such component, or several and no name was given.
        ManifestError: Its manifest is wrong.
        PluginIncompatible: It was made for another version of core.
        PluginBroken: It raises while it is imported.
    """
    context = f"{kind} {text!r}"
    reference = HubReference.parse(text, context=context)
    with Load().active() as load:
        tree, origin = load.tree_of(reference, open_hub, context=context)
        record = valid_record(tree, origin, registry, context=context)
        if MANIFEST_NAME in tree.files:
            return registry.load(_listed(record, reference.name, kind, context))
        # `import_object` is called for its errors; the attribute does not matter.
        import_object(f"{record.package}:__name__", context=context)
    module = sys.modules[record.package]
    if reference.name:
        return attribute(module, reference.name, context=context, absent=ComponentNotFound, shown=str(origin))
    return _only_subclass(module, registry.contract(kind), kind, context, str(reference))


class Load:
    """One load of code from a hub: lock and policy are read once, and each file of a tree is read and hashed once.

    The bytes that were hashed are kept for the imports of this load. An import after its end reads the file again.
    """

    def __init__(self) -> None:
        self.store = Store()
        self._snapshots: dict[Path, Snapshot] = {}
        self._depth = 0

    @staticmethod
    def current() -> Load | None:
        """Return the current load of this thread or task, or None; also None in a task that outlives the load."""
        load = _active.get()
        return load if load is not None and load._depth else None

    @contextlib.contextmanager
    def active(self) -> Iterator[Load]:
        """Make this the current load for the block: imports in it use its lock, policy and files."""
        token = _active.set(self)
        self._depth += 1
        try:
            yield self
        finally:
            self._depth -= 1
            _active.reset(token)

    @cached_property
    def lock(self) -> Lock:
        """The lock of this run."""
        return Lock.load()

    @cached_property
    def policy(self) -> Policy:
        """The policy of this run, with revocation lists that were read within a minute."""
        return Policy.load(fetch=True)

    def snapshot(self, tree: Tree) -> Snapshot:
        """Return the tree with the files that this load has read."""
        return self._snapshots.setdefault(tree.folder, Snapshot(tree.folder, tree.files))

    def tree_of(self, reference: HubReference, open_hub: OpenHub, *, context: str) -> tuple[Tree, Origin]:
        """Return the tree of a reference, if it may run, and download it if necessary.

        Its files are compared with the lock at import, see `checked_tree`.

        Raises:
            NotTrusted: Policy or lock do not allow it.
        """
        entry = self.lock.find(reference)
        if entry is not None:
            origin = entry.origin
        else:
            self.lock.refuse_unlocked(context)
            if reason := self.policy.denies(reference.place):
                raise NotTrusted(f"{context}: code from {reference.place} is forbidden: {reason}")
            origin = resolve(open_hub(), reference, context=context)
            entry = self.lock.of_origin(origin)
        digest = entry.digest if entry is not None else ""
        if reason := why_not_trusted(self.policy, reference, origin, locked=entry is not None, digest=digest):
            raise NotTrusted(f"{context}: {reason}")
        tree = self.store.tree(entry.digest) if entry is not None else self.store.tree_of(origin)
        if tree is None:
            tree = fetch(open_hub(), origin, self.store, context=context, expected=entry)
        return self.snapshot(tree), origin

    def checked_tree(self, digest: str, *, context: str) -> Tree:
        """Return the tree whose digest begins with `digest`, if it may run here and every file matches the listing.

        Every import of a tree passes this check, in every process: policy first,
        then the lock, then signatures where the policy requires them, then the hash of every file.

        Raises:
            NotTrusted: Policy and lock do not allow it, or a file was changed.
            ModuleNotFoundError: The store has no such tree.
        """
        entries = self.lock.of_tree(digest)
        tree = self.store.tree(entries[0].digest if entries else digest)
        if tree is None:
            fetch_it = f"; it belongs to {entries[0].reference}, run: twinkle plugins verify --fetch" if entries else ""
            raise ModuleNotFoundError(
                f"{context}: the code {digest} is not in the store of this machine, {self.store.root}"
                f"{fetch_it or '; add it there with: twinkle plugins add'}"
            )
        tree = self.snapshot(tree)
        ways = [(HubReference.parse(entry.reference, context=context), entry.origin) for entry in entries]
        if not entries:
            self.lock.refuse_unlocked(context)
            ways = [(HubReference(origin.scheme, origin.repo), origin) for origin in self.store.origins(tree.digest)]
        require_trust(self.policy, ways, tree, locked=bool(entries), context=context)
        tree.verify()
        return tree


_active: ContextVar[Load | None] = ContextVar("twinkle_load", default=None)


def import_in_load(ref: str, *, context: str, declared_by: str = "") -> Any:
    """Import a ref to code from a hub as `import_object` does, in the current load or a new one."""
    with (Load.current() or Load()).active():
        return import_object(ref, context=context, declared_by=declared_by)


def valid_record(tree: Tree, origin: Origin, registry: Registry, *, context: str) -> PluginRecord:
    """Return the record of a usable tree; otherwise raise an error with all problems of its manifest.

    Raises:
        ManifestError: Its manifest is wrong, or names unknown kinds or hooks.
        PluginIncompatible: It was made for another version of core.
        PluginBroken: It names kinds or hooks that do not exist.
    """
    try:
        record = record_of(tree, origin)
    except ManifestError as error:
        unread = PluginRecord(origin.place, origin.commit, "", "", None, "broken", str(error), error)
        raise ManifestError(registry.validate(unread).reason, error.manifest) from error
    return usable(registry.validate(record), context=context)


def usable(record: PluginRecord, *, context: str) -> PluginRecord:
    """Return the record if it is usable, otherwise raise its error."""
    if record.status == "ok":
        return record
    errors: dict[str, type[TwinkleError]] = {"incompatible": PluginIncompatible, "disabled": ComponentNotFound}
    raise errors.get(record.status, PluginBroken)(
        f"{context}: plugin {record.name} is {record.status}: {record.reason}"
    ) from record.cause


def _listed(record: PluginRecord, name: str, kind: str, context: str) -> ComponentSpec:
    components = record.manifest.components if record.manifest else ()
    of_kind = {spec.name: spec for spec in components if spec.kind == kind}
    if name and name in of_kind:
        return of_kind[name]
    if not name and len(of_kind) == 1:
        return next(iter(of_kind.values()))
    others = sorted({f"{spec.kind} {spec.name!r}" for spec in components if spec.kind != kind})
    if name:
        hint = nearest_or_all(name, of_kind) if of_kind else f"it offers {', '.join(others) or 'nothing'}"
        raise ComponentNotFound(f"{context}: its manifest lists no {kind} {name!r}; {hint}")
    if of_kind:
        raise ComponentNotFound(f"{context}: it has several of that kind; add '#Name', one of {quoted(of_kind)}")
    raise ComponentNotFound(f"{context}: its manifest lists no {kind}; it offers {', '.join(others) or 'nothing'}")


def _only_subclass(module: ModuleType, contract: Any, kind: str, context: str, reference: str) -> Any:
    """Return the one class of the module that fits the contract and was written in this repository."""
    if not isinstance(contract, type):
        raise ComponentNotFound(f"{context}: the kind {kind} has no contract, so name the component: '...#Name'")
    own = _written_in(module)
    subclasses = [value for value in own.values() if inspect.isclass(value) and contract in value.__mro__[1:]]
    concrete = [cls for cls in subclasses if not missing_methods(cls)]
    leaves = list(dict.fromkeys(cls for cls in concrete if not any(cls in other.__mro__[1:] for other in concrete)))
    if len(leaves) == 1:
        return leaves[0]
    if leaves:
        raise ComponentNotFound(
            f"{context}: it has several classes of that kind; add '#Name', one of {quoted(c.__name__ for c in leaves)}"
        )
    raise ComponentNotFound(
        f"{context}: it has neither a {MANIFEST_NAME} nor, in its __init__.py, a subclass of "
        f"{contract.__module__}.{contract.__name__}{_suggestions(own, contract, reference)}"
    )


def _written_in(module: ModuleType) -> dict[str, Any]:
    """Return the classes and functions of a module that were written in its repository, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and (value.__module__ == module.__name__ or value.__module__.startswith(f"{module.__name__}."))
    }


def _suggestions(own: Mapping[str, Any], contract: type, reference: str) -> str:
    """Return hints for incomplete subclasses, and for objects that satisfy the contract without being a subclass."""
    hints, fitting = [], []
    for name, value in own.items():
        if inspect.isclass(value) and contract in value.__mro__:
            hints.append(f"{name} does not implement {quoted(missing_methods(value))}")
        elif not name.startswith("_") and fits(value, contract):
            fitting.append(name)
    if fitting:
        hints.append(f"if you mean one of {quoted(fitting)}, write '{reference}#{fitting[0]}'")
    return "".join(f"; {hint}" for hint in hints)


def record_of(tree: Tree, origin: Origin) -> PluginRecord:
    """Return the record of one tree; without a manifest it has no components by name.

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
    """Return a record for every hub repository that the lock lists; a problem of one is recorded as its reason."""
    lock = Lock.load()
    if not lock.hub:
        return []
    policy, store = Policy.load(), Store()
    return [_locked_record(entry, policy, store) for entry in lock.hub]


def _locked_record(entry: LockedRepository, policy: Policy, store: Store) -> PluginRecord:
    reference = HubReference.parse(entry.reference, context="twinkle.lock")
    record = PluginRecord(entry.repository, entry.commit, "", "")
    reason = why_not_trusted(policy, reference, entry.origin, locked=True, digest=entry.digest)
    try:
        tree = store.tree(entry.digest)
        if reason and tree is not None:  # the manifest has been read; no code is run
            return replace(record_of(tree, entry.origin), status="broken", reason=reason, cause=NotTrusted(reason))
    except TwinkleError:
        tree = None
    if reason:
        return _broken_record(record, reason, NotTrusted(reason))
    try:
        tree = store.tree(entry.digest)
        if tree is None:
            return _broken_record(record, f"its code is not in {store.root}; run: twinkle plugins verify --fetch")
        return record_of(tree, entry.origin)
    except TwinkleError as error:
        return _broken_record(record, str(error), error)


def why_forbidden(record: PluginRecord, policy: Policy) -> str:
    """Return why an already added plugin of a hub may no longer be used, or an empty string."""
    scheme, colon, repo = record.dist.partition("://")
    if not colon:
        return ""
    origin, digest = Origin(scheme, repo, record.version), record.package.rpartition("_")[2]
    reason = policy.revokes(origin, digest) or policy.forbids(origin)
    return f"code from {origin} must not run any more: {reason}" if reason else ""


def _broken_record(record: PluginRecord, reason: str, cause: TwinkleError | None = None) -> PluginRecord:
    return PluginRecord(record.dist, record.version, record.package, record.location, None, "broken", reason, cause)


def _refs(manifest: Manifest) -> list[str]:
    refs = [ref for c in manifest.components for ref in (c.ref, c.config) if ref]
    refs += [command.ref for command in manifest.commands]
    return refs + ([manifest.hooks.module] if manifest.hooks else [])


def _outside(manifest: Manifest, root: str) -> str:
    """Return which refs leave the repository and how to write them, or an empty string."""
    outside = [ref for ref in _refs(manifest) if ref.strip(":") and not _is_below(ref, root)]
    if not outside:
        return ""
    verb = "is" if len(outside) == 1 else "are"
    listed = ", ".join(map(repr, outside))
    return f"{listed} {verb} outside of the repository; use refs that start with a dot, such as '.loss:FocalLoss'"


def _is_below(ref: str, root: str) -> bool:
    module = ref.partition(":")[0]
    return module == root or module.startswith(root + ".")


class CodeFinder:
    """Finds every module below a digest, so that no other finder is called for them."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a module of loaded code; None for any other module."""
        if not fullname.startswith(_PREFIX):
            return None
        top, _, inner = fullname[len(_PREFIX) :].partition(".")
        match = _LOADED.fullmatch(top)
        if match is None:
            return None
        imported = getattr(sys.modules.get(_PREFIX + top), "__loader__", None)
        if inner and isinstance(imported, CodeLoader):
            return _spec(fullname, inner.replace(".", "/"), imported.tree)
        load = Load.current() or Load()
        tree = load.checked_tree(match["digest"], context=_PREFIX + top)
        return _spec(fullname, inner.replace(".", "/"), Tree(tree.folder, tree.files), load)


class CodeLoader(SourceFileLoader):
    """Compiles source files of the tree after checking their hash."""

    def __init__(self, fullname: str, source: str, tree: Tree, load: Load | None) -> None:
        """Load `fullname` from the file `source` of the tree; an empty string is a package without code of its own.

        `load` checked the tree for this module, and is current while the module runs.
        """
        super().__init__(fullname, str(tree.folder / source) if source else str(tree.folder / "__init__.py"))
        self.tree, self.source, self._load = tree, source, load

    def get_data(self, path: str) -> bytes:
        """Return the bytes of a file of the tree, checked; `path` begins with the folder of the tree."""
        if path == self.path and not self.source:
            return b""
        folder = str(self.tree.folder)
        relative = path[len(folder) :].replace("\\", "/").lstrip("/") if path.startswith(folder) else path
        load = Load.current()
        return (load.snapshot(self.tree) if load else self.tree).read(relative)

    def get_code(self, fullname: str) -> CodeType:
        """Compile the module from its source."""
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code

    def exec_module(self, module: ModuleType) -> None:
        """Run the module; the error of an absolute import within the repository suggests the relative import."""
        load, self._load = self._load, None
        try:
            with load.active() if load else contextlib.nullcontext():
                super().exec_module(module)
        except ModuleNotFoundError as error:
            own = (error.name or "").partition(".")[0]
            if own and not (error.name or "").startswith(_PREFIX) and is_module(self.tree, own):
                raise ImportError(
                    f"{own} is part of the repository itself; its author must write 'from . import {own}', because "
                    "code from a hub is not on sys.path"
                ) from error
            raise

    def get_resource_reader(self, name: str | None = None) -> CheckedResources:  # type: ignore[override]
        """Give `importlib.resources.files(package)` access to the data files of the package."""
        below = (name or self.name).removeprefix(_PREFIX).partition(".")[2].replace(".", "/")
        return CheckedResources(self.tree, below)


def install_finder() -> None:
    """Put the finder first: no other finder may answer for these modules."""
    if not any(isinstance(finder, type) and finder.__name__ == CodeFinder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, CodeFinder)


def is_module(tree: Tree, name: str) -> bool:
    """Return whether the tree has a top-level module or package `name`."""
    return f"{name}.py" in tree.files or name in tree.folders


def _spec(fullname: str, path: str, tree: Tree, load: Load | None = None) -> ModuleSpec:
    below = f"{path}/" if path else ""
    if path and f"{path}.py" in tree.files:
        return _located(ModuleSpec(fullname, CodeLoader(fullname, f"{path}.py", tree, load)), None)
    if path in tree.folders or not path:
        init = f"{below}__init__.py"
        return _located(ModuleSpec(fullname, CodeLoader(fullname, init if init in tree.files else "", tree, load)), [])
    raise ModuleNotFoundError(f"the repository has no module {path.replace('/', '.')!r}", name=fullname)


def _located(spec: ModuleSpec, locations: Iterable[str] | None) -> ModuleSpec:
    loader = spec.loader
    spec.origin = loader.path if isinstance(loader, CodeLoader) else None
    spec.has_location = True
    # Empty: with a path, Python's own finder would search the folder, which may have files that were not checked.
    spec.submodule_search_locations = None if locations is None else list(locations)
    return spec


class CheckedResources:
    """The resource reader of `importlib.resources`: listed files, hashed as they are read."""

    def __init__(self, tree: Tree, below: str) -> None:
        """Show the part of `tree` below the folder `below`."""
        self._root = CheckedPath(tree, below)

    def files(self) -> CheckedPath:
        """Return the folder of the package."""
        return self._root


class CheckedPath:
    """A file or folder of a tree, with the methods of `importlib.resources.abc.Traversable`."""

    def __init__(self, tree: Tree, path: str) -> None:
        """Represent `path`, relative to the tree; it need not exist."""
        self._tree, self._path = tree, path

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._path.rpartition("/")[2]

    def is_file(self) -> bool:
        """Return whether this is a listed file."""
        return self._path in self._tree.files

    def is_dir(self) -> bool:
        """Return whether this is a folder that contains a listed file."""
        return self._path in self._tree.folders

    def iterdir(self) -> Iterator[CheckedPath]:
        """Yield the files and folders in this folder."""
        below = f"{self._path}/" if self._path else ""
        names = {path[len(below) :].partition("/")[0] for path in self._tree.files if path.startswith(below)}
        yield from (self.joinpath(name) for name in sorted(names))

    def joinpath(self, *descendants: Any) -> CheckedPath:
        """Return a path below this one."""
        parts = [self._path, *(str(part) for part in descendants)]
        return CheckedPath(self._tree, "/".join(part.strip("/") for part in parts if part.strip("/")))

    def __truediv__(self, child: Any) -> CheckedPath:
        return self.joinpath(child)

    def read_bytes(self) -> bytes:
        """Return the bytes, checked."""
        return self._tree.read(self._path)

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        """Return the text, UTF-8 unless another encoding is named."""
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def open(self, mode: str = "r", *args: Any, **kwargs: Any) -> IO[Any]:
        """Open for reading, in text (`r`) or binary (`rb`) mode."""
        if mode not in ("r", "rb", "rt"):
            raise ValueError(f"mode must be 'r' or 'rb', got {mode!r}; files from a hub are read-only")
        raw = io.BytesIO(self.read_bytes())
        return raw if mode == "rb" else io.TextIOWrapper(raw, *args, **{"encoding": "utf-8", **kwargs})

    def __str__(self) -> str:
        """Return the path in the store, for messages."""
        return str(self._tree.folder / self._path)
