"""Writes into the folder of a run what happened, a line each."""

from collections.abc import Mapping
from typing import Any

from twinkle_registry import hookimpl


@hookimpl
def twinkle_run_start(run: Any) -> None:
    """Begin the diary."""
    _write(run, f"{run.name} began")


@hookimpl
def twinkle_step_end(metrics: Mapping[str, float], step: int, run: Any) -> None:
    """Note the loss."""
    _write(run, f"step {step}: {metrics['loss']:.4f}")


@hookimpl
def twinkle_run_end(run: Any) -> None:
    """End the diary."""
    _write(run, f"{run.name} ended after {run.step} steps")


def _write(run: Any, line: str) -> None:
    with (run.folder / "diary.txt").open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
