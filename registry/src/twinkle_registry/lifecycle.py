"""Calls a lifecycle hook: every implementation is called, and the error of one never reaches another."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import ArgumentError
from .naming import nearest_or_all, quoted

if TYPE_CHECKING:
    import pluggy

logger = logging.getLogger("twinkle")


@dataclass(frozen=True, slots=True)
class HookResult:
    """What one call of a hook gave.

    Attributes:
        results: What each implementation returned (often None), by name of the plugin, in the order of the calls.
        errors: What the others raised; a plugin that could not be imported is among them, once.
    """

    results: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Implementers:
    """Everybody who takes part in one call."""

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
        """Import whoever declares this hook and is not imported yet, then call every implementation.

        Raises:
            ArgumentError: The keywords are not those of the hook spec.
        """
        self._check(kwargs)
        implementers = self._gather(self.name)
        result = HookResult(errors=dict(implementers.failed))
        for plugin, error in implementers.failed.items():
            logger.error("%s: plugin %s cannot be loaded: %s", self.name, plugin, error)
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
        # A notifier that fails at every step would fill the log with one traceback.
        first = plugin not in self._reported
        self._reported.add(plugin)
        text = "%s: plugin %s raised %s: %s"
        logger.error(text, self.name, plugin, type(error).__name__, error, exc_info=error if first else None)
