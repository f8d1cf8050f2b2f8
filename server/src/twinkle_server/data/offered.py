"""The components that requests to data resources may name; this module imports none of them."""

from typing import Final

from twinkle import registry
from twinkle_registry import ComponentSpec

KINDS: Final = ("template", "processor", "preprocessor", "filter", "reward", "dataset", "dataloader")
"""Kinds of components that are built as data resources, or as arguments of their methods."""


def allowed(spec: ComponentSpec) -> bool:
    """Return whether requests may name a component."""
    return spec.tenant_safe and "served" in spec.runtimes


def names(kind: str) -> list[str]:
    """Return the names of the components of a kind that requests may use."""
    found = {name: [spec for spec in specs if allowed(spec)] for name, specs in registry().specs(kind).items()}
    return sorted(name for name, specs in found.items() if len(specs) == 1)
