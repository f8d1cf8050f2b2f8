"""A run of two steps for the contract kit: a tiny random model on a few of the house's own rows."""

from pathlib import Path
from typing import Any


def sft() -> dict[str, Any]:
    """Return the values of a configuration, made in the folder that the kit gives."""
    return {"values": _values}


def _values(folder: Path) -> dict[str, Any]:
    from twinkle.hub.quiet import quiet_transformers
    from twinkle.testing import tiny_model

    with quiet_transformers():
        model = tiny_model(folder / "model")
    return {
        "model": {"id": str(model), "mixed_precision": "no"},
        "data": {"id": "builtin://arithmetic", "slice": 8, "max_length": 128},
        "batch_size": 4,
        "max_steps": 2,
    }
