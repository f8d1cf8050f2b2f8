"""Messages to a WeCom (enterprise WeChat) group through its robot."""

from typing import Any

from twinkle.notifier import Notifier, secrets_of
from twinkle_notifiers.delivery import Delivery, NotNow, Refused
from twinkle_notifiers.http import checked_url, host_of, json_of, post_json, shown
from twinkle_notifiers.text import bytes_of, clean, shortened

LIMIT = 2048  # bytes of UTF-8 in the content of a text message
_LATER = (-1, 45009)  # the service is busy; more than 20 messages in a minute


class WeComNotifier(Notifier):
    """Sends text messages through a WeCom group robot.

    A message above the service's 2048 bytes loses its middle. What cannot be delivered is logged and forgotten.

    Args:
        url: the robot's webhook, `https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=...`; a secret.
        timeout: seconds to wait for an answer.
        retries: attempts after the first, where the service is away or busy.
        time_limit: seconds for all attempts together.

    Raises:
        ArgumentError: `url` is no address, or a number does not fit.
    """

    def __init__(self, url: str, timeout: float = 5.0, *, retries: int = 3, time_limit: float = 20.0) -> None:
        self._url = checked_url("WeComNotifier", "url", url)
        self._deliver = Delivery("WeComNotifier", timeout, retries, time_limit)

    def __call__(self, message: str) -> None:
        """Deliver `message`, or log why not."""
        body = {"msgtype": "text", "text": {"content": shortened(clean(message), LIMIT, bytes_of)}}
        self._deliver(
            lambda seconds: post_json(self._url, body, seconds, _judge),
            to=host_of(self._url),
            secrets=secrets_of(self),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments of the constructor and `type`; they hold the secret."""
        return {"type": "WeComNotifier", "url": self._url, **self._deliver.to_dict()}


def _judge(text: str) -> None:
    answer = json_of(text)
    if (code := answer.get("errcode")) != 0:
        why = f"errcode {code} {shown(str(answer.get('errmsg', '')))!r}"
        raise NotNow(why) if code in _LATER else Refused(why)
