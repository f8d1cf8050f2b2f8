"""Notifiers: the contract `Notifier`, `notify_exception`, and every installed notifier by name."""

from typing import TYPE_CHECKING

from twinkle._lazy import room
from twinkle.notifier.base import Notifier
from twinkle.notifier.failures import notify_exception

__all__ = ["Notifier", "notify_exception"]

__getattr__, __dir__ = room(__name__, "notifier")

# Names of our own plugins, for editors and type checkers; scripts/type_names.py writes them.
if TYPE_CHECKING:
    from twinkle_notifiers.ding import DingNotifier as DingNotifier
    from twinkle_notifiers.feishu import FeishuNotifier as FeishuNotifier
    from twinkle_notifiers.mail import EmailNotifier as EmailNotifier
    from twinkle_notifiers.slack import SlackNotifier as SlackNotifier
    from twinkle_notifiers.webhook import WebhookNotifier as WebhookNotifier
    from twinkle_notifiers.wecom import WeComNotifier as WeComNotifier
