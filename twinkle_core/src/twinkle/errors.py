"""Every error that Twinkle raises on purpose, as one tree; each is also the builtin it refines.

TwinkleError
├── ComponentNotFound (LookupError)      no plugin offers the name
├── ComponentConflict (LookupError)      several plugins offer it
├── ComponentTypeError (TypeError)       the object does not fit the contract of its kind
├── ArgumentError (TypeError)            unknown or missing keyword, or a value not allowed; also a ValueError
├── ManifestError (ValueError)           a plugin's manifest is wrong
├── PluginBroken (RuntimeError)          a plugin fails at import
├── PluginIncompatible (RuntimeError)    a plugin needs another version of core
├── RequirementMissing (ImportError)     a package that a component needs is absent
├── NotTrusted (PermissionError)         code from a hub that is not allowed
├── SettingsError (ValueError)           twinkle.toml or TWINKLE_* is wrong
├── ConfigError (ValueError)             a recipe's configuration is wrong
├── MeshError (ValueError)               sizes of a device mesh do not fit
├── RankError (RuntimeError)             ranks do not make the same calls, or one has left
├── DataError (ValueError)               a data set or a row cannot be used
│   └── EncodeError                      a template cannot encode a row
├── ModelLoadError (OSError)             a model folder is missing, incomplete or corrupt
├── HubError (OSError)                   a hub cannot be reached, refuses, or does not have the object
├── EngineFault (RuntimeError)           an engine cannot continue; its process must end
├── CapacityError (RuntimeError)         something does not fit into memory or another limit
├── CheckpointError (OSError)            a checkpoint is incomplete or belongs to another model
├── OutputError (OSError)                an output folder cannot be written
├── NonFiniteError (ArithmeticError)     a loss or a gradient is NaN or infinite
├── OperationsFailed (ExceptionGroup)    operations of some adapters failed in a call for several
├── PatchError (RuntimeError)            a patch conflicts with another, or with an installed version
├── TrainingStateError (RuntimeError)    calls of the loop in an invalid order
└── Unsupported (NotImplementedError)    a published option that this backend does not have
"""

from typing import Any

from twinkle_registry import (
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

__all__ = [
    "ArgumentError",
    "CapacityError",
    "CheckpointError",
    "ComponentConflict",
    "ComponentNotFound",
    "ComponentTypeError",
    "ConfigError",
    "DataError",
    "EncodeError",
    "EngineFault",
    "HubError",
    "ManifestError",
    "MeshError",
    "ModelLoadError",
    "NonFiniteError",
    "NotTrusted",
    "OperationsFailed",
    "OutputError",
    "PatchError",
    "PluginBroken",
    "PluginIncompatible",
    "RankError",
    "RequirementMissing",
    "SettingsError",
    "TrainingStateError",
    "TwinkleError",
    "Unsupported",
]


class ConfigError(TwinkleError, ValueError):
    """A recipe's configuration has an unknown key or a value of the wrong type."""


class MeshError(TwinkleError, ValueError):
    """The sizes of a device mesh do not multiply to the world size, or a batch cannot be divided by them."""


class RankError(TwinkleError, RuntimeError):
    """The ranks that train one model are not at the same call, or one of them has failed or left."""


class DataError(TwinkleError, ValueError):
    """A data set is missing, empty or malformed."""


class EncodeError(DataError):
    """A template cannot turn a row into tokens; the message names the row and the reason."""


class ModelLoadError(TwinkleError, OSError):
    """A model folder is missing, incomplete or corrupt."""


class HubError(TwinkleError, OSError):
    """A hub cannot be reached, refuses, or does not have the requested object."""


class CheckpointError(TwinkleError, OSError):
    """A checkpoint is missing, incomplete, or belongs to another model."""


class OutputError(TwinkleError, OSError):
    """An output folder cannot be created or written."""


class NonFiniteError(TwinkleError, ArithmeticError):
    """A loss or a gradient is NaN or infinite.

    Attributes:
        inputs: the rows of the (micro-)batch that caused it, as the caller passed them.
    """

    def __init__(self, message: str, inputs: Any = None) -> None:
        super().__init__(message)
        self.inputs = inputs


class EngineFault(TwinkleError, RuntimeError):
    """The state of an engine is no longer valid: its device failed, or a call stopped halfway.

    The process must end; a new one restores adapters from their snapshots.
    """


class CapacityError(TwinkleError, RuntimeError):
    """Something does not fit; the message says how much it needs, for what, and how much is available."""


class OperationsFailed(TwinkleError, ExceptionGroup):
    """In a call for several adapters the operations of some failed; those of the others succeeded.

    Attributes:
        exceptions: one for each failed operation; its notes name the adapter.
        outputs: one for each row, in the caller's order; None where the operation failed.
    """

    def __new__(cls, message: str, errors: "list[Exception]", outputs: "list[Any]") -> "OperationsFailed":
        """Create the group from message and errors only, as `ExceptionGroup` requires."""
        return super().__new__(cls, message, errors)

    def __init__(self, message: str, errors: "list[Exception]", outputs: "list[Any]") -> None:
        super().__init__(message, errors)
        self.outputs = outputs

    def derive(self, excs: "Any") -> "OperationsFailed":  # type: ignore[override]
        """Return a group of some of the errors, as `split` and `except*` do."""
        return OperationsFailed(self.message, list(excs), self.outputs)


class PatchError(TwinkleError, RuntimeError):
    """A patch conflicts with another, does not support the installed version of a library, or cannot be undone."""


class TrainingStateError(TwinkleError, RuntimeError):
    """Methods of the training loop were called in an invalid order."""


class Unsupported(TwinkleError, NotImplementedError):
    """A published option that this backend does not support; the message names one that does."""
