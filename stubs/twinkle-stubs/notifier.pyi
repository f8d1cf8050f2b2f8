# Written by `twinkle plugins types`; do not edit.
"""Notifiers: the contract `Notifier`, and every installed notifier by name."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from twinkle._registry import lazy_names
from twinkle.errors import ArgumentError

__all__ = ["Notifier"]

MASK = "***"
_SECRET_NAMES = ("secret", "token", "password", "key", "url", "webhook", "header", "credential")


class Notifier(ABC):
    """Tells people about a run. It must never break the run, and never print a secret.

    `repr` shows the arguments of `to_dict` with a mask in place of the secret ones: those whose name has `secret`,
    `token`, `password`, `key`, `url`, `webhook`, `header` or `credential` in it, also in a dict among them.
    """

    @abstractmethod
    def __call__(self, message: str) -> None:
        """Deliver `message`, or log why not; whatever goes wrong, it raises nothing."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return what `from_dict` needs to build this notifier in another process.

        Plain values (JSON), and the secrets are among them: do not print or store it without removing them. With a key
        `type` (any text that names a notifier) `Notifier.from_dict` builds it; without one only its own class does.
        """

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a notifier from what `to_dict` returned.

        `Notifier.from_dict` looks the class up by the key `type`, which may be any form of component argument; on a
        class of its own, `type` may be left out.

        Raises:
            ArgumentError: there is no `type`, it names another class than this one, or an argument does not fit.
            ComponentNotFound: no plugin offers what `type` names.
        """
        if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
            raise ArgumentError(
                f"{cls.__name__}.from_dict takes what to_dict returns, a dict; found {type(values).__name__}"
            )
        arguments = dict(values)
        return cls._class_of(arguments.pop("type", None))._from_dict_impl(arguments)

    @classmethod
    def _from_dict_impl(cls, arguments: dict[str, Any]) -> Self:
        """Build this class from its arguments; override it where they are not those of the constructor."""
        from twinkle_registry import check_keywords

        check_keywords(cls, arguments, what=f"notifier {cls.__name__!r}")
        return cls(**arguments)

    @classmethod
    def _class_of(cls, name: Any) -> type[Self]:
        if name is None and not cls.__abstractmethods__:
            return cls
        if not isinstance(name, str) or not name:
            raise ArgumentError(
                "a notifier as a dict needs the key 'type', which names it, for example 'SlackNotifier'; "
                + (f"found {type(name).__name__}" if name is not None else "it has none")
            )
        from twinkle._registry import registry

        notifier_class = registry().resolve(name, "notifier")
        if not isinstance(notifier_class, type) or not issubclass(notifier_class, cls):
            raise ArgumentError(f"notifier {name!r} is no class that {cls.__name__}.from_dict can build")
        return notifier_class

    def __repr__(self) -> str:
        shown = {name: value for name, value in self.to_dict().items() if name != "type"}
        text = ", ".join(f"{name}={_masked(name, value)!r}" for name, value in shown.items())
        return f"{type(self).__name__}({text})"


def secrets_of(notifier: Notifier) -> list[str]:
    """Return the secret texts of a notifier, longest first; of an address, its long parts as well.

    Texts of under 4 letters are left out: they stand everywhere.
    """
    secrets = {part for text in _secrets("", notifier.to_dict()) for part in (text, *_parts(text)) if len(part) >= 4}
    return sorted(secrets, key=len, reverse=True)


def without(text: str, secrets: Sequence[str]) -> str:
    """Return `text` with a mask in place of each secret."""
    for secret in secrets:
        text = text.replace(secret, MASK)
    return text


def _hides(name: str) -> bool:
    return any(part in name.lower() for part in _SECRET_NAMES)


def _masked(name: str, value: Any) -> Any:
    if value and _hides(name):
        return MASK
    return {key: _masked(str(key), item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _secrets(name: str, value: Any) -> Iterator[str]:
    """Yield the texts below `value` that stand under the name of a secret."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secrets(name if _hides(name) else str(key), item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secrets(name, item)
    elif isinstance(value, str) and _hides(name):
        yield value


def _parts(address: str) -> list[str]:
    """Return what of an address is long enough to be a token: a service may repeat it in its answer."""
    beyond_host = address.partition("://")[2].partition("/")[2]
    return [part for part in re.split(r"[/?&=#]", beyond_host) if len(part) >= 12]



from twinkle_notifiers.ding import DingNotifier as DingNotifier
from twinkle_notifiers.failures import notify_exception as notify_exception
from twinkle_notifiers.failures import run_listener as run_listener
from twinkle_notifiers.failures import watch as watch
from twinkle_notifiers.feishu import FeishuNotifier as FeishuNotifier
from twinkle_notifiers.mail import EmailNotifier as EmailNotifier
from twinkle_notifiers.slack import SlackNotifier as SlackNotifier
from twinkle_notifiers.sources import build_notifiers as build_notifiers
from twinkle_notifiers.sources import notifiers_of_environment as notifiers_of_environment
from twinkle_notifiers.webhook import WebhookNotifier as WebhookNotifier
from twinkle_notifiers.wecom import WeComNotifier as WeComNotifier
