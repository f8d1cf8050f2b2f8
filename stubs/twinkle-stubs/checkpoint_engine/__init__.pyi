# Written by `twinkle plugins types`; do not edit.
"""Checkpoint engines: the contract `CheckpointEngine`, what uses them, and every installed engine by name."""

from twinkle._registry import lazy_names
from twinkle.checkpoint_engine.base import CheckpointEngine
from twinkle.checkpoint_engine.manager import CheckpointEngineManager
from twinkle.checkpoint_engine.mixin import CheckpointEngineMixin

__all__ = ["CheckpointEngine", "CheckpointEngineManager", "CheckpointEngineMixin"]


from twinkle_transformers.sync.engine import InProcessCheckpointEngine as InProcessCheckpointEngine
