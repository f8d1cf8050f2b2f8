"""Messages to any address that takes JSON."""

from collections.abc import Iterator, Mapping
from typing import Any

from twinkle.errors import ArgumentError
from twinkle.notifier import Notifier, secrets_of
from twinkle_notifiers.delivery import Delivery
from twinkle_notifiers.http import checked_url, host_of, post_json
from twinkle_notifiers.text import clean, json_bytes_of, shortened

GAP = "{message}"


class WebhookNotifier(Notifier):
    """Posts a message as JSON: to Mattermost, Teams, Discord, ntfy, a service of your own.

    An answer with a status of 2xx is success. What cannot be delivered is logged and forgotten.

    Args:
        url: the address; a secret.
        headers: further headers, for example `{"Authorization": "Bearer ..."}`; secrets.
        template: the JSON to send: plain values with `{message}` as placeholder of the message in at least one text; by
            default `{"text": "{message}"}`.
        timeout: seconds to wait for an answer.
        limit: bytes that the message may have as JSON; a longer one loses its middle.
        retries: attempts after the first, where the service is away or busy.
        time_limit: seconds for all attempts together.

    Raises:
        ArgumentError: an argument does not fit; no message shows the address or a header's value.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        template: Any = None,
        timeout: float = 5.0,
        *,
        limit: int = 100_000,
        retries: int = 3,
        time_limit: float = 20.0,
    ) -> None:
        self._url = checked_url("WebhookNotifier", "url", url)
        self._headers = _checked_headers(headers or {})
        self._template = {"text": GAP} if template is None else template
        if not any(GAP in text for text in _texts(self._template)):
            raise ArgumentError(f"WebhookNotifier: no text of template has {GAP} in it, so no message would be sent")
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 100:
            raise ArgumentError(f"WebhookNotifier: limit is {limit!r}; it is a whole number of bytes from 100 on")
        self._limit = limit
        self._deliver = Delivery("WebhookNotifier", timeout, retries, time_limit)

    def __call__(self, message: str) -> None:
        """Deliver `message`, or log why not."""
        body = _filled(self._template, shortened(clean(message), self._limit, json_bytes_of))
        self._deliver(
            lambda seconds: post_json(self._url, body, seconds, _anything, self._headers),
            to=host_of(self._url),
            secrets=secrets_of(self),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments of the constructor and `type`; they hold the secrets."""
        own = {"url": self._url, "headers": dict(self._headers), "template": self._template, "limit": self._limit}
        return {"type": "WebhookNotifier", **own, **self._deliver.to_dict()}


def _anything(text: str) -> None:
    """The status alone decides."""


def _checked_headers(headers: Any) -> dict[str, str]:
    if not isinstance(headers, Mapping):
        raise ArgumentError(f"WebhookNotifier: headers is a {type(headers).__name__}; it maps names to texts")
    for name, value in headers.items():
        texts = isinstance(name, str) and isinstance(value, str)
        if not texts or not name or not all(" " < letter < "\x7f" and letter != ":" for letter in name):
            raise ArgumentError(f"WebhookNotifier: headers maps names to texts; {name!r} does not")
        if not all(" " <= letter < "\x7f" for letter in value):
            raise ArgumentError(f"WebhookNotifier: the value of header {name!r} holds a letter that no header may have")
    return dict(headers)


def _filled(template: Any, message: str) -> Any:
    if isinstance(template, str):
        return template.replace(GAP, message)
    if isinstance(template, Mapping):
        return {name: _filled(value, message) for name, value in template.items()}
    if isinstance(template, list | tuple):
        return [_filled(value, message) for value in template]
    return template


def _texts(template: Any) -> Iterator[str]:
    """Yield the texts of a template.

    Raises:
        ArgumentError: it holds what JSON does not know.
    """
    if isinstance(template, str):
        yield template
    elif isinstance(template, Mapping) and all(isinstance(name, str) for name in template):
        for value in template.values():
            yield from _texts(value)
    elif isinstance(template, list | tuple):
        for value in template:
            yield from _texts(value)
    elif not (template is None or isinstance(template, bool | int | float)):
        raise ArgumentError(f"WebhookNotifier: template holds a {type(template).__name__}, which is not JSON")
