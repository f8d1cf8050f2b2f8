"""The one registry of this process, filled with the installed plugins on first use."""

from functools import cache

from twinkle_registry import Registry


@cache
def registry() -> Registry:
    """Return this process's plugin registry: installed plugins, and those of a Hub that twinkle.lock lists."""
    from twinkle import __version__, hookspecs
    from twinkle.kinds import KINDS
    from twinkle_registry.locked import locked_plugins

    contracts = {name: kind.contract or None for name, kind in KINDS.items()}
    found = Registry(hookspecs, kinds=contracts, core_version=__version__)
    found.load_installed(also=locked_plugins())
    return found


def check_kind_in(text: str) -> None:
    """Check the kind in `kind:Name`; other texts pass.

    Raises:
        ComponentNotFound: there is no such kind, or the component of that name is of another.
    """
    from twinkle.errors import ComponentNotFound
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
