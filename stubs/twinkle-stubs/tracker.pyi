# Written by `twinkle plugins types`; do not edit.
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
    """Records a run. Its methods are lifecycle hooks: during a run its trackers are attached as plugins.

    A subclass overrides the methods that it needs and decorates them with `twinkle_registry.hookimpl`. An error in a
    tracker is logged and does not stop the run.
    """

    @hookimpl
    def twinkle_run_start(self, run: "Run") -> None:
        """Open files or connections; `run.folder` exists."""

    @hookimpl
    def twinkle_step_end(self, run: "Run", step: int, metrics: Mapping[str, float]) -> None:
        """Record the numbers of optimizer step `step` (from 1)."""

    @hookimpl
    def twinkle_checkpoint_saved(self, run: "Run", path: Path, step: int) -> None:
        """Record that a checkpoint was written to `path`."""

    @hookimpl
    def twinkle_run_error(self, run: "Run", error: BaseException) -> None:
        """Record the error that ended the run."""

    @hookimpl
    def twinkle_run_end(self, run: "Run") -> None:
        """Close files and connections."""



from twinkle_trackers.jsonl import JsonlTracker as JsonlTracker
from twinkle_trackers.mlflow import MLflowTracker as MLflowTracker
from twinkle_trackers.swanlab import SwanLabTracker as SwanLabTracker
from twinkle_trackers.tensorboard import TensorBoardTracker as TensorBoardTracker
from twinkle_trackers.trackio import TrackioTracker as TrackioTracker
from twinkle_trackers.wandb import WandbTracker as WandbTracker
