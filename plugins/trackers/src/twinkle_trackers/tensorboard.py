"""The tracker that writes TensorBoard event files, with TensorBoard's own writer (no torch, no TensorFlow)."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from twinkle.errors import ArgumentError
from twinkle.tracker import Tracker
from twinkle_registry import hookimpl

if TYPE_CHECKING:
    from pathlib import Path

    from twinkle.run import Run


class TensorBoardTracker(Tracker):
    """Writes every number of a step as a scalar below `run.folder/tensorboard`; see `tensorboard --logdir runs`.

    A run that continues in a folder hides what an earlier process wrote from its first new step on.

    Args:
        folder: name of the folder inside `run.folder`.
        flush_seconds: how long numbers may wait in memory; 0 writes each step out at once.

    Raises:
        ArgumentError: `folder` is not the bare name of a folder, or `flush_seconds` is negative.
    """

    def __init__(self, folder: str = "tensorboard", flush_seconds: float = 5.0) -> None:
        if not folder or "/" in folder or "\\" in folder or folder in (".", ".."):
            raise ArgumentError(f"TensorBoardTracker: folder {folder!r} must be the name of a folder inside the run's")
        if flush_seconds < 0:
            raise ArgumentError(f"TensorBoardTracker: flush_seconds = {flush_seconds}; it must be at least 0")
        self.folder = folder
        self.flush_seconds = flush_seconds
        self._writer: Any = None
        self._flushed = 0.0

    @hookimpl
    def twinkle_step_end(self, run: "Run", step: int, metrics: Mapping[str, Any]) -> None:
        """Write one scalar for each number; text is left out, since TensorBoard's scalars cannot hold it."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None:
            self._writer = _writer(run.folder / self.folder, step)
        values = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
            if not isinstance(value, str)
        ]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        if time.monotonic() - self._flushed >= self.flush_seconds:
            self._writer.flush()
            self._flushed = time.monotonic()

    @hookimpl
    def twinkle_run_end(self, run: "Run") -> None:
        """Write out what waits and close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _writer(folder: "Path", step: int) -> Any:
    """Open an event file; if others are there, a START record at `step` makes TensorBoard drop their later steps."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    continues = folder.is_dir() and any(folder.iterdir())
    writer = EventFileWriter(str(folder))
    if continues:
        start = SessionLog(status=SessionLog.SessionStatus.START)
        writer.add_event(Event(wall_time=time.time(), step=step, session_log=start))
    return writer
