"""Trackers: the contract `Tracker`, and every installed tracker by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from twinkle._registry import lazy_names
from twinkle_registry import hookimpl

if TYPE_CHECKING:
    from twinkle.run import Run

__all__ = ["Tracker"]


class Tracker:
    """Records a run. Its methods *are* lifecycle hooks: while a run lasts its trackers are attached as plugins.

    A subclass overrides what it needs and marks it with `twinkle_registry.hookimpl`. An error in one tracker is logged
    and never stops the run.
    """

    @hookimpl
    def twinkle_run_start(self, run: "Run") -> None:
        """Open what is needed; `run.folder` exists."""

    @hookimpl
    def twinkle_step_end(self, run: "Run", step: int, metrics: Mapping[str, float]) -> None:
        """Record the numbers of optimizer step `step` (from 1)."""

    @hookimpl
    def twinkle_checkpoint_saved(self, run: "Run", path: Path, step: int) -> None:
        """Record that a checkpoint stands at `path`."""

    @hookimpl
    def twinkle_run_error(self, run: "Run", error: BaseException) -> None:
        """Record why the run ends."""

    @hookimpl
    def twinkle_run_end(self, run: "Run") -> None:
        """Close what was opened."""


__getattr__, __dir__ = lazy_names(__name__, "tracker")
