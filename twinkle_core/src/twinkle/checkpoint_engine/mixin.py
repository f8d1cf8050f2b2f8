"""What a model and a sampler have so that a manager can connect them by an engine."""

from typing import Any

from twinkle.checkpoint_engine.base import CheckpointEngine
from twinkle.errors import TrainingStateError
from twinkle.runtime import remote_function


class CheckpointEngineMixin:
    """Holds this side's engine, for a class that offers `send_weights` (a model) or `receive_weights` (a sampler)."""

    _checkpoint_engine: CheckpointEngine | None = None
    _built_with: tuple[Any, dict[str, Any]] | None = None

    @property
    def checkpoint_engine(self) -> CheckpointEngine:
        """This side's engine.

        Raises:
            TrainingStateError: none was prepared.
        """
        if self._checkpoint_engine is None:
            raise TrainingStateError(
                f"{type(self).__name__} has no checkpoint engine; weights are moved by "
                "CheckpointEngineManager(model, sampler).sync_weights(), which prepares one"
            )
        return self._checkpoint_engine

    @remote_function(dispatch="all")
    def prepare_checkpoint_engine(self, engine: Any, **kwargs: Any) -> dict[str, Any]:
        """Build this side's engine, if it is another than before, and return its metadata for `build_topology`.

        Args:
            engine: any form of component argument.
            **kwargs: for its constructor.
        """
        from twinkle._registry import registry

        if self._checkpoint_engine is None or self._built_with != (engine, kwargs):
            self.finalize_checkpoint_engine()
            self._checkpoint_engine = registry().build(engine, "checkpoint_engine", **kwargs)
            self._built_with = engine, kwargs
        return self._checkpoint_engine.prepare()

    @remote_function(dispatch="all")
    def init_checkpoint_process_group(self, **kwargs: Any) -> None:
        """Let this side's engine join the transfer group; arguments are those that `build_topology` returned."""
        self.checkpoint_engine.init_process_group(**kwargs)

    @remote_function(dispatch="all")
    def finalize_checkpoint_engine(self) -> None:
        """Release what a transfer needed; the engine can be prepared again."""
        if self._checkpoint_engine is not None:
            self._checkpoint_engine.finalize()
