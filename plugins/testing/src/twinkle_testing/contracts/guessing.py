"""Of which kind something is that no manifest lists: what its base class says."""

from typing import Any

from twinkle.errors import ArgumentError


def kinds_of(thing: Any) -> list[str]:
    """Return the kinds whose contracts are base classes of a class or an instance, the nearest base first."""
    from twinkle.kinds import KINDS

    contracts = {kind: _imported(about.contract) for kind, about in KINDS.items() if about.contract}
    bases = getattr(thing, "__mro__", type(thing).__mro__)
    return [kind for base in bases for kind, contract in contracts.items() if base is contract]


def kind_of(thing: Any, asked: str) -> str:
    """Return the kind of something.

    Raises:
        ArgumentError: its base classes do not say it.
    """
    fitting = kinds_of(thing)
    if not fitting:
        raise ArgumentError(f"{asked} does not say by a base class what it is; give its kind: --kind loss")
    return fitting[0]


def _imported(contract: str) -> Any:
    """Return a contract that is imported already, as that of a class is; else None."""
    import sys

    module, _, name = contract.partition(":")
    return vars(sys.modules[module]).get(name) if module in sys.modules else None
