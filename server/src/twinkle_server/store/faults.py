"""What goes wrong with the store as a whole."""

from twinkle_server.errors import Unavailable


class StoreError(RuntimeError):
    """The data directory cannot be used; the message says why and what to do."""


class LeaseLost(Unavailable):
    """Another process has taken over the data directory: this one must not write, and has to end."""
