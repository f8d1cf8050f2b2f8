"""Headers of proxies: only those of trusted addresses change what the service knows about a request."""

import ipaddress
import re
from collections.abc import Sequence
from typing import Any, Final

from twinkle.errors import ConfigError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_HOST: Final = re.compile(r"[A-Za-z0-9._-]{1,255}(:\d{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:\d{1,5})?")
_PREFIX: Final = re.compile(r"(/[A-Za-z0-9._~-]+)+")
_LONGEST: Final = 200


def networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """Return the networks of trusted proxies; an address is a network of one.

    Raises:
        ConfigError: a text is not an address or a network.
    """
    found = []
    for text in texts:
        try:
            found.append(ipaddress.ip_network(text, strict=False))
        except ValueError as error:
            raise ConfigError(
                f"--trusted-proxy must be an address or a network such as 10.0.0.0/8, got {text!r}"
            ) from error
    return tuple(found)


class ForwardedMiddleware:
    """ASGI middleware that applies a proxy's `X-Forwarded-*` headers to the scope, and the prefix of `--root-path`.

    Headers of other senders are ignored. They stay in the request, so that it does not look local.

    Args:
        app: the next application.
        trusted: addresses and networks of proxies.
        root_path: prefix that a proxy removes; `X-Forwarded-Prefix` of a trusted proxy overrides it.
    """

    def __init__(self, app: Any, trusted: Sequence[str] = (), root_path: str = "") -> None:
        self._app = app
        self._trusted = networks(trusted)
        self._root_path = root_path

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one connection."""
        if scope["type"] == "http":
            prefix = self._root_path
            if self._trusted and self._trusts((scope.get("client") or ("",))[0]):
                prefix = self._apply(scope) or prefix
            if prefix:
                # Starlette builds links with this key. `root_path` would make it look for the prefix in the path.
                scope["app_root_path"] = prefix
        await self._app(scope, receive, send)

    def _trusts(self, address: str) -> bool:
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return False
        mapped = getattr(parsed, "ipv4_mapped", None)
        return any((mapped or parsed) in network for network in self._trusted)

    def _apply(self, scope: Any) -> str:
        """Change client, scheme and host of a scope, and return the prefix that the proxy removed."""
        forwarded = _forwarded(scope["headers"])
        addresses = [part.strip() for part in forwarded.get("for", "").split(",") if part.strip()]
        sender = next((address for address in reversed(addresses) if not self._trusts(address)), None)
        if sender is None and addresses:
            sender = addresses[0]
        if sender is not None:
            scope["client"] = (sender[:_LONGEST], 0)
        scheme = _last(forwarded.get("proto", "")).lower()
        if scheme in ("http", "https"):
            scope["scheme"] = scheme
        host = _last(forwarded.get("host", ""))
        if _HOST.fullmatch(host):
            kept = [(name, value) for name, value in scope["headers"] if name != b"host"]
            scope["headers"] = [(b"host", host.encode()), *kept]
        prefix = _last(forwarded.get("prefix", "")).rstrip("/")
        return prefix if len(prefix) <= _LONGEST and _PREFIX.fullmatch(prefix) else ""


def _forwarded(headers: Any) -> dict[str, str]:
    """Return the `X-Forwarded-*` headers by the last part of their names; repeated headers are joined."""
    found: dict[str, str] = {}
    for name, value in headers:
        if name.startswith(b"x-forwarded-"):
            key, text = name[12:].decode("latin-1"), value.decode("latin-1")
            found[key] = f"{found[key]},{text}" if key in found else text
    return found


def _last(text: str) -> str:
    """Return the last value of a list, which the nearest proxy has added."""
    return text.rpartition(",")[2].strip()
