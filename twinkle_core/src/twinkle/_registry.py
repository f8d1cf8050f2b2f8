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
