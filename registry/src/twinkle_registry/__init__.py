"""Finds plugins by their manifests and turns a name into a component when it is first used.

Importing this package imports nothing else: each public name is loaded from its module on first access.
"""

# `typing.TYPE_CHECKING` would cost the import of `typing`; type checkers treat this name the same way.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from .checks import check_keywords
    from .discovery import installed_plugins
    from .errors import (
        ArgumentError,
        ComponentConflict,
        ComponentNotFound,
        ComponentTypeError,
        ManifestError,
        NotTrusted,
        PluginBroken,
        PluginIncompatible,
        RequirementMissing,
        SettingsError,
        TwinkleError,
    )
    from .hooks import HookCall, HookResult, hookimpl, hookspec
    from .manifest import (
        MANIFEST_NAME,
        CommandSpec,
        ComponentSpec,
        ExportSpec,
        HooksSpec,
        Manifest,
        PluginRecord,
    )
    from .naming import nearest
    from .reading import read_manifest
    from .registry import Registry
    from .settings import Settings
    from .trust.identity import CodeIdentity
    from .validation import MissingRequirement, check_requirements, missing_requirements
    from .view import RegistryView

__version__ = "0.1.0"

_HOMES = {
    "checks": ("check_keywords",),
    "discovery": ("installed_plugins",),
    "errors": (
        "ArgumentError",
        "ComponentConflict",
        "ComponentNotFound",
        "ComponentTypeError",
        "ManifestError",
        "NotTrusted",
        "PluginBroken",
        "PluginIncompatible",
        "RequirementMissing",
        "SettingsError",
        "TwinkleError",
    ),
    "hooks": ("HookCall", "HookResult", "hookimpl", "hookspec"),
    "manifest": (
        "MANIFEST_NAME",
        "CommandSpec",
        "ComponentSpec",
        "ExportSpec",
        "HooksSpec",
        "Manifest",
        "PluginRecord",
    ),
    "naming": ("nearest",),
    "reading": ("read_manifest",),
    "registry": ("Registry",),
    "settings": ("Settings",),
    "trust.identity": ("CodeIdentity",),
    "validation": ("MissingRequirement", "check_requirements", "missing_requirements"),
    "view": ("RegistryView",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "MANIFEST_NAME",
    "ArgumentError",
    "CodeIdentity",
    "CommandSpec",
    "ComponentConflict",
    "ComponentNotFound",
    "ComponentSpec",
    "ComponentTypeError",
    "ExportSpec",
    "HookCall",
    "HookResult",
    "HooksSpec",
    "Manifest",
    "ManifestError",
    "MissingRequirement",
    "NotTrusted",
    "PluginBroken",
    "PluginIncompatible",
    "PluginRecord",
    "Registry",
    "RegistryView",
    "RequirementMissing",
    "Settings",
    "SettingsError",
    "TwinkleError",
    "check_keywords",
    "check_requirements",
    "hookimpl",
    "hookspec",
    "installed_plugins",
    "missing_requirements",
    "nearest",
    "read_manifest",
]


def __getattr__(name: str) -> object:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
