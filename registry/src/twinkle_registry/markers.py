"""The pluggy markers of the project: `hookspec` for core, `hookimpl` for plugins with lifecycle hooks."""

import pluggy

from .naming import PROJECT

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
