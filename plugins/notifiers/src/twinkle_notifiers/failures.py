"""Sends a failure of a run to the notifiers of `twinkle.initialize`, once, from one rank, without delaying the run."""

import atexit
import os
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from twinkle.errors import RankError
from twinkle.notifier import Notifier, secrets_of, without
from twinkle_notifiers.claims import Claim
from twinkle_notifiers.message import failure_text
from twinkle_notifiers.sources import VARIABLE, name_of_environment, notifiers_of_environment
from twinkle_registry import hookimpl

if TYPE_CHECKING:
    from twinkle.run import Run

PATIENCE = 10.0
"""Seconds for which the end of the process waits for messages under way."""
_FOLLOWER_WAITS = 1.0  # a RankError follows the error of another rank, which has more information and is reported first
_MARK = "_twinkle_told"
_number = 0


def notify_exception(
    notifier: Notifier | Sequence[Notifier], context: str, exc: BaseException, name: str | None = None
) -> None:
    """Report an exception and wait until it was sent; each exception is reported once.

    Args:
        notifier: one notifier or several; what one of them raises is logged.
        context: what was going on, in words.
        exc: the exception; its type and text are sent, and of an error that is not ours the last frames, without the
            secrets of these notifiers.
        name: what the run is called.
    """
    notifiers = [notifier] if isinstance(notifier, Notifier) else list(notifier)
    if not is_told(exc):
        _tell(notifiers, _prepared(notifiers, context, exc, name), exc, _next_number())


class Watch:
    """Listens for the end of a run by an error, and for uncaught errors.

    KeyboardInterrupt and SystemExit are no failures. A message is sent in a thread; the end of the process waits for
    it, at most `PATIENCE` seconds.
    """

    def __init__(self, notifiers: Sequence[Notifier], name: str | None) -> None:
        self._notifiers = list(notifiers)
        self._name = name
        self._process = os.getpid()
        self._sending: list[threading.Thread] = []
        self._before = sys.excepthook
        self._hook = self._uncaught  # one object, by which it is known again
        sys.excepthook = self._hook
        atexit.register(self.wait)

    def stop(self) -> None:
        """Listen no more; what is under way is still sent."""
        self._notifiers = []
        if sys.excepthook is self._hook:  # otherwise a hook that was installed later still calls this one
            sys.excepthook = self._before

    def run_failed(self, run: "Run", error: BaseException) -> None:
        """Report the error that ended a run."""
        # An earlier run's error, during whose handling this one was made, is another failure.
        if not is_told(error, context=False):
            self._begin(error, f"run {run.folder}, after step {run.step}", self._name or run.name)

    def wait(self, seconds: float = PATIENCE) -> None:
        """Wait until what is under way is sent, but not longer than `seconds`."""
        end = time.monotonic() + seconds
        for thread in self._sending:
            thread.join(max(0.0, end - time.monotonic()))
        self._sending = [thread for thread in self._sending if thread.is_alive()]

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not is_told(error):
            self._begin(error, f"script {sys.argv[0] or 'of an interactive session'}", self._name)
        self._before(kind, error, trace)

    def _begin(self, error: BaseException, context: str, name: str | None) -> None:
        # A forked child has its parent's hook, and its own way of telling the parent.
        if not isinstance(error, Exception) or not self._notifiers or os.getpid() != self._process:
            return
        try:
            text = _prepared(self._notifiers, context, error, name)
            arguments = (list(self._notifiers), text, error, _next_number())
            thread = threading.Thread(target=_tell, args=arguments, name="twinkle-notify", daemon=True)
            thread.start()
            self._sending.append(thread)
        except Exception as trouble:  # an error of a notifier must not hide the error of the run
            _log_loss(type(trouble).__name__)


class RunListener:
    """What a run attaches to the lifecycle hooks while it lasts, so that people hear of its failure."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    @hookimpl
    def twinkle_run_error(self, run: "Run", error: BaseException) -> None:
        """Report the error; a run calls this directly on ranks that do not call hooks."""
        self._watch.run_failed(run, error)


_watch: Watch | None = None


def watch(notifiers: Sequence[Notifier], name: str | None) -> None:
    """Let these notifiers, and no others any more, be notified of failures; with none, no one is."""
    global _watch
    if _watch is not None:
        _watch.stop()
    _watch = Watch(notifiers, name) if notifiers else None


def run_listener() -> RunListener | None:
    """Return what a run that begins attaches; None if no one is to be notified.

    Without `twinkle.initialize` the notifiers are those of TWINKLE_NOTIFIER, if it is set.

    Raises:
        SettingsError: TWINKLE_NOTIFIER cannot be read.
    """
    if _watch is None and os.environ.get(VARIABLE):
        watch(notifiers_of_environment(), name_of_environment())
    return RunListener(_watch) if _watch is not None else None


def is_told(error: BaseException, *, context: bool = True) -> bool:
    """Return whether this exception, or one in its chain of causes, was already reported.

    Args:
        error: the exception.
        context: count also those during whose handling it, or one of those, was raised.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        current = left.pop()
        if current is None or id(current) in seen:
            continue
        if _MARK in vars(current):
            return True
        seen.add(id(current))
        left += [current.__cause__, current.__context__ if context else None]
    return False


def _prepared(notifiers: Sequence[Notifier], context: str, error: BaseException, name: str | None) -> str:
    """Mark the exception as reported and return its message."""
    vars(error)[_MARK] = True  # setattr may be forbidden
    text = failure_text(error, context=context, name=name)
    # A traceback shows lines of the script, which may contain the address.
    return without(text, [secret for notifier in notifiers for secret in secrets_of(notifier)])


def _next_number() -> int:
    global _number
    _number += 1
    return _number


def _tell(notifiers: Sequence[Notifier], text: str, error: BaseException, number: int) -> None:
    if isinstance(error, RankError):
        time.sleep(_FOLLOWER_WAITS)
    claim = Claim(number)
    if not claim.won:
        claim.wait(PATIENCE)
        return
    try:
        others = [threading.Thread(target=_send, args=(notifier, text), daemon=True) for notifier in notifiers[1:]]
        for thread in others:
            thread.start()
        for notifier in notifiers[:1]:
            _send(notifier, text)
        for thread in others:
            thread.join()
    finally:
        claim.settle()


def _send(notifier: Any, text: str) -> None:
    try:
        notifier(text)
    except Exception as error:  # its contract forbids it; the text may hold a secret, so the type must do
        _log_loss(f"{type(notifier).__name__} raised {type(error).__name__}")


def _log_loss(why: str) -> None:
    from twinkle.logging import get_logger

    get_logger("twinkle.notifier").error("a message about the failed run is lost: %s", why)
