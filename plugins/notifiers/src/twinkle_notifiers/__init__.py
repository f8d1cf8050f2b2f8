"""Notifiers: messages to people when a run fails. DingTalk, Feishu, WeCom, Slack, any webhook, e-mail."""
