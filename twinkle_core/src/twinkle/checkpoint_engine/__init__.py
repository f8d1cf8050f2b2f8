"""Checkpoint engines: the contract `CheckpointEngine`, and every installed engine by name."""

from twinkle._lazy import room
from twinkle.checkpoint_engine.base import CheckpointEngine

__all__ = ["CheckpointEngine"]

__getattr__, __dir__ = room(__name__, "checkpoint_engine")
