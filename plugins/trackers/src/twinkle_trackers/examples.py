"""What the contract kit builds trackers with, and how it reads back what they have written."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Recorded = dict[int, dict[str, Any]]

# They would ask a service on the network.
WANDB = {"kwargs": {"mode": "offline"}}
SWANLAB = {"kwargs": {"mode": "offline"}}


def jsonl() -> dict[str, Any]:
    """Return a reader of `metrics.jsonl`."""
    return {"read": _lines}


def tensorboard() -> dict[str, Any]:
    """Return a reader of event files, and a tracker that writes each step out at once."""
    return {"kwargs": {"flush_seconds": 0.0}, "read": _events}


def _lines(folder: Path) -> Recorded:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    return {row.pop("step"): row for row in rows}


def _events(folder: Path) -> Recorded:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tensorboard")).Reload()
    steps: defaultdict[int, dict[str, Any]] = defaultdict(dict)
    for name in read.Tags()["scalars"]:
        for event in read.Scalars(name):
            steps[event.step][name] = event.value
    return dict(steps)
