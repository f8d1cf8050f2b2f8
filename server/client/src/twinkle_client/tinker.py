"""`init_tinker_client`: prepares scripts that use the Tinker SDK for a service."""

import os
from typing import Any

from twinkle.errors import ArgumentError
from twinkle_client.http import DEFAULT_URL

_PREFIX = "tml-"


def init_tinker_client(base_url: str | None = None, api_key: str | None = None, **kwargs: Any) -> None:
    """Set address and key for scripts that use the unmodified Tinker SDK; the SDK itself is not changed.

    The SDK reads both from the environment (`TINKER_BASE_URL`, `TINKER_API_KEY`), and takes only keys that begin with
    `tml-`; the keys of a service do. A `ServiceClient(base_url=..., api_key=...)` with arguments of its own needs
    nothing of this. `tinker://` and `twinkle://` paths name the same checkpoints.

    Args:
        base_url: address of the service; by default `TWINKLE_SERVER_URL`.
        api_key: key of the tenant; by default `TWINKLE_SERVER_TOKEN`. A service without keys accepts any; one that does
            not begin with `tml-` gets this prefix, as the SDK would refuse it.
        **kwargs: none; an unknown name is an error.

    Raises:
        ArgumentError: an argument is unknown.
    """
    if kwargs:
        raise ArgumentError(f"init_tinker_client has no argument {sorted(kwargs)[0]!r}; it takes: base_url, api_key")
    url, key = address_and_key(base_url, api_key)
    os.environ["TINKER_BASE_URL"] = url
    os.environ["TINKER_API_KEY"] = key if key.startswith(_PREFIX) else _PREFIX + key


def address_and_key(base_url: str | None, api_key: str | None) -> tuple[str, str]:
    """Return the address and the key of a service: the arguments, or those of the environment."""
    url = base_url or os.environ.get("TWINKLE_SERVER_URL") or os.environ.get("TINKER_BASE_URL") or DEFAULT_URL
    key = api_key or os.environ.get("TWINKLE_SERVER_TOKEN") or os.environ.get("TINKER_API_KEY") or "local"
    return url.rstrip("/").removesuffix("/api/v1"), key
