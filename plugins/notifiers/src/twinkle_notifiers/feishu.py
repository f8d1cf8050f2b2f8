"""Messages to a Feishu (Lark) group through its custom bot."""

import base64
import hashlib
import hmac
import time
from typing import Any

from twinkle.notifier import Notifier, secrets_of
from twinkle_notifiers.delivery import Delivery, NotNow, Refused
from twinkle_notifiers.http import checked_url, host_of, json_of, post_json, shown
from twinkle_notifiers.text import clean, json_bytes_of, shortened

LIMIT = 19_000  # Feishu takes bodies up to 20 KB
_LATER = (11232, 11233)  # more than 5 messages in a second or 100 in a minute


class FeishuNotifier(Notifier):
    """Sends text messages through a Feishu or Lark custom bot.

    With a `secret` each request is signed as Feishu documents: `sign` is the Base64 of HMAC-SHA256 with
    "<seconds>\\n<secret>" as key over nothing. A message above 20 KB loses its middle. What cannot be delivered is
    logged and forgotten.

    Args:
        url: the bot's webhook, `https://open.feishu.cn/open-apis/bot/v2/hook/...`; a secret.
        secret: the bot's signing secret; None where it has none.
        timeout: seconds to wait for an answer.
        retries: attempts after the first, where the service is away or busy.
        time_limit: seconds for all attempts together.

    Raises:
        ArgumentError: `url` is no address, or a number does not fit.
    """

    def __init__(
        self, url: str, secret: str | None = None, timeout: float = 5.0, *, retries: int = 3, time_limit: float = 20.0
    ) -> None:
        self._url = checked_url("FeishuNotifier", "url", url)
        self._secret = secret or None
        self._deliver = Delivery("FeishuNotifier", timeout, retries, time_limit)

    def __call__(self, message: str) -> None:
        """Deliver `message`, or log why not."""
        body = {"msg_type": "text", "content": {"text": shortened(clean(message), LIMIT, json_bytes_of)}}
        self._deliver(
            lambda seconds: post_json(self._url, {**self._signature(), **body}, seconds, _judge),
            to=host_of(self._url),
            secrets=secrets_of(self),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments of the constructor and `type`; they hold the secrets."""
        return {"type": "FeishuNotifier", "url": self._url, "secret": self._secret, **self._deliver.to_dict()}

    def _signature(self) -> dict[str, str]:
        if self._secret is None:
            return {}
        now = str(round(time.time()))
        digest = hmac.new(f"{now}\n{self._secret}".encode(), b"", hashlib.sha256).digest()
        return {"timestamp": now, "sign": base64.b64encode(digest).decode()}


def _judge(text: str) -> None:
    answer = json_of(text)
    code = answer.get("code", answer.get("StatusCode"))  # the older form of the answer
    if code != 0:
        why = f"code {code} {shown(str(answer.get('msg', answer.get('StatusMessage', ''))))!r}"
        raise NotNow(why) if code in _LATER else Refused(why)
