"""The client that objects use if they are given none: that of the last `init_twinkle_client`."""

from typing import TYPE_CHECKING

from twinkle.errors import TrainingStateError

if TYPE_CHECKING:
    from twinkle_client.data import Client

_current: "Client | None" = None


def set_current_client(client: "Client | None") -> None:
    """Make a client that of new objects; None means that there is none."""
    global _current
    _current = client


def current_client() -> "Client":
    """Return the client of new objects.

    Raises:
        TrainingStateError: no client was initialized.
    """
    if _current is None:
        raise TrainingStateError("there is no client; call init_twinkle_client(base_url, api_key), or give client=")
    return _current
