"""Which code computes a loss."""

from twinkle import registry
from twinkle.errors import TwinkleError
from twinkle_registry import CodeIdentity, ComponentSpec


def identity_or_none(spec: ComponentSpec) -> CodeIdentity | None:
    """Return the code of a component as it is in its files now; None if they cannot be found or read.

    A missing plugin is no error here: importing it reports the reason.
    """
    try:
        return registry().identity(spec)
    except (TwinkleError, OSError):
        return None
