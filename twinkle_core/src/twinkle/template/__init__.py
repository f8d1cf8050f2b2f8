"""Templates: the class `Template` (contract and component in one), and every installed template by name."""

from twinkle._lazy import room
from twinkle.template.base import Template

__all__ = ["Template"]

__getattr__, __dir__ = room(__name__, "template")
