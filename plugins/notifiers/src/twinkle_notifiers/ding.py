"""Messages to a DingTalk group through its custom robot."""

import base64
import hashlib
import hmac
import time
import urllib.parse
from typing import Any

from twinkle.notifier import Notifier, secrets_of
from twinkle_notifiers.delivery import Delivery, NotNow, Refused
from twinkle_notifiers.http import checked_url, host_of, json_of, post_json, shown
from twinkle_notifiers.text import clean, json_bytes_of, shortened

LIMIT = 19_000  # DingTalk refuses bodies above 20,000 bytes (error 460101)
_LATER = (-1, 130101)  # the service is busy; more than 20 messages in a minute


class DingNotifier(Notifier):
    """Sends text messages through a DingTalk custom robot.

    With a `secret` each request is signed as DingTalk documents for robots with "additional signature": `sign` is the
    Base64 of HMAC-SHA256 with the secret as key over "<milliseconds>\\n<secret>". A message above the service's 20,000
    bytes loses its middle. What cannot be delivered is logged and forgotten.

    Args:
        ding_url: the robot's webhook, `https://oapi.dingtalk.com/robot/send?access_token=...`; a secret.
        secret: the robot's signing secret, `SEC...`; None where it checks keywords or addresses instead.
        timeout: seconds to wait for an answer.
        retries: attempts after the first, where the service is away or busy.
        time_limit: seconds for all attempts together.

    Raises:
        ArgumentError: `ding_url` is no address, or a number does not fit.
    """

    def __init__(
        self,
        ding_url: str,
        secret: str | None = None,
        timeout: float = 5.0,
        *,
        retries: int = 3,
        time_limit: float = 20.0,
    ) -> None:
        self._url = checked_url("DingNotifier", "ding_url", ding_url)
        self._secret = secret or None
        self._deliver = Delivery("DingNotifier", timeout, retries, time_limit)

    def __call__(self, message: str) -> None:
        """Deliver `message`, or log why not."""
        body = {"msgtype": "text", "text": {"content": shortened(clean(message), LIMIT, json_bytes_of)}}
        self._deliver(
            lambda seconds: post_json(self._signed(), body, seconds, _judge),
            to=host_of(self._url),
            secrets=secrets_of(self),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments of the constructor and `type`; they hold the secrets."""
        return {"type": "DingNotifier", "ding_url": self._url, "secret": self._secret, **self._deliver.to_dict()}

    def _signed(self) -> str:
        if self._secret is None:
            return self._url
        now = str(round(time.time() * 1000))
        digest = hmac.new(self._secret.encode(), f"{now}\n{self._secret}".encode(), hashlib.sha256).digest()
        query = urllib.parse.urlencode({"timestamp": now, "sign": base64.b64encode(digest).decode()})
        return f"{self._url}{'&' if '?' in self._url else '?'}{query}"


def _judge(text: str) -> None:
    answer = json_of(text)
    if (code := answer.get("errcode")) != 0:
        why = f"errcode {code} {shown(str(answer.get('errmsg', '')))!r}"
        raise NotNow(why) if code in _LATER else Refused(why)
