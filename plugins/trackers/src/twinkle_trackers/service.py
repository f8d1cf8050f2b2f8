"""What the trackers of services share: a service never breaks a run, and a run that continues keeps its name there."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from twinkle import get_logger
from twinkle.errors import ArgumentError
from twinkle.paths import write_text
from twinkle.tracker import Tracker

if TYPE_CHECKING:
    from twinkle.run import Run

Hook = TypeVar("Hook", bound=Callable[..., None])


class Health:
    """Whether the service of one tracker still takes part in the run."""

    def __init__(self) -> None:
        self.lost = False


def careful(hook: Hook) -> Hook:
    """Make a hook of a tracker with a `health` log the first error in a run, and do nothing for the rest of it.

    The registry would log the error of every step, and a service that is away may take its time for each.
    """

    @functools.wraps(hook)
    def wrapped(self: Tracker, *args: Any, **kwargs: Any) -> None:
        health: Health = self.health  # type: ignore[attr-defined]
        if health.lost:
            return
        try:
            hook(self, *args, **kwargs)
        except Exception as error:  # libraries raise what they like, and none of it is worth a run
            health.lost = True
            text = "%s: nothing more of this run is recorded: %s: %s"
            get_logger().warning(text, type(self).__name__, type(error).__name__, error)

    return wrapped  # type: ignore[return-value]


def kept_id(run: "Run", service: str, make: Callable[[], str]) -> tuple[str, bool]:
    """Return the name that a service knows this run by, and whether the run had it before it was cut off.

    It is kept in the run's folder, in the file `<service>.id`.
    """
    path = run.folder / f"{service}.id"
    found = path.read_text("utf-8").strip() if path.is_file() else ""
    if not found:
        write_text(path, f"{(made := make())}\n")
        return made, False
    return found, True


def new_id() -> str:
    """Return a name that nobody else has: 16 small letters and digits."""
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
