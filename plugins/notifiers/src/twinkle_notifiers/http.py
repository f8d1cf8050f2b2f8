"""One attempt to post JSON to a webhook, with the standard library; who has the address of one can write to it."""

import email.utils
import http.client
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from twinkle.errors import ArgumentError
from twinkle_notifiers.delivery import NotNow, Refused

_LONGEST_ANSWER = 65_536
_LATER = (408, 425, 429)
Judge = Callable[[str], None]


def checked_url(who: str, name: str, url: Any) -> str:
    """Return an address that can be posted to; no error shows it.

    Raises:
        ArgumentError: it is none.
    """
    try:
        parts = urllib.parse.urlsplit(url) if isinstance(url, str) else None
        port = parts.port if parts is not None else None
    except ValueError:
        parts = port = None
    fits = parts is not None and parts.scheme in ("http", "https") and parts.hostname and port != 0
    if not fits or not url.isascii() or any(letter <= " " for letter in url):
        raise ArgumentError(f"{who}: {name} must begin with https:// (or http://), name a host, and hold no blanks")
    if "@" in parts.netloc:  # type: ignore[union-attr]
        raise ArgumentError(f"{who}: {name} holds a user before its host; give WebhookNotifier headers instead")
    return str(url)


def host_of(url: str) -> str:
    """Return what of an address may be shown."""
    return urllib.parse.urlsplit(url).hostname or ""


def post_json(url: str, body: Any, seconds: float, judge: Judge, headers: Mapping[str, str] | None = None) -> None:
    """Post `body` once.

    Args:
        url: the address; a redirect is not followed, since a POST would lose its body.
        body: what becomes JSON, in UTF-8.
        seconds: how long to wait for each answer of the network.
        judge: gets the body of a 2xx response, and raises if it reports that nothing was delivered.
        headers: further headers.

    Raises:
        Refused: the answer has a status of 3xx or 4xx.
        NotNow: there is no answer, or its status is 408, 425, 429 or 5xx.
    """
    data = json.dumps(body, ensure_ascii=False).encode("utf-8")
    merged = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "twinkle", **(headers or {})}
    request = urllib.request.Request(url, data, merged, method="POST")
    try:
        with _opener().open(request, timeout=seconds) as answer:
            text = answer.read(_LONGEST_ANSWER).decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        with error:
            raise _status_error(error) from None  # its text holds the address
    except (OSError, http.client.HTTPException) as error:
        raise _network_error(error) from None
    judge(text)


def shown(text: str) -> str:
    """Return an answer as the log shows it: one short line."""
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:200]} ..."


def json_of(text: str) -> dict[str, Any]:
    """Return the JSON object in an answer.

    Raises:
        Refused: it is missing, so another server answers at this address.
    """
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise Refused(f"the answer is not that of the service: {shown(text)!r}")
    return value


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoRedirect)


def _status_error(error: urllib.error.HTTPError) -> Exception:
    why = f"HTTP {error.code}"
    try:
        if said := shown(error.read(_LONGEST_ANSWER).decode("utf-8", "replace")):
            why += f" {said!r}"
    except (OSError, http.client.HTTPException):
        pass  # the status says enough
    if error.code in _LATER or error.code >= 500:
        return NotNow(why, _retry_after(error.headers.get("Retry-After", "")))
    return Refused(why)


def _retry_after(text: str) -> float | None:
    """Return the seconds of a Retry-After header (RFC 9110: a number or a date), or None."""
    text = text.strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None


def _network_error(error: Exception) -> Exception:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        return Refused(f"its certificate is not trusted ({reason.verify_message})")
    return NotNow(type(reason).__name__ if isinstance(reason, Exception) else "no connection")
