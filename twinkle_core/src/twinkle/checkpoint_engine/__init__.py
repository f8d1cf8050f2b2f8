"""Checkpoint engines: the contract `CheckpointEngine`, what uses them, and every installed engine by name."""

from typing import TYPE_CHECKING

from twinkle._lazy import room
from twinkle.checkpoint_engine.base import CheckpointEngine
from twinkle.checkpoint_engine.manager import CheckpointEngineManager
from twinkle.checkpoint_engine.mixin import CheckpointEngineMixin

__all__ = ["CheckpointEngine", "CheckpointEngineManager", "CheckpointEngineMixin"]

__getattr__, __dir__ = room(__name__, "checkpoint_engine")

# Names of our own plugins, for editors and type checkers; scripts/type_names.py writes them.
if TYPE_CHECKING:
    from twinkle_transformers.sync.engine import InProcessCheckpointEngine as InProcessCheckpointEngine
