"""Notifiers: the contract `Notifier`, and every installed notifier by name."""

import inspect
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
    """Sends messages about a run. It must never raise into the run, and never print a secret.

    `repr` shows the arguments of `to_dict` and masks secrets. An argument is secret if its name contains `secret`,
    `token`, `password`, `key`, `url`, `webhook`, `header` or `credential`; keys of nested dicts count too.
    """

    @abstractmethod
    def __call__(self, message: str) -> None:
        """Deliver `message`. On failure, log the reason; never raise."""

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments from which `from_dict` builds this notifier in another process.

        The values are JSON data and include the secrets: remove these before you print or store the dict. If it has a
        key `type` (the name of a notifier), `Notifier.from_dict` can build it; otherwise only its own class can.

        The default reads the arguments of the constructor from attributes of the same name; override it if they are
        not there.
        """
        names = inspect.signature(type(self)).parameters
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a notifier from what `to_dict` returned.

        `Notifier.from_dict` finds the class by the key `type`, in any form of component argument. If you call
        `from_dict` of a subclass, `type` is optional.

        Raises:
            ArgumentError: `type` is missing or names another class, or an argument is wrong.
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
        """Build this class from its arguments; override it if they are not those of the constructor."""
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
            raise ArgumentError(f"notifier {name!r} is not a class that {cls.__name__}.from_dict can build")
        return notifier_class

    def __repr__(self) -> str:
        shown = {name: value for name, value in self.to_dict().items() if name != "type"}
        text = ", ".join(f"{name}={_masked(name, value)!r}" for name, value in shown.items())
        return f"{type(self).__name__}({text})"


def secrets_of(notifier: Notifier) -> list[str]:
    """Return the secret texts of a notifier, longest first, with the long parts of addresses.

    Texts of fewer than 4 characters are left out, because they occur everywhere.
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
    """Yield the texts in `value` whose key is the name of a secret."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secrets(name if _hides(name) else str(key), item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secrets(name, item)
    elif isinstance(value, str) and _hides(name):
        yield value


def _parts(address: str) -> list[str]:
    """Return the parts of an address that are long enough to be tokens: a service may repeat them in its answer."""
    beyond_host = address.partition("://")[2].partition("/")[2]
    return [part for part in re.split(r"[/?&=#]", beyond_host) if len(part) >= 12]


__getattr__, __dir__ = lazy_names(__name__, "notifier")
