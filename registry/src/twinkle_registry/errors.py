"""Every error of Twinkle's packages in one tree; each is also the builtin that it replaces.

TwinkleError (Exception)
├── ComponentNotFound (LookupError)      no such component, kind, hook or plugin
├── ComponentConflict (LookupError)      two providers of one name
├── ComponentTypeError (TypeError)       the object does not fit the contract
├── ArgumentError (TypeError)            an unknown or missing keyword, or a value not allowed; also a ValueError
├── ManifestError (ValueError)           twinkle-plugin.toml is wrong
├── SettingsError (ValueError)           twinkle.toml or an environment variable is wrong
├── PluginBroken (RuntimeError)          the plugin cannot be imported, or is not what its manifest says
├── PluginIncompatible (RuntimeError)    made for another version of twinkle-core
├── RequirementMissing (ImportError)     a package that the component needs is not installed
└── NotTrusted (PermissionError)         code that is not allowed to run
"""


class TwinkleError(Exception):
    """Base of every error that Twinkle's packages raise on purpose."""


class ComponentNotFound(TwinkleError, LookupError):
    """No installed plugin offers the requested name."""


class ComponentConflict(TwinkleError, LookupError):
    """Several plugins offer the requested name, and no setting prefers one."""


class ComponentTypeError(TwinkleError, TypeError):
    """The object does not fit the contract of its kind."""


class ArgumentError(TwinkleError, TypeError, ValueError):
    """A call has an unknown, missing or surplus argument, or a value that the argument does not allow."""


class ManifestError(TwinkleError, ValueError):
    """A manifest cannot be read, or a value in it is invalid.

    Attributes:
        manifest: What could be read (a `Manifest`), so that it can be checked too; else None.
    """

    def __init__(self, message: str, manifest: object = None) -> None:
        super().__init__(message)
        self.manifest = manifest


class SettingsError(TwinkleError, ValueError):
    """A configuration file or an environment variable of the registry is wrong."""


class PluginBroken(TwinkleError, RuntimeError):
    """A plugin cannot be imported, or is not what its manifest says."""


class PluginIncompatible(TwinkleError, RuntimeError):
    """A plugin was made for another version of twinkle-core."""


class RequirementMissing(TwinkleError, ImportError):
    """A package that a component needs is not installed, or its version is wrong."""


class NotTrusted(TwinkleError, PermissionError):
    """The requested code is not allowed to run."""
