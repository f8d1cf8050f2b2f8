"""Checkpoint engines: the contract `CheckpointEngine`, what uses them, and every installed engine by name."""

from twinkle._registry import room
from twinkle.checkpoint_engine.base import CheckpointEngine
from twinkle.checkpoint_engine.manager import CheckpointEngineManager
from twinkle.checkpoint_engine.mixin import CheckpointEngineMixin

__all__ = ["CheckpointEngine", "CheckpointEngineManager", "CheckpointEngineMixin"]

__getattr__, __dir__ = room(__name__, "checkpoint_engine")
