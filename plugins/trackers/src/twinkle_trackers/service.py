"""What the trackers of services share: a service never breaks a run, and a run that continues keeps its name there."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from twinkle import get_logger
from twinkle.errors import ArgumentError
from twinkle.paths import write_text
from twinkle.tracker import Tracker
from twinkle_registry import hookimpl

if TYPE_CHECKING:
    from twinkle.run import Run


class ServiceTracker(Tracker, ABC):
    """Records a run with a service, of which the first error is logged and ends the recording, never the run.

    A subclass says how to begin there, to record one step, and to end. The registry alone would log the error of every
    step, and a service that is away may take its time for each.
    """

    def __init__(self) -> None:
        self._session: Any = None
        self._lost = False
        self._error: BaseException | None = None

    @abstractmethod
    def begin(self, run: "Run") -> Any:
        """Start or resume the run at the service; the result is passed to `record` and `end`."""

    @abstractmethod
    def record(self, session: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Record the numbers of step `step`."""

    @abstractmethod
    def end(self, session: Any, error: BaseException | None) -> None:
        """Send what is left, and how the run ended: `error` is why it failed or was stopped."""

    @hookimpl
    def twinkle_run_start(self, run: "Run") -> None:
        """Start or resume the run at the service."""
        self._lost, self._error = False, None
        self._begin(run)

    @hookimpl
    def twinkle_step_end(self, run: "Run", step: int, metrics: Mapping[str, float]) -> None:
        """Record the numbers of step `step`."""
        if self._session is None and not self._lost:
            self._begin(run)
        if self._session is not None and not self._lost:
            with self._carefully():
                self.record(self._session, step, metrics)

    @hookimpl
    def twinkle_run_error(self, run: "Run", error: BaseException) -> None:
        """Record why the run ends."""
        self._error = error

    @hookimpl
    def twinkle_run_end(self, run: "Run") -> None:
        """Send what is left, and how the run ended; also of a run that could not be recorded whole."""
        session, self._session, error, self._error = self._session, None, self._error, None
        if session is not None:
            with self._carefully():
                self.end(session, error)

    def _begin(self, run: "Run") -> None:
        with self._carefully():
            self._session = self.begin(run)

    @contextmanager
    def _carefully(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # libraries raise what they like, and none of it is worth a run
            if not self._lost:
                text = "%s: nothing more of this run is recorded: %s: %s"
                get_logger().warning(text, type(self).__name__, type(error).__name__, error)
            self._lost = True


def kept_id(run: "Run", service: str, make: Callable[[], str]) -> tuple[str, bool]:
    """Return the name of this run at the service, and whether an interrupted run had it before.

    It is kept in the run's folder, in the file `<service>.id`.
    """
    path = run.folder / f"{service}.id"
    stored = path.read_text("utf-8").strip() if path.is_file() else ""
    if not stored:
        write_text(path, f"{(new_id := make())}\n")
        return new_id, False
    return stored, True


def new_id() -> str:
    """Return a unique name: 16 small letters and digits."""
    import secrets  # Python's random generator is the training's, and seeded alike in every run

    return secrets.token_hex(8)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among the metrics, tensors of one number among them; a text is left out."""
    return {name: _plain(value) for name, value in metrics.items() if not isinstance(value, str)}


def finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return those numbers that are neither NaN nor infinite."""
    return {name: value for name, value in numbers(metrics).items() if math.isfinite(value)}


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a nested configuration under dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def check_choice(who: str, name: str, value: Any, known: tuple[str, ...]) -> None:
    """Raise `ArgumentError` unless `value` is None or one of `known`."""
    if value is not None and value not in known:
        raise ArgumentError(f"{who}: {name} is {value!r}; it is one of {', '.join(map(repr, known))}, or left out")


def check_text(who: str, name: str, value: Any) -> None:
    """Raise `ArgumentError` unless `value` is a text with something in it."""
    if not isinstance(value, str) or not value.strip():
        raise ArgumentError(f"{who}: {name} is {value!r}; it is a text")


def _plain(value: Any) -> float:
    return value if isinstance(value, bool | int) else float(value)
