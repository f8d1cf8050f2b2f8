"""Contract checks of notifiers: conversion to plain data, no visible secrets, no exceptions."""

import contextlib
import io
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle_testing.contracts.case import Case, NotApplicable, Violation, require
from twinkle_testing.contracts.common import pickled
from twinkle_testing.contracts.values import as_json, same, shown

MESSAGES = ("run sft failed: ValueError: no", "", "two\nlines", "漢字 🙂 <b>&\"'\\ %s {x}", "x" * 100_000)
_SECRET = ("secret", "token", "password", "key", "url", "webhook")


@dataclass(kw_only=True)
class NotifierCase(Case):
    """A notifier that cannot deliver, or that delivers to a receiver of its example.

    Its `kwargs` must have an address that is safe to call, such as the closed port `http://127.0.0.1:9/`.

    Attributes:
        secrets: texts that must never be shown; by default the arguments whose name contains `secret`, `token`,
            `password`, `key`, `url` or `webhook`.
        received: returns the messages that have arrived, if the example has a receiver.
    """

    kind = "notifier"

    secrets: Sequence[str] = ()
    received: Callable[[], Sequence[Any]] | None = None

    def hidden(self) -> list[str]:
        """Return the texts that must not be shown."""
        named = [v for k, v in self.kwargs.items() if isinstance(v, str) and any(part in k.lower() for part in _SECRET)]
        found = [text for text in (*self.secrets, *named) if len(text) >= 4]
        if not found:
            raise NotApplicable("none of its arguments is a secret; name them in secrets=")
        return found


def quiet(case: NotifierCase) -> None:
    """No message makes it raise an exception, also if the service cannot be reached."""
    notifier = case.build()
    for message in MESSAGES:
        try:
            notifier(message)
        except Exception as error:  # any exception
            raise Violation(
                f"the message {shown(message, 30)} made it raise {type(error).__name__}: {error}"
            ) from error


def delivered(case: NotifierCase) -> None:
    """A message arrives once, with its text."""
    if case.received is None:
        raise NotApplicable("its example has no receiver; give received=, a function that returns what arrived")
    notifier, before = case.build(), len(case.received())
    notifier("contract kit: one message")
    arrived = list(case.received())[before:]
    require(len(arrived) == 1, f"one message arrived {len(arrived)} times")
    require("contract kit: one message" in str(arrived[0]), f"what arrived is {shown(arrived[0])}")


def round_trip(case: NotifierCase) -> None:
    """`to_dict` is plain data from which `from_dict` builds the same notifier in another process."""
    notifier = case.build()
    plain = notifier.to_dict()
    require(isinstance(plain, Mapping), f"to_dict() returned {shown(plain)}; return a dict")
    as_json(plain, "what to_dict() returns")
    cls = type(notifier)
    require(callable(getattr(cls, "from_dict", None)), f"{cls.__name__} has no from_dict(), the inverse of to_dict()")
    again = cls.from_dict(dict(plain))
    require(type(again) is cls, f"from_dict() built a {type(again).__name__}")
    require(same(dict(again.to_dict()), dict(plain)), "from_dict(to_dict()) has another to_dict()")


def no_secret_shown(case: NotifierCase) -> None:
    """`repr`, log and output never contain a secret, in success and failure."""
    secrets = case.hidden()
    notifier = case.build()
    log, out = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("twinkle").addHandler(handler)
    logging.getLogger().addHandler(handler)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            notifier("contract kit: who reads this?")
    finally:
        logging.getLogger("twinkle").removeHandler(handler)
        logging.getLogger().removeHandler(handler)
    for what, text in (
        ("repr", repr(notifier)),
        ("str", str(notifier)),
        ("the log", log.getvalue()),
        ("output", out.getvalue()),
    ):
        for secret in secrets:
            require(secret not in text, f"{what} shows the secret {secret[:2]}...: hide it in __repr__ and in messages")


def pickle(case: NotifierCase) -> None:
    """It can be pickled, to be sent to the processes of a run."""
    notifier = case.build()
    require(same(pickled(notifier).to_dict(), notifier.to_dict()), "after pickling it has another to_dict()")


CASE = NotifierCase
CHECKS = (quiet, delivered, round_trip, no_secret_shown, pickle)
