"""Early stops of a run after Ctrl-C or a signal: at the end of a step, the same one on all ranks."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from twinkle.errors import ConfigError
from twinkle.platform import Platform
from twinkle.runtime.current import current_runtime

if TYPE_CHECKING:
    from twinkle.mesh.ranks import Ranks

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Listens for SIGINT and SIGTERM, which torchrun and cluster schedulers send, while its `with` block lasts.

    The first signal requests a stop after the current step, the second one raises KeyboardInterrupt immediately.
    Outside the main thread, where Python does not deliver signals, nothing is requested.

    Args:
        on_request: Called once, at the first signal, for example to acknowledge it.
        ranks: The ranks of the run, which stop together; by default only this process.

    Attributes:
        requested: Whether this process was asked to stop.
    """

    def __init__(self, on_request: Callable[[], None] = lambda: None, ranks: "Ranks | None" = None) -> None:
        self.requested = False
        self._on_request, self._ranks = on_request, ranks
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        self._previous = {}

    def agreed(self) -> bool:
        """Return whether any rank was asked to stop, so that all stop at the same step; collective."""
        if self._ranks is None or self._ranks.alone:
            return self.requested
        return bool(self._ranks.agree("asking whether to stop", self.requested).any())

    def check(self) -> None:
        """Raise KeyboardInterrupt on every rank if any rank was asked to stop; collective.

        Call it where stopping is safe. An exception raised by the signal itself can arrive while a library is being
        imported, which may swallow it or turn it into another error.
        """
        if self.agreed():
            raise KeyboardInterrupt

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._on_request()


def ranks_of_this_run() -> "Ranks":
    """Return the ranks of the mesh that `twinkle.initialize` was given; collective."""
    from twinkle.mesh.ranks import Ranks

    return Ranks.of(current_runtime().mesh)


def check_alone(recipe: str) -> None:
    """Refuse to run on several ranks.

    Raises:
        ConfigError: Several processes run.
    """
    if Platform.get_world_size() > 1:
        raise ConfigError(
            f"the recipe {recipe} runs in one process, but {Platform.get_world_size()} were started; run it without "
            "--nproc and torchrun"
        )
