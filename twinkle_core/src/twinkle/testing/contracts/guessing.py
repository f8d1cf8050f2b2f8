"""Of which kind something is that no manifest lists: what its base class says."""

from typing import Any

from twinkle.errors import ArgumentError, ComponentNotFound


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


def check_kind_in(text: str) -> None:
    """Check the kind in `kind:Name`; other texts pass.

    Raises:
        ComponentNotFound: there is no such kind, or the component of that name is of another.
    """
    from twinkle._registry import registry
    from twinkle.kinds import KINDS
    from twinkle_registry.naming import nearest_or_all

    kind, colon, name = text.partition(":")
    if not colon or not kind.isidentifier():
        return
    if kind not in KINDS:
        raise ComponentNotFound(f"{text!r}: there is no kind {kind!r}; {nearest_or_all(kind, KINDS)}")
    specs = [spec for record in registry().records if record.manifest for spec in record.manifest.components]
    others = [f"{spec.kind}:{spec.name}" for spec in specs if spec.name == name]
    if others and text not in others:
        raise ComponentNotFound(f"{text!r}: no {kind} is called so, but there is {', '.join(sorted(set(others)))}")


def _imported(contract: str) -> Any:
    """Return a contract that is imported already, as that of a class is; else None."""
    import sys

    module, _, name = contract.partition(":")
    return vars(sys.modules[module]).get(name) if module in sys.modules else None
