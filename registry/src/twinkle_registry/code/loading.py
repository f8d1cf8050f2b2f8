"""From `hf://org/repo@revision#Name` to the component, in this order: commit, policy, lock, compatibility, import."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..contracts import fits, missing_methods
from ..discovery import MANIFEST_NAME
from ..errors import ComponentNotFound, ManifestError, NotTrusted, PluginBroken, PluginIncompatible, TwinkleError
from ..importing import attribute, import_object
from ..manifest import ComponentSpec, PluginRecord
from ..naming import nearest_or_all, quoted
from .fetching import CodeHub, fetch, resolve
from .gate import refuse_unlocked
from .lock import Lock
from .plugins import record_of
from .policy import Policy, why_not_trusted
from .reference import HubReference, Origin
from .store import Store
from .tree import Tree

if TYPE_CHECKING:
    from ..registry import Registry

OpenHub = Callable[[], CodeHub]


def component_from_hub(text: str, kind: str, registry: Registry, open_hub: OpenHub) -> Any:
    """Return what a reference names, not yet checked against the contract of `kind`.

    Args:
        text: `scheme://repo`, with `@revision` and `#Name` or without.
        kind: What is wanted; a repository with one such component needs no name.
        registry: Judges the plugin as it does installed ones.
        open_hub: Gives the hub; called only if lock and store do not suffice.

    Raises:
        NotTrusted: Nobody allowed this code, it is not what was added, or it is not locked in a frozen run.
        ComponentNotFound: It offers nothing, or nothing of that name or kind; or several and no name was given.
        ManifestError: Its manifest is wrong.
        PluginIncompatible: It was made for another version of core.
        PluginBroken: It raises while it is imported.
    """
    asked = f"{kind} {text!r}"
    reference = HubReference.parse(text, asked=asked)
    tree, origin = trusted_tree(reference, open_hub, asked=asked)
    record = judged_record(tree, origin, registry, asked=asked)
    if MANIFEST_NAME in tree.files:
        return registry.load(_listed(record, reference.name, kind, asked))
    # Importing goes through here for the sake of its errors; what the name is does not matter.
    import_object(f"{record.package}:__name__", asked=asked)
    module = sys.modules[record.package]
    if reference.name:
        return attribute(module, reference.name, asked=asked, absent=ComponentNotFound, shown=str(origin))
    return _only_subclass(module, registry.contract(kind), kind, asked, str(reference))


def trusted_tree(reference: HubReference, open_hub: OpenHub, *, asked: str) -> tuple[Tree, Origin]:
    """Return the tree that a reference means and may be run, fetched if need be; the finder reads it with checks."""
    lock, policy, store = Lock.load(), Policy.load(fetch=True), Store()
    entry = lock.find(reference)
    if entry is not None:
        origin = entry.origin
    else:
        refuse_unlocked(asked, lock)
        if reason := policy.denies(reference.place):
            raise NotTrusted(f"{asked}: code from {reference.place} is forbidden: {reason}")
        origin = resolve(open_hub(), reference, asked=asked)
        entry = lock.of_origin(origin)
    digest = entry.digest if entry is not None else ""
    if reason := why_not_trusted(policy, reference, origin, locked=entry is not None, digest=digest):
        raise NotTrusted(f"{asked}: {reason}")
    tree = store.tree(entry.digest) if entry is not None else store.tree_of(origin)
    if tree is None:
        tree = fetch(open_hub(), origin, store, asked=asked, expected=entry)
    return tree, origin


def judged_record(tree: Tree, origin: Origin, registry: Registry, *, asked: str) -> PluginRecord:
    """Return the record of a tree that may be used here, or raise why not, with every problem of its manifest at once.

    Raises:
        ManifestError: Its manifest is wrong, as any may be or in what it says of kinds and hooks.
        PluginIncompatible: It was made for another version of core.
        PluginBroken: It names kinds or hooks that there are not.
    """
    try:
        record = record_of(tree, origin)
    except ManifestError as error:
        unread = PluginRecord(origin.place, origin.commit, "", "", None, "broken", str(error), error)
        raise ManifestError(registry.judge(unread).reason, error.manifest) from error
    return usable(registry.judge(record), asked=asked)


def usable(record: PluginRecord, *, asked: str) -> PluginRecord:
    """Return the record, or raise why it cannot be used."""
    if record.status == "ok":
        return record
    errors: dict[str, type[TwinkleError]] = {"incompatible": PluginIncompatible, "disabled": ComponentNotFound}
    raise errors.get(record.status, PluginBroken)(
        f"{asked}: plugin {record.name} is {record.status}: {record.reason}"
    ) from record.cause


def _listed(record: PluginRecord, name: str, kind: str, asked: str) -> ComponentSpec:
    components = record.manifest.components if record.manifest else ()
    of_kind = {spec.name: spec for spec in components if spec.kind == kind}
    if name and name in of_kind:
        return of_kind[name]
    if not name and len(of_kind) == 1:
        return next(iter(of_kind.values()))
    others = sorted({f"{spec.kind} {spec.name!r}" for spec in components if spec.kind != kind})
    if name:
        found = nearest_or_all(name, of_kind) if of_kind else f"it offers {', '.join(others) or 'nothing'}"
        raise ComponentNotFound(f"{asked}: its manifest lists no {kind} {name!r}; {found}")
    if of_kind:
        raise ComponentNotFound(f"{asked}: it offers several of that kind; add '#Name', one of {quoted(of_kind)}")
    raise ComponentNotFound(f"{asked}: its manifest lists no {kind}; it offers {', '.join(others) or 'nothing'}")


def _only_subclass(module: ModuleType, contract: Any, kind: str, asked: str, reference: str) -> Any:
    """Return the one class of the module that fits the contract and was written in this repository."""
    if not isinstance(contract, type):
        raise ComponentNotFound(f"{asked}: the kind {kind} may be anything, so say what you want: '...#Name'")
    own = _written_in(module)
    subclasses = [value for value in own.values() if inspect.isclass(value) and contract in value.__mro__[1:]]
    whole = [cls for cls in subclasses if not missing_methods(cls)]
    found = list(dict.fromkeys(cls for cls in whole if not any(cls in other.__mro__[1:] for other in whole)))
    if len(found) == 1:
        return found[0]
    if found:
        raise ComponentNotFound(
            f"{asked}: it has several classes of that kind; add '#Name', one of {quoted(c.__name__ for c in found)}"
        )
    raise ComponentNotFound(
        f"{asked}: it has neither a {MANIFEST_NAME} nor, in its __init__.py, a subclass of "
        f"{contract.__module__}.{contract.__name__}{_meant(own, contract, reference)}"
    )


def _written_in(module: ModuleType) -> dict[str, Any]:
    """Return the classes and functions of a module that were written in its repository, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and (value.__module__ == module.__name__ or value.__module__.startswith(f"{module.__name__}."))
    }


def _meant(own: Mapping[str, Any], contract: type, reference: str) -> str:
    """Return what is there all the same: half a class, or what fits without being a subclass and must be named."""
    hints, fitting = [], []
    for name, value in own.items():
        if inspect.isclass(value) and contract in value.__mro__:
            hints.append(f"{name} leaves {quoted(missing_methods(value))} unimplemented")
        elif not name.startswith("_") and fits(value, contract):
            fitting.append(name)
    if fitting:
        hints.append(f"if you mean one of {quoted(fitting)}, write '{reference}#{fitting[0]}'")
    return "".join(f"; {hint}" for hint in hints)
