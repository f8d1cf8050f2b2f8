"""The published way to load a plugin's class: `Plugin.load_plugin(reference, base)`."""

from typing import Any

from twinkle.errors import ArgumentError


class Plugin:
    """Loads components by reference; `twinkle.registry().resolve` is the same without a base class."""

    @staticmethod
    def load_plugin(plugin_id: str, plugin_base: type) -> Any:
        """Return the class that `plugin_id` names.

        Args:
            plugin_id: any text that names a component: `Name`, `plugin/Name`, `package.module:Attr`,
                `./file.py:Name`, or a Hub's reference where a plugin reads its scheme.
            plugin_base: the contract that it must satisfy, such as `twinkle.loss.Loss`, or a subclass of one.

        Raises:
            ArgumentError: `plugin_base` is no contract.
            ComponentNotFound: nothing has that name.
            ComponentTypeError: what has it is no `plugin_base`.
        """
        from twinkle._registry import registry
        from twinkle.errors import ComponentTypeError

        found = registry().resolve(plugin_id, _kind(plugin_base))
        if isinstance(found, type) and not issubclass(found, plugin_base):
            raise ComponentTypeError(f"{plugin_id!r} is {found.__qualname__}, which is no {plugin_base.__qualname__}")
        return found


def _kind(base: Any) -> str:
    """Return the kind whose contract is `base` or one of its parents."""
    from twinkle._registry import registry
    from twinkle.kinds import KINDS

    contracts = {kind: registry().contract(kind) for kind, found in KINDS.items() if found.contract}
    for cls in getattr(base, "__mro__", ()):
        for kind, contract in contracts.items():
            if cls is contract:
                return kind
    raise ArgumentError(
        f"plugin_base is {base!r}; give the contract of a kind, such as twinkle.loss.Loss, or a subclass of one"
    )
