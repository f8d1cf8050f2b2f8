"""Takes secrets out of text: the last thing that happens to a line of a log, and to the words of a failure."""

import hmac
import re

_SECRETS = re.compile(
    r"tml-[A-Za-z0-9_-]{6,}"
    r"|eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*){0,2}"
    r"|(?<=download/)[A-Za-z0-9_-]{20,}(?:\.[A-Za-z0-9_-]+)*"
    r"|(?P<header>(?:x-api-key|authorization|cookie)[\"'\]]*\s*[:=,]\s*[b\"'\\]*)[^\"'\s,}\\]+",
    re.IGNORECASE,
)
_KEY = re.compile(r"tml-[A-Za-z0-9_-]{43}")
HIDDEN = "[hidden]"


def redact(text: str) -> str:
    """Return a text without keys, tokens, signed links and the headers that carry them."""
    return _SECRETS.sub(lambda found: (found["header"] or "") + HIDDEN, text)


def holds_key(text: str) -> bool:
    """Return whether a text has an API key in it: no name may, for names are shown and kept."""
    return _KEY.search(text) is not None


def tenant_mark(tenant: str, secret: bytes) -> str:
    """Return what stands for a tenant in logs and figures; it cannot be turned back without the secret."""
    return hmac.digest(secret, b"tenant\0" + tenant.encode(), "sha256").hex()[:12]
