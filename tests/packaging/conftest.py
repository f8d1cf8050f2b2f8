"""Wheels of all members, and clean environments to install them into."""

from installing import environment, unpacked, view, wheels

__all__ = ["environment", "unpacked", "view", "wheels"]
