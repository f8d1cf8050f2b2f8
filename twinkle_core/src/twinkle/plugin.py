"""The published way to load a plugin's class: `Plugin.load_plugin(reference, base)`."""

import sys
from typing import Any

from twinkle.errors import ArgumentError, TwinkleError


class Plugin:
    """Loads components by reference; `twinkle.registry().resolve` is the same without a base class."""

    @staticmethod
    def load_plugin(plugin_id: str, plugin_base: type) -> Any:
        """Return the class that `plugin_id` names.

        Args:
            plugin_id: the name of a component: `Name`, `plugin/Name`, `package.module:Attr`, `./file.py:Name`, or a hub
                reference.
            plugin_base: the required base class: the contract of a kind, such as `twinkle.loss.Loss`,
                a component, such as `twinkle.template.Template`, or a subclass of one.

        Raises:
            ArgumentError: `plugin_base` belongs to no kind.
            ComponentNotFound: nothing has that name.
            ComponentTypeError: the component is not a subclass of `plugin_base`.
        """
        from twinkle._registry import registry
        from twinkle.errors import ComponentTypeError

        component = registry().resolve(plugin_id, _kind(plugin_base))
        if isinstance(component, type) and not issubclass(component, plugin_base):
            raise ComponentTypeError(
                f"{plugin_id!r} is {component.__qualname__}, not a subclass of {plugin_base.__qualname__}"
            )
        return component


def _kind(base: Any) -> str:
    """Return the kind whose contract or component is `base` or one of its parents."""
    from twinkle.kinds import KINDS

    contracts = {kind: _contract(kind) for kind, kind_spec in KINDS.items() if kind_spec.contract}
    for cls in getattr(base, "__mro__", ()):
        for kind, contract in contracts.items():
            if cls is contract or _is_component(cls, kind):
                return kind
    raise ArgumentError(
        f"plugin_base is {base!r}; give the contract of a kind, such as twinkle.loss.Loss, a component such as "
        "twinkle.template.Template, or a subclass of one"
    )


def _contract(kind: str) -> Any:
    """Return the contract of a kind; None where the plugin that defines it cannot be used."""
    from twinkle._registry import registry

    try:
        return registry().contract(kind)
    except TwinkleError:
        return None


def _is_component(cls: type, kind: str) -> bool:
    """Return whether a plugin lists `cls` as a component of that kind; nothing is imported."""
    from twinkle._registry import registry

    refs = (spec.ref.partition(":") for specs in registry().specs(kind).values() for spec in specs)
    modules = ((sys.modules.get(module), name) for module, _, name in refs)
    return any(module is not None and vars(module).get(name) is cls for module, name in modules)
