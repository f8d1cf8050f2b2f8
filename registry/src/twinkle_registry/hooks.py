"""Hooks on top of pluggy: the markers `hookspec` and `hookimpl`, the plugin manager, and calls of lifecycle hooks.

Each manifest is registered as a small synthetic plugin, beside hook modules and live objects. A lifecycle call calls
every implementation; an error of one does not affect the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

from .errors import ArgumentError, ComponentTypeError, PluginBroken
from .manifest import ComponentSpec, HooksSpec
from .naming import PROJECT, nearest_or_all, quoted

if TYPE_CHECKING:
    import logging

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class PluginSet:
    """The plugins that are registered with pluggy, under three prefixes: `manifest`, `hooks` and `live`."""

    def __init__(self, hookspecs: Any, kinds: Iterable[str]) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        if unspecified := [kind for kind in kinds if self._hook(f"twinkle_{kind}") is None]:
            where = getattr(hookspecs, "__name__", hookspecs)
            raise ComponentTypeError(f"{where} has no hook spec twinkle_<kind> for the kinds {quoted(unspecified)}")

    def add_manifest(self, plugin: str, components: Sequence[ComponentSpec]) -> None:
        """Register a synthetic plugin whose `twinkle_<kind>` hooks return these components."""
        by_kind: dict[str, list[ComponentSpec]] = {}
        for spec in components:
            by_kind.setdefault(spec.kind, []).append(spec)
        providers = {f"twinkle_{kind}": _provider(specs) for kind, specs in by_kind.items()}
        self._manager.register(_Synthetic(providers), f"manifest:{plugin}")

    def drop(self, plugin: str) -> None:
        """Unregister the components and hooks of a plugin that is broken."""
        for key in (f"manifest:{plugin}", f"hooks:{plugin}"):
            if self._manager.has_plugin(key):
                self._manager.unregister(name=key)

    def specs(self, kind: str) -> dict[str, list[ComponentSpec]]:
        """Return the components of one kind of every plugin, by name, in order of registration."""
        caller = self._hook(f"twinkle_{kind}")
        by_name: dict[str, list[ComponentSpec]] = {}
        for group in reversed(caller() if caller else []):
            for spec in group:
                by_name.setdefault(spec.name, []).append(spec)
        return by_name

    def argument_names(self, hook: str) -> tuple[str, ...]:
        """Return the arguments that the hook spec passes to an implementation."""
        caller = self._hook(hook)
        return tuple(caller.spec.argnames) if caller and caller.spec else ()

    def implementations(self, hook: str) -> list[tuple[str, pluggy.HookImpl]]:
        """Return plugin name and implementation, in the order in which pluggy calls them (last registered first)."""
        caller = self._hook(hook)
        impls = reversed(caller.get_hookimpls()) if caller else ()
        return [(impl.plugin_name.partition(":")[2], impl) for impl in impls]

    def add_hooks(self, plugin: str, module: ModuleType, declared: HooksSpec, lifecycle: Iterable[str]) -> None:
        """Register a hooks module that implements exactly what its manifest declares.

        Raises:
            PluginBroken: It implements other hooks, or takes arguments that the hook spec does not have.
        """
        implemented = self._marked(module)
        if set(implemented) != set(declared.implements):
            raise PluginBroken(
                f"{declared.module} of plugin {plugin} implements {_listed(implemented)}, its manifest declares "
                f"{_listed(declared.implements)}; correct `hooks.implements` in twinkle-plugin.toml "
                "or mark the functions with @twinkle_registry.hookimpl"
            )
        self._register(f"hooks:{plugin}", plugin, module, implemented, lifecycle)

    def attach(self, name: str, live: Any, lifecycle: Iterable[str]) -> None:
        """Register an object whose methods marked with `hookimpl` are called with the hooks of their name."""
        implemented = self._marked(live)
        if not implemented:
            raise ComponentTypeError(
                f"{name!r}: {type(live).__name__} has no method marked with @hookimpl; hooks are {quoted(lifecycle)}"
            )
        self._register(f"live:{name}", name, live, implemented, lifecycle)

    def is_attached(self, name: str) -> bool:
        """Return whether `attach` was called with that name."""
        return self._manager.has_plugin(f"live:{name}")

    def detach(self, name: str) -> None:
        """Unregister a live object."""
        self._manager.unregister(name=f"live:{name}")

    def _hook(self, name: str) -> pluggy.HookCaller | None:
        caller: pluggy.HookCaller | None = getattr(self._manager.hook, name, None)
        return caller

    def _marked(self, holder: Any) -> dict[str, Callable[..., Any]]:
        marked = {}
        for name in dir(holder):
            if (options := self._manager.parse_hookimpl_opts(holder, name)) is None:
                continue
            hook = options.get("specname") or name
            if hook in marked:
                raise PluginBroken(f"{holder!r} implements {hook} twice; the second is {name!r}")
            marked[hook] = getattr(holder, name)
        return marked

    def _register(
        self,
        key: str,
        plugin: str,
        holder: Any,
        implemented: Mapping[str, Callable[..., Any]],
        lifecycle: Iterable[str],
    ) -> None:
        for hook in implemented:
            if hook not in lifecycle:
                raise PluginBroken(
                    f"plugin {plugin}: there is no lifecycle hook {hook!r}; {nearest_or_all(hook, lifecycle)}"
                )
        try:
            self._manager.register(_Synthetic(implemented), key)
            self._manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            self._manager.unregister(name=key)
            raise PluginBroken(f"plugin {plugin}: {_why_refused(error, self, implemented)}") from error
        wrappers = [h for h in implemented for n, i in self.implementations(h) if n == plugin and _is_wrapper(i)]
        if wrappers:
            self._manager.unregister(name=key)
            raise PluginBroken(
                f"plugin {plugin}: {quoted(wrappers)} are wrappers; a lifecycle hook must be a plain function"
            )


class _Synthetic:
    """A pluggy plugin that has the given hook implementations and nothing else for pluggy to look at."""

    def __init__(self, hooks: Mapping[str, Callable[..., Any]]) -> None:
        vars(self).update(hooks)

    def __dir__(self) -> list[str]:
        return list(vars(self))


def _provider(specs: list[ComponentSpec]) -> Callable[[], list[ComponentSpec]]:
    @hookimpl
    def provide() -> list[ComponentSpec]:
        return specs

    return provide


def _is_wrapper(impl: pluggy.HookImpl) -> bool:
    return bool(impl.wrapper or impl.hookwrapper)


def _listed(names: Iterable[str]) -> str:
    return quoted(sorted(names)) or "nothing"


def _why_refused(error: Exception, plugins: PluginSet, implemented: Iterable[str]) -> str:
    takes = [f"{hook}({', '.join(plugins.argument_names(hook))})" for hook in implemented]
    return f"{' '.join(str(error).split())}; the hooks are {', '.join(takes)}"


@dataclass(frozen=True, slots=True)
class HookResult:
    """The outcome of one call of a hook.

    Attributes:
        results: Return value of each implementation (often None), by name of the plugin, in the order of the calls.
        errors: Exceptions of the other implementations; a plugin that could not be imported is listed once.
    """

    results: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Implementers:
    """The implementations that take part in one call."""

    ready: list[tuple[str, pluggy.HookImpl]]
    failed: dict[str, Exception]


class HookCall:
    """One lifecycle hook, ready to be called with the keyword arguments of its spec."""

    def __init__(self, name: str, arguments: tuple[str, ...], gather: Callable[[str], Implementers]) -> None:
        self.name = name
        self.arguments = arguments
        self._gather = gather
        self._reported: set[str] = set()

    def __call__(self, **kwargs: Any) -> HookResult:
        """Import the plugins that declare this hook and are not imported yet, then call every implementation.

        Raises:
            ArgumentError: The keywords are not those of the hook spec.
        """
        self._check(kwargs)
        implementers = self._gather(self.name)
        result = HookResult(errors=dict(implementers.failed))
        for plugin, error in implementers.failed.items():
            _logger().error("%s: plugin %s cannot be loaded: %s", self.name, plugin, error)
        for plugin, impl in implementers.ready:
            try:
                result.results[plugin] = impl.function(*[kwargs[name] for name in impl.argnames])
            except Exception as error:
                result.errors[plugin] = error
                self._report(plugin, error)
        return result

    def __repr__(self) -> str:
        return f"<hook {self.name}({', '.join(self.arguments)})>"

    def _check(self, kwargs: dict[str, Any]) -> None:
        unknown = [name for name in kwargs if name not in self.arguments]
        missing = [name for name in self.arguments if name not in kwargs]
        if unknown:
            raise ArgumentError(
                f"hook {self.name}: unknown argument {unknown[0]!r}; {nearest_or_all(unknown[0], self.arguments)}"
            )
        if missing:
            raise ArgumentError(f"hook {self.name}: missing argument {quoted(missing)}")

    def _report(self, plugin: str, error: Exception) -> None:
        # A notifier that fails at every step would fill the log with the same traceback.
        first = plugin not in self._reported
        self._reported.add(plugin)
        text = "%s: plugin %s raised %s: %s"
        _logger().error(text, self.name, plugin, type(error).__name__, error, exc_info=error if first else None)


def _logger() -> logging.Logger:
    import logging  # deferred: no hook is called at start-up

    return logging.getLogger("twinkle")
