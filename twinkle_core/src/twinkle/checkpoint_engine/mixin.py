"""The methods of models and samplers that let a manager connect them by a checkpoint engine."""

from typing import Any

from twinkle.checkpoint_engine.base import CheckpointEngine
from twinkle.errors import TrainingStateError
from twinkle.runtime import remote_function


class CheckpointEngineMixin:
    """Holds the engine of one side, for a class with `send_weights` (a model) or `receive_weights` (a sampler)."""

    _checkpoint_engine: CheckpointEngine | None = None
    _built_with: tuple[Any, dict[str, Any]] | None = None

    @property
    def checkpoint_engine(self) -> CheckpointEngine:
        """The engine of this side.

        Raises:
            TrainingStateError: no engine was prepared.
        """
        if self._checkpoint_engine is None:
            raise TrainingStateError(
                f"{type(self).__name__} has no checkpoint engine; weights are moved by "
                "CheckpointEngineManager(model, sampler).sync_weights(), which prepares one"
            )
        return self._checkpoint_engine

    @remote_function(dispatch="all")
    def prepare_checkpoint_engine(self, engine: Any, **kwargs: Any) -> dict[str, Any]:
        """Build the engine of this side, unless it has the same one already; return its metadata for `build_topology`.

        Args:
            engine: any form of component argument.
            **kwargs: arguments of its constructor.
        """
        from twinkle._registry import registry

        if self._checkpoint_engine is None or self._built_with != (engine, kwargs):
            self.finalize_checkpoint_engine()
            self._checkpoint_engine = registry().build(engine, "checkpoint_engine", **kwargs)
            self._built_with = engine, kwargs
        return self._checkpoint_engine.prepare()

    @remote_function(dispatch="all")
    def init_checkpoint_process_group(self, **kwargs: Any) -> None:
        """Let the engine of this side join the transfer group, with the arguments that `build_topology` returned."""
        self.checkpoint_engine.init_process_group(**kwargs)

    @remote_function(dispatch="all")
    def finalize_checkpoint_engine(self) -> None:
        """Release the resources of a transfer; the engine can be prepared again."""
        if self._checkpoint_engine is not None:
            self._checkpoint_engine.finalize()
