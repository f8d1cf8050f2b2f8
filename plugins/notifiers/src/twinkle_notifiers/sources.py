"""Where notifiers come from: an argument of `initialize`, or TWINKLE_NOTIFIER, which takes them to other processes."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.errors import ArgumentError, SettingsError, TwinkleError
from twinkle.notifier import Notifier

VARIABLE = "TWINKLE_NOTIFIER"
NAME_VARIABLE = "TWINKLE_NAME"


def build_notifiers(given: Any) -> list[Notifier]:
    """Return the notifiers that an argument means.

    Args:
        given: None; a component of kind `notifier` in any form of component argument; a dict as `Notifier.to_dict`
            returns it; or a sequence of these.

    Raises:
        TwinkleError: one of them cannot be found or built; no message shows an argument's value.
    """
    if given is None:
        return []
    several = given if isinstance(given, Sequence) and not isinstance(given, str | bytes) else [given]
    return [_build(one) for one in several]


def notifiers_of_environment() -> list[Notifier]:
    """Return the notifiers that TWINKLE_NOTIFIER describes: a JSON object with a key `type`, or a list of those.

    Raises:
        SettingsError: it is something else, or what it names cannot be built.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return []
    try:
        value = json.loads(text)
    except ValueError:  # its message would show the secret value, and so would a chained error
        raise SettingsError(f"{VARIABLE} is not JSON; {_FORM}") from None
    several = value if isinstance(value, list) else [value]
    if not all(isinstance(one, dict) for one in several):
        raise SettingsError(f"{VARIABLE} holds something else than JSON objects; {_FORM}")
    try:
        return build_notifiers(several)
    except TwinkleError as error:
        raise SettingsError(f"{VARIABLE}: {error}") from error


def name_of_environment() -> str | None:
    """Return the name of the run in TWINKLE_NAME, if it is set."""
    return os.environ.get(NAME_VARIABLE, "").strip() or None


def to_environment(notifiers: Sequence[Notifier]) -> str:
    """Return the value of TWINKLE_NOTIFIER that carries these notifiers to another process, secrets included."""
    return json.dumps([{"type": _place(type(one)), **one.to_dict()} for one in notifiers])


def _build(given: Any) -> Notifier:
    if isinstance(given, Mapping):
        return Notifier.from_dict(given)
    if given is None:
        raise ArgumentError("a list of notifiers contains None; remove it")
    from twinkle._registry import registry

    built: Notifier = registry().build(given, "notifier")
    return built


def _place(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


_FORM = """write for example {"type": "SlackNotifier", "url": "https://..."}"""
