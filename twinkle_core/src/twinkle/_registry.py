"""The one registry of this process, filled with the installed plugins on first use."""

from functools import cache

from twinkle_registry import Registry


@cache
def registry() -> Registry:
    """Return this process's plugin registry."""
    from twinkle import __version__, hookspecs
    from twinkle.kinds import KINDS

    contracts = {name: kind.contract or None for name, kind in KINDS.items()}
    found = Registry(hookspecs, kinds=contracts, core_version=__version__)
    found.load_installed()
    return found
