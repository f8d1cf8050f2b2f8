"""Messages to a Slack channel through an incoming webhook."""

from typing import Any

from twinkle.notifier import Notifier, secrets_of
from twinkle_notifiers.delivery import Delivery, Refused
from twinkle_notifiers.http import checked_url, host_of, post_json, shown
from twinkle_notifiers.text import clean, shortened

LIMIT = 39_000  # Slack cuts texts off at 40,000 letters


class SlackNotifier(Notifier):
    """Sends messages through a Slack incoming webhook.

    `&`, `<` and `>` are escaped for Slack, so that a traceback cannot contain links or mentions. A
    message above 40,000 letters loses its middle. What cannot be delivered is logged and forgotten.

    Args:
        url: the webhook, `https://hooks.slack.com/services/...`; a secret.
        timeout: seconds to wait for an answer.
        retries: attempts after the first, where the service is away or busy.
        time_limit: seconds for all attempts together.

    Raises:
        ArgumentError: `url` is no address, or a number does not fit.
    """

    def __init__(self, url: str, timeout: float = 5.0, *, retries: int = 3, time_limit: float = 20.0) -> None:
        self._url = checked_url("SlackNotifier", "url", url)
        self._deliver = Delivery("SlackNotifier", timeout, retries, time_limit)

    def __call__(self, message: str) -> None:
        """Deliver `message`, or log why not."""
        body = {"text": _escaped(shortened(clean(message), LIMIT, lambda text: len(_escaped(text))))}
        self._deliver(
            lambda seconds: post_json(self._url, body, seconds, _judge),
            to=host_of(self._url),
            secrets=secrets_of(self),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments of the constructor and `type`; they hold the secret."""
        return {"type": "SlackNotifier", "url": self._url, **self._deliver.to_dict()}


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _judge(text: str) -> None:
    if text.strip() != "ok":
        raise Refused(f"the answer is not that of the service: {shown(text)!r}")
