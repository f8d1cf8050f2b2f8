"""The registry: records every plugin, resolves a name to a component on first use, and calls lifecycle hooks."""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import explain
from .checks import check_contract, check_keywords, missing_methods
from .errors import (
    ArgumentError,
    ComponentConflict,
    ComponentNotFound,
    ComponentTypeError,
    NotTrusted,
    PluginBroken,
    RequirementMissing,
)
from .importing import import_failed, import_object
from .manifest import CommandSpec, ComponentSpec, ExportSpec, PluginRecord
from .naming import CODE_PACKAGE, canonical, nearest_or_all, quoted
from .resolving import choose, component_from_reference, parse_reference
from .settings import ESSENTIAL, Settings, is_frozen, untrusted_notice
from .validation import Validator, broken, check_requirements, lifecycle_hooks, name_is_taken, name_losers, unusable

if TYPE_CHECKING:
    from .hooks import HookCall, Implementers, PluginSet
    from .trust.frozen import Frozen
    from .trust.identity import CodeIdentity
    from .view import RegistryView


class Registry:
    """All plugins of one process.

    One lock guards the registered plugins. Plugins are imported without holding it, because an import may wait for
    another thread that uses the registry.
    """

    def __init__(
        self,
        hookspecs_module: Any,
        *,
        kinds: Mapping[str, str | None],
        core_version: str,
        settings: Settings | None = None,
        essential: Collection[str] = ESSENTIAL,
    ) -> None:
        """Create an empty registry.

        Args:
            hookspecs_module: Has a hook spec `twinkle_<kind>` for each kind, and the lifecycle hooks.
            kinds: Each kind with the ref of its contract, `module:Attr`, or None if any object is accepted.
            core_version: Compared with `core` of manifests.
            settings: Disabled and preferred plugins; by default, `Settings.load()`.
            essential: Plugins that `only` does not disable.
        """
        self._hookspecs = hookspecs_module
        self._kinds = dict(kinds)
        self._settings = Settings.load() if settings is None else settings
        self._lifecycle = lifecycle_hooks(hookspecs_module, kinds)
        self._validator = Validator(
            kinds=list(kinds),
            lifecycle=self._lifecycle,
            core_version=core_version,
            settings=self._settings,
            essential=essential,
        )
        self._frozen = _frozen()
        self._lock = threading.RLock()
        self._records: list[PluginRecord] = []
        self._plugin_set: PluginSet | None = None
        self._registered: set[str] = set()
        self._hooked: set[str] = set()
        self._index: dict[str, dict[str, list[ComponentSpec]]] = {}
        self._contracts: dict[str, Any] = {}
        self._resolved: dict[tuple[str, str | ComponentSpec], Any] = {}
        self._satisfied: set[ComponentSpec] = set()
        self._forbidden: dict[str, str] = {}
        self._hook_calls: dict[str, HookCall] = {}
        self._allows: Callable[[ComponentSpec], bool] | None = None

    # Plugins and names

    def load_installed(self, extra: Iterable[PluginRecord] = ()) -> None:
        """Add every installed plugin, then `extra` (from a hub or a folder), and warn about settings without effect."""
        from .discovery import installed_plugins

        for record in [*installed_plugins(), *extra]:
            self.add(record)
        for notice in self.notices():
            warnings.warn(notice, stacklevel=2)

    def add(self, record: PluginRecord) -> PluginRecord:
        """Validate one plugin, add it and return its record: core version, settings, kinds and hooks are checked.

        If two plugins have the same name, the first one is used, unless the distribution of the second has that name.
        """
        with self._lock:
            if known := next((r for r in self._records if _key(r) == _key(record)), None):
                return known
            validated = self._validator.validate(record, self._records)
            if self.frozen and validated.status == "ok" and (why := self.frozen.why_not(validated)):
                validated = replace(validated, status="disabled", reason=why, cause=NotTrusted(why))
            for loser in name_losers(validated, self._records):
                self._replace(loser, unusable(loser, name_is_taken(loser, validated)))
            self._records.append(validated)
            self._plugins_changed()
            return validated

    def withdraw(self, name: str) -> None:
        """Remove the plugins called `name`, so that another one of that name can be added, for example in a test."""
        with self._lock:
            for record in [r for r in self._records if canonical(r.name) == canonical(name)]:
                self._records.remove(record)
                if record.name in self._registered | self._hooked:
                    self._plugins().drop(record.name)
                self._registered.discard(record.name)
                self._hooked.discard(record.name)
            self._plugins_changed()

    def drop_forbidden(self, max_age: float) -> tuple[list[PluginRecord], list[str]]:
        """Withdraw every plugin of a hub that the policy or a revocation list has come to forbid.

        Its components can no longer be found, its hooks are no longer called, and `load` refuses specs that were
        returned before. A service calls this periodically.

        Args:
            max_age: Revocation lists that were read within so many seconds are not read again.

        Returns:
            The plugins that were withdrawn by this call, and the problems of the lists. The last valid version of a
            list stays in effect.

        Raises:
            SettingsError: The policy cannot be read; nothing was withdrawn.
        """
        from .trust.loading import why_forbidden
        from .trust.policy import Policy

        policy, dropped = Policy.load().refreshed(max_age), []
        for record in [r for r in self.records if "://" in r.dist and r.status == "ok"]:
            if reason := why_forbidden(record, policy):
                forbidden = replace(record, status="broken", reason=reason, cause=NotTrusted(reason))
                self._replace(record, forbidden)
                self._forbidden[record.package] = reason
                dropped.append(forbidden)
        return dropped, [text for known in policy.revoked for text in (known.error, known.problem) if text]

    def validate(self, record: PluginRecord) -> PluginRecord:
        """Return a record with the status that it would have as the only plugin, without adding it."""
        return self._validator.validate(record, [])

    def checked(self, record: PluginRecord) -> PluginRecord:
        """Return the record with the status of a frozen run: every file is compared with the lock."""
        if self.frozen is None or record.status != "ok":
            return record
        try:
            self.frozen.check(record, self.records)
        except NotTrusted as error:
            return replace(record, status="disabled", reason=str(error), cause=error)
        return record

    @property
    def frozen(self) -> Frozen | None:
        """The check that refuses code that is not locked; None unless the run is frozen."""
        return self._frozen

    @property
    def records(self) -> list[PluginRecord]:
        """Every plugin that was added, usable or not, in the order of addition."""
        with self._lock:
            return list(self._records)

    @property
    def kinds(self) -> list[str]:
        """All kinds of component."""
        return list(self._kinds)

    @property
    def lifecycle_hooks(self) -> list[str]:
        """The names that `hook` accepts."""
        return list(self._lifecycle)

    @property
    def settings(self) -> Settings:
        """The disabled and preferred plugins."""
        return self._settings

    def notices(self) -> list[str]:
        """Return notices that are not errors: settings without effect, commands in conflict.

        This includes settings and locks that are ignored because their folder is not trusted.
        """
        settings, notices = self._settings, []
        if settings.disabled or settings.enabled_only or settings.prefer:
            by_kind = {kind: self.specs(kind) for kind in self._kinds} if settings.prefer else {}
            notices = explain.unused_settings(settings, self.records, by_kind)
        if notice := untrusted_notice():
            notices.append(notice)
        for name, specs in self._commands_by_name().items():
            if len(specs) > 1:
                group, _, last = name.rpartition(" ")  # `plugins acme/new`, as it is typed
                ways = quoted(f"{group} {spec.dist}/{last}".strip() for spec in specs)
                notices.append(f"command {name!r} is offered by several plugins; use one of {ways}")
        return notices

    def specs(self, kind: str) -> dict[str, list[ComponentSpec]]:
        """Return the usable components of one kind by name, each with all its providers; nothing is imported."""
        self._require_kind(kind)
        with self._lock:
            plugins = self._plugins()
            if kind not in self._index:
                self._index[kind] = plugins.specs(kind)
            return {name: list(specs) for name, specs in self._index[kind].items()}

    def names(self, kind: str) -> list[str]:
        """Return the names of one kind, sorted."""
        return sorted(self.specs(kind))

    def find(self, name: str, kind: str) -> ComponentSpec:
        """Return the component called `Name` or `plugin/Name`, without importing it.

        Raises:
            ComponentNotFound: No plugin offers it, or only a disabled one.
            ComponentConflict: Several plugins offer it and none is preferred.
            PluginBroken: Only a broken plugin offers it.
            PluginIncompatible: Only a plugin for another core version offers it.
        """
        dist, _, bare = name.rpartition("/")
        specs = self.specs(kind).get(bare, [])
        spec = choose(specs, dist=dist, name=bare, kind=kind, settings=self._settings)
        if spec is not None:
            return spec
        from .index import where_to_get

        records = self.records
        raise explain.not_found(
            requested=name,
            dist=dist,
            name=bare,
            kind=kind,
            by_kind={k: self.specs(k) for k in self._kinds},
            records=records,
            elsewhere=where_to_get(bare, kind, dist, installed=[r.dist for r in records]),
        )

    def commands(self) -> dict[str, CommandSpec]:
        """Return the subcommands of usable plugins; where two plugins share a name, each is `plugin/name`."""
        commands: dict[str, CommandSpec] = {}
        for name, specs in self._commands_by_name().items():
            commands.update({name: specs[0]} if len(specs) == 1 else {f"{s.dist}/{name}": s for s in specs})
        return dict(sorted(commands.items()))

    def exports(self, module: str) -> dict[str, list[ExportSpec]]:
        """Return what usable plugins add to a namespace of core, by name; nothing is imported."""
        by_name: dict[str, list[ExportSpec]] = {}
        for record in self.records:
            for export in record.manifest.exports if record.status == "ok" and record.manifest else ():
                if export.module == module:
                    by_name.setdefault(export.name, []).append(export)
        return by_name

    def export(self, module: str, name: str) -> Any:
        """Return the function or class that a plugin adds to a namespace of core as `module.name`.

        Raises:
            ComponentNotFound: No usable plugin adds it; the text names the package that does, if it is known.
            ComponentConflict: Several plugins add it.
            PluginBroken: The module that defines it cannot be imported.
        """
        specs = self.exports(module).get(name, [])
        if len(specs) > 1:
            dists = quoted(spec.dist for spec in specs)
            raise ComponentConflict(f"{module}.{name} is exported by {dists}; disable one: TWINKLE_PLUGINS_DISABLE")
        if not specs:
            from .index import where_to_get_export

            raise explain.export_not_found(module, name, self.records, where_to_get_export(module, name))
        self._check_frozen(specs[0].dist)
        return import_object(specs[0].ref, context=f"{module}.{name}", declared_by=f"the manifest of {specs[0].dist}")

    def attribute(self, module: str, name: str, kind: str = "") -> Any:
        """Return the object `module.name`: an export of a plugin, or the component of that name and kind.

        Raises:
            RequirementMissing: No installed plugin offers it, and the index knows a package that does.
            ComponentNotFound: No plugin and no index entry has it.
        """
        from .index import where_to_get, where_to_get_export

        # The contract of a kind is needed to resolve components of that kind, so it is never looked up as one.
        is_contract = bool(kind) and self._kinds.get(kind) == f"{module}:{name}"
        try:
            if name in self.exports(module) or is_contract or not kind:
                return self.export(module, name)
            return self.resolve(name, kind)
        except ComponentNotFound as error:
            manifests = [record.manifest for record in self.records if record.manifest]
            if any((e.module, e.name) == (module, name) for manifest in manifests for e in manifest.exports):
                raise explain.export_not_found(module, name, self.records, "") from error
            installed = [record.dist for record in self.records]
            where = where_to_get_export(module, name)
            where = where or (where_to_get(name, kind, installed=installed, exact=True) if kind else "")
            if not where:
                raise
            # Not an AttributeError: `from module import name` would hide its text.
            raise RequirementMissing(f"{module}.{name} is not installed: {where}") from error

    # From a name to a component

    def resolve(self, x: Any, kind: str) -> Any:
        """Resolve a component argument to a class, a function or an instance of that kind.

        `x` is an instance or a class of the contract, a function if the contract is callable, a `ComponentSpec`, or
        one of the strings `Name`, `plugin/Name`, `package.module:Attr`, `./file.py:Name`, `hf://org/repo@revision#Name`.
        A component that a plugin offers is resolved once, until plugins are added or withdrawn.
        """
        contract = self.contract(kind)
        if not isinstance(x, str | ComponentSpec):
            return check_contract(x, contract, context=f"the {kind}")
        if self._allows is not None:
            self._check_allowed(x, kind, self._allows)
        resolved = (
            self._resolved
        )  # `_plugins_changed` replaces this dict: a component that is being resolved meanwhile goes to the old one
        if (kind, x) in resolved:
            return resolved[kind, x]
        if isinstance(x, ComponentSpec):
            spec, context = x, str(x)
        else:
            reference, context = parse_reference(x, kind), f"{kind} {x!r}"
            if reference.form != "name":
                return check_contract(component_from_reference(reference, x, kind, self), contract, context=context)
            spec = self.find(x, kind)
        if (kind, spec) not in resolved:
            resolved[kind, spec] = check_contract(self.load(spec), contract, context=context)
        resolved[kind, x] = resolved[kind, spec]
        return resolved[kind, x]

    def build(self, x: Any, kind: str, /, *args: Any, **init_args: Any) -> Any:
        """Resolve `x` and instantiate it if it is a class; arguments are checked first, and never ignored."""
        component = self.resolve(x, kind)
        context = (
            f"{kind} {x!r}"
            if isinstance(x, str)
            else f"{kind} {getattr(component, '__name__', type(component).__name__)!r}"
        )
        if not isinstance(component, type):
            if args or init_args:
                arguments = ", ".join([*(repr(a) for a in args), *(f"{k}=…" for k in init_args)])
                form = "a function" if callable(component) and hasattr(component, "__name__") else "already an instance"
                raise ArgumentError(
                    f"{context} is {form}, so it takes no arguments here, got {arguments}; pass the class"
                )
            return component
        if missing := missing_methods(component):
            raise ComponentTypeError(
                f"{context} cannot be instantiated: {component.__name__} does not implement {quoted(missing)}"
            )
        check_keywords(component, init_args, what=context, args=args)
        return component(*args, **init_args)

    def load(self, spec: ComponentSpec) -> Any:
        """Check the requirements of one component, then import it.

        Raises:
            NotTrusted: The run is frozen and its plugin differs from the lock, or code from a hub may not run.
            RequirementMissing: A package it needs is not installed; nothing was imported.
            PluginBroken: The import fails, or the manifest names something that does not exist.
        """
        if spec.root in self._forbidden:
            raise NotTrusted(f"{spec}: {self._forbidden[spec.root]}")
        if spec not in self._satisfied:
            self._check_frozen(spec.dist)
            check_requirements(spec)
            self._satisfied.add(spec)
        ref = spec.ref
        if ref.startswith("."):
            ref = spec.root + (ref[1:] if ref.startswith(".:") else ref)
        if spec.root.startswith(f"{CODE_PACKAGE}."):
            from .trust.loading import import_in_load

            return import_in_load(ref, context=str(spec), declared_by="its manifest")
        return import_object(ref, context=str(spec), declared_by="its manifest")

    def identity(self, spec: ComponentSpec) -> CodeIdentity:
        """Return which code a component is: plugin, version and digest; its files are read now.

        Raises:
            ComponentNotFound: Its plugin is no longer installed.
            NotTrusted: The listing of its repository was changed.
        """
        from .trust.identity import identity_of

        return identity_of(spec, self.records)

    def contract(self, kind: str) -> Any:
        """Return the contract of a kind, imported on first use, or None if any object is accepted."""
        self._require_kind(kind)
        if kind not in self._contracts:
            ref = self._kinds[kind]
            self._contracts[kind] = (
                import_object(ref, context=f"the contract of {kind}", declared_by="core") if ref else None
            )
        return self._contracts[kind]

    def view(self, allow: Iterable[str] | Callable[[], Iterable[str]]) -> RegistryView:
        """Return what one tenant sees: the components that `allow` lists as `kind:Name` or `plugin/Name`."""
        from .view import RegistryView

        return RegistryView(self, allow)

    def confine(self, allows: Callable[[ComponentSpec], bool]) -> None:
        """From now on, resolve only names of installed components that are allowed; code by path or from a hub is not.

        This holds for every string, also for those that components resolve themselves. It cannot be undone: a process
        that handles requests of tenants calls it before the first one.

        Args:
            allows: Whether a component may be used.
        """
        with self._lock:
            self._allows = allows
            self._resolved = {}

    def _check_allowed(self, x: str | ComponentSpec, kind: str, allows: Callable[[ComponentSpec], bool]) -> None:
        if isinstance(x, str) and parse_reference(x, kind).form != "name":
            raise NotTrusted(f"{kind} {x!r}: only names of installed components are allowed here")
        spec = self.find(x, kind) if isinstance(x, str) else x
        if not allows(spec):
            raise NotTrusted(f"{kind} {x!r}: {spec.dist} does not declare it safe for tenants of a service")

    # Lifecycle

    def hook(self, name: str) -> HookCall:
        """Return a lifecycle hook, to be called with keyword arguments; implementations are imported at the call."""
        from .hooks import HookCall

        if name not in self._lifecycle:
            raise ComponentNotFound(f"there is no lifecycle hook {name!r}; {nearest_or_all(name, self._lifecycle)}")
        with self._lock:
            if name not in self._hook_calls:
                self._hook_calls[name] = HookCall(name, self._plugins().argument_names(name), self._implementers)
            return self._hook_calls[name]

    def attach(self, plugin_object: Any, name: str) -> None:
        """Register the methods of a live object that are marked with `hookimpl` as lifecycle hooks."""
        with self._lock:
            plugins = self._plugins()
            if plugins.is_attached(name):
                raise ComponentConflict(
                    f"cannot attach {name!r}: an object of that name is attached already; "
                    "detach it first, or use another name"
                )
            if any(name == record.name for record in self._records):
                raise ComponentConflict(f"cannot attach {name!r}: it is the name of a plugin; use another name")
            try:
                plugins.attach(name, plugin_object, self._lifecycle)
            except PluginBroken as error:
                raise ComponentTypeError(str(error)) from error

    def detach(self, name: str) -> None:
        """Undo `attach`."""
        with self._lock:
            if not self._plugins().is_attached(name):
                raise ComponentNotFound(f"cannot detach {name!r}: no object of that name is attached")
            self._plugins().detach(name)

    # Internals

    def _plugins(self) -> PluginSet:
        """Return the pluggy plugins with every usable record registered; the first call imports pluggy."""
        if self._plugin_set is None:
            from .hooks import PluginSet

            self._plugin_set = PluginSet(self._hookspecs, self._kinds)
        for record in self._records:
            if record.status == "ok" and record.manifest and record.name not in self._registered:
                self._plugin_set.add_manifest(record.name, record.manifest.components)
                self._registered.add(record.name)
        return self._plugin_set

    def _plugins_changed(self) -> None:
        self._index.clear()
        self._resolved = {}

    def _check_frozen(self, plugin: str) -> None:
        if self.frozen:
            for record in [r for r in self.records if r.name == plugin]:
                self.frozen.check(record, self.records)

    def _require_kind(self, kind: str) -> None:
        if kind not in self._kinds:
            raise explain.unknown_kind(kind, self._kinds)

    def _commands_by_name(self) -> dict[str, list[CommandSpec]]:
        by_name: dict[str, list[CommandSpec]] = {}
        for record in self.records:
            for command in record.manifest.commands if record.status == "ok" and record.manifest else ():
                by_name.setdefault(command.name, []).append(command)
        return by_name

    def _implementers(self, hook: str) -> Implementers:
        from .hooks import Implementers

        failed: dict[str, Exception] = {}
        for record in self.records:
            declared = record.manifest.hooks if record.manifest and record.status == "ok" else None
            if declared is None or hook not in declared.implements or record.name in self._hooked:
                continue
            try:
                self._import_hooks(record)
            except PluginBroken as error:
                failed[record.name] = error
                self._replace(record, broken(record, error))
        with self._lock:
            return Implementers(self._plugins().implementations(hook), failed)

    def _import_hooks(self, record: PluginRecord) -> None:
        declared = record.manifest.hooks if record.manifest else None
        if declared is None:
            return
        context = f"hooks of plugin {record.name}"
        try:
            self._check_frozen(record.name)
            module = importlib.import_module(declared.module)
        except NotTrusted as error:
            raise PluginBroken(f"{context}: {error}") from error
        except (Exception, SystemExit) as error:
            raise import_failed(context, declared.module, error) from error
        with self._lock:
            if record.name not in self._hooked:
                self._plugins().add_hooks(record.name, module, declared, self._lifecycle)
                self._hooked.add(record.name)

    def _replace(self, record: PluginRecord, by: PluginRecord) -> None:
        """Replace a usable record by one that is not."""
        with self._lock:
            self._records = [by if r is record else r for r in self._records]
            if record.name in self._registered | self._hooked:
                self._plugins().drop(record.name)
            self._registered.discard(record.name)
            self._hooked.discard(record.name)
            self._plugins_changed()


def _frozen() -> Frozen | None:
    if not is_frozen():
        return None
    from .trust.frozen import Frozen

    return Frozen()


def _key(record: PluginRecord) -> tuple[str, str, str]:
    return (canonical(record.dist), record.package, record.location)
