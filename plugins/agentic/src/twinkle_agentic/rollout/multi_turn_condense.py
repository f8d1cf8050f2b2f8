"""`MultiTurnCondenseRollout`: long questions are condensed, and the model fetches the blocks that it needs."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle import remote_class, remote_function
from twinkle.data_format import SamplingParams, Trajectory
from twinkle.errors import ArgumentError
from twinkle_agentic.chunker import Chunker
from twinkle_agentic.condenser import Condenser
from twinkle_agentic.data_format import Chunks
from twinkle_agentic.rollout.multi_turn import Managers, MultiTurnRollout
from twinkle_agentic.rollout.turns import checked_rows, managers
from twinkle_agentic.tools.extract_condensed import TOOL_NAME, ExtractCondensed
from twinkle_agentic.tools.tool_manager import ToolManager


@remote_class()
class MultiTurnCondenseRollout(MultiTurnRollout):
    """Condenses each trajectory before the first turn, and adds the tool `extract_condensed` to its tools.

    The chunks of all trajectories are condensed in one call; equal trajectories are condensed once. Results are those
    of `MultiTurnRollout` for the condensed trajectories.
    """

    def __init__(
        self,
        sampler: Any,
        template: Any,
        tool_manager: ToolManager | None,
        chunker: Chunker,
        condenser: Condenser,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        max_turns: int = 6,
        max_trajectory_tokens: int | None = None,
        condenser_kwargs: Mapping[str, Any] | None = None,
        trace_dir: str | Path | None = None,
        trace_callback: Callable[[dict[str, Any]], Any] | None = None,
        success_callback: Callable[[dict[str, Any]], Any] | None = None,
        post_compress_callback: Callable[[Trajectory, Chunks], Any] | None = None,
    ) -> None:
        """Store the parts; the others are those of `MultiTurnRollout`.

        Args:
            sampler: as there.
            template: as there.
            tool_manager: as there; None has no other tools.
            chunker: divides a trajectory.
            condenser: shortens chunks.
            sampling_params: as there.
            max_turns: as there.
            max_trajectory_tokens: as there.
            condenser_kwargs: for each call of the condenser.
            trace_dir: as there.
            trace_callback: as there.
            success_callback: as there.
            post_compress_callback: called with each condensed trajectory and its chunks; a trajectory that it returns
                is used instead.

        Raises:
            ArgumentError: chunker or condenser cannot be called, or the tool manager has a tool of that name.
        """
        super().__init__(
            sampler,
            template,
            tool_manager,
            sampling_params,
            max_turns,
            max_trajectory_tokens,
            trace_dir,
            trace_callback,
            success_callback,
        )
        for name, part in (("chunker", chunker), ("condenser", condenser)):
            if not callable(part):
                raise ArgumentError(f"MultiTurnCondenseRollout: {name} must be callable, got {type(part).__name__}")
        self.chunker, self.condenser = chunker, condenser
        self.condenser_kwargs = dict(condenser_kwargs or {})
        self.post_compress_callback = post_compress_callback
        _without_tool(managers(tool_manager, 1, "MultiTurnCondenseRollout") if _one(tool_manager) else ())

    @remote_function(dispatch="slice_dp", collect="flatten", lazy_collect=False)
    def __call__(
        self,
        trajectories: Sequence[Trajectory],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        tool_manager: Managers = None,
        global_step: int | None = None,
        **kwargs: Any,
    ) -> list[Trajectory]:
        """Return one finished trajectory for each given one; arguments and errors are those of `MultiTurnRollout`."""
        what = "MultiTurnCondenseRollout"
        rows = checked_rows(trajectories, what)
        found = managers(self.tool_manager if tool_manager is None else tool_manager, len(rows), what)
        _without_tool(found)
        condensed, own = [], []
        for row, chunks, manager in zip(rows, self._condensed(rows), found, strict=True):
            shorter: Any = {**row, **chunks.to_trajectory()}
            if self.post_compress_callback is not None:
                shorter = self.post_compress_callback(shorter, chunks) or shorter
            tools = ToolManager() if manager is None else manager.copy()
            if len(extract := ExtractCondensed(chunks)):
                tools.register(extract)
            condensed.append(shorter)
            own.append(tools if tools.names() else manager)
        return list(super().__call__(condensed, sampling_params, own, global_step, **kwargs))

    def _condensed(self, rows: Sequence[Trajectory]) -> list[Chunks]:
        """Return the condensed chunks of each trajectory, all condensed in one call."""
        keys = [json.dumps(row["messages"], default=repr, sort_keys=True) for row in rows]
        divided = {key: self.chunker(row) for key, row in zip(keys, rows, strict=True)}
        whole = Chunks([chunk for chunks in divided.values() for chunk in chunks.chunks])
        shorter = iter(self.condenser(whole, **self.condenser_kwargs).chunks)
        done = {key: Chunks([next(shorter) for _ in chunks.chunks]) for key, chunks in divided.items()}
        return [done[key] for key in keys]


def _one(given: Any) -> bool:
    return not isinstance(given, list | tuple)


def _without_tool(found: Sequence[ToolManager | None]) -> None:
    if any(manager is not None and TOOL_NAME in manager.names() for manager in found):
        raise ArgumentError(
            f"MultiTurnCondenseRollout: the tool manager has a tool {TOOL_NAME!r} already, which the rollout adds to "
            "each trajectory; unregister it, or give it another name"
        )
