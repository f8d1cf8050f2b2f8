"""Checkpoint engines: the contract `CheckpointEngine`, what uses them, and every installed engine by name."""

from twinkle._registry import lazy_names
from twinkle.checkpoint_engine.base import CheckpointEngine
from twinkle.checkpoint_engine.manager import CheckpointEngineManager
from twinkle.checkpoint_engine.mixin import CheckpointEngineMixin

__all__ = ["CheckpointEngine", "CheckpointEngineManager", "CheckpointEngineMixin"]

__getattr__, __dir__ = lazy_names(__name__, "checkpoint_engine")
