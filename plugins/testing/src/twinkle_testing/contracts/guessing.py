"""Infers the kind of a component that no manifest lists, from its base classes."""

from typing import Any

from twinkle.errors import ArgumentError


def kinds_of(thing: Any) -> list[str]:
    """Return the kinds whose contracts are base classes of a class or an instance, the nearest base first."""
    from twinkle.kinds import KINDS

    contracts = {kind: _imported(about.contract) for kind, about in KINDS.items() if about.contract}
    bases = getattr(thing, "__mro__", type(thing).__mro__)
    return [kind for base in bases for kind, contract in contracts.items() if base is contract]


def kind_of(thing: Any, context: str) -> str:
    """Return the kind of a class or instance.

    Raises:
        ArgumentError: its base classes do not determine the kind.
    """
    fitting = kinds_of(thing)
    if not fitting:
        raise ArgumentError(
            f"the kind of {context} cannot be inferred from its base classes; give it with --kind, such as --kind loss"
        )
    return fitting[0]


def _imported(contract: str) -> Any:
    """Return a contract if its module is already imported; else None."""
    import sys

    module, _, name = contract.partition(":")
    return vars(sys.modules[module]).get(name) if module in sys.modules else None
