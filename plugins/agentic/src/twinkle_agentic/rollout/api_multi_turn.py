"""`APIMultiTurnRollout`: the same conversations with a chat model behind an interface, for data and for evaluation."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from twinkle.data_format import SamplingParams, Trajectory
from twinkle.errors import ArgumentError
from twinkle.rollout import Rollout
from twinkle.tool_parser import detect_first
from twinkle_agentic.protocol.base import API, APIError
from twinkle_agentic.rollout.traces import Traces
from twinkle_agentic.rollout.turns import (
    Turn,
    answered,
    checked_rows,
    checked_turns,
    is_over,
    managers,
    name_of,
    with_tools,
)
from twinkle_agentic.tools.tool_manager import ToolManager


class APIMultiTurnRollout(Rollout):
    """Plays trajectories out with an `API`, `concurrency` of them at one time.

    Each result is the trajectory with its grown `messages`, `turns`, `stop_reason` (`stop`, `done`, `max_turns`,
    `length` or `error`), `truncated`, `turn_rewards` where tools belong to an environment, and `error` where the
    service gave no answer. There are no tokens and no log-probabilities.

    Calls come from the message's `tool_calls`, or out of its text where the server leaves them there.
    """

    def __init__(
        self,
        api: API,
        tool_manager: ToolManager | Sequence[ToolManager | None] | None = None,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        max_turns: int = 6,
        concurrency: int = 8,
        extra_body: Mapping[str, Any] | None = None,
        trace_dir: str | Path | None = None,
        trace_callback: Callable[[dict[str, Any]], Any] | None = None,
        success_callback: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        """Put a rollout together.

        Args:
            api: what answers; see `twinkle_agentic.protocol.OpenAI`.
            tool_manager: the tools of all trajectories, or a list with one manager for each.
            sampling_params: how to draw; `num_samples` is 1.
            max_turns: turns of the assistant, at most.
            concurrency: trajectories at one time.
            extra_body: further fields of each request.
            trace_dir: see `Traces`.
            trace_callback: see `Traces`.
            success_callback: see `Traces`.

        Raises:
            ArgumentError: a number is out of range, or `num_samples` is not 1.
        """
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
            raise ArgumentError(f"APIMultiTurnRollout: concurrency is {concurrency!r}; it is a number from 1")
        self.api, self.tool_manager = api, tool_manager
        self.sampling_params = _checked(sampling_params)
        self.max_turns = checked_turns(max_turns, "APIMultiTurnRollout")
        self.concurrency = concurrency
        self._more = {} if extra_body is None else {"extra_body": dict(extra_body)}
        self._traces = Traces(trace_dir, trace_callback, success_callback)

    def __call__(
        self,
        trajectories: Sequence[Trajectory],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        tool_manager: ToolManager | Sequence[ToolManager | None] | None = None,
        global_step: int | None = None,
        **kwargs: Any,
    ) -> list[Trajectory]:
        """Return one finished trajectory for each given one, in order; the given ones stay as they are.

        Args:
            trajectories: prompts.
            sampling_params: instead of the constructor's.
            tool_manager: instead of the constructor's: one for all, or a list with one (or None) for each trajectory.
            global_step: number of the training step, for traces.
            **kwargs: for the `api`.

        Raises:
            ArgumentError: what is given does not fit.
            APIError: the service refuses every call: its key, address or model is wrong.
        """
        params = self.sampling_params if sampling_params is None else _checked(sampling_params)
        rows = checked_rows(trajectories, "APIMultiTurnRollout")
        found = managers(self.tool_manager if tool_manager is None else tool_manager, len(rows), "APIMultiTurnRollout")
        turns: list[list[Turn]] = [[] for _ in rows]
        with ThreadPoolExecutor(min(self.concurrency, len(rows)) or 1) as threads:
            play = partial(self._play, params=params, kwargs=kwargs)
            results = list(threads.map(play, rows, found, turns))
        self._traces.keep(results, [row["messages"] for row in rows], turns, global_step)
        return results  # type: ignore[return-value]

    def _play(
        self,
        row: Trajectory,
        manager: ToolManager | None,
        turns: list[Turn],
        *,
        params: SamplingParams,
        kwargs: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Play one trajectory to its end."""
        talk = with_tools(row, manager)
        talk["messages"] = list(talk["messages"])
        more: dict[str, Any] = {}
        reason = ""
        while not reason:
            try:
                message = self._asked(talk, params, kwargs)
            except APIError as error:
                if error.refused:
                    raise
                reason, more["error"] = "error", str(error)
                break
            finish = str(message.pop("finish_reason", "stop"))
            talk["messages"].append(message)
            turns.append(Turn(message["content"], finish))
            reason = self._ended(talk, manager, turns, finish)
        if manager is not None and manager.episodes:
            more["turn_rewards"] = [turn.reward or 0.0 for turn in turns]
        truncated = reason in ("length", "max_turns")
        return {**talk, "turns": len(turns), "stop_reason": reason, "truncated": truncated, **more}

    def _asked(self, talk: Any, params: SamplingParams, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        answer: Any = self.api(talk, params, **self._more, **kwargs)
        if not isinstance(answer, Mapping) or not isinstance(answer.get("content"), str | None):
            raise APIError(f"{type(self.api).__name__} answered with a {type(answer).__name__}; return one message")
        calls = answer.get("tool_calls") or []
        if not isinstance(calls, list) or not all(name_of(call) for call in calls):
            raise APIError(f"{type(self.api).__name__} answered with tool_calls that are not a list of calls")
        message = {**answer, "role": "assistant", "content": answer.get("content") or ""}
        if calls:  # each result names its call, so each call has a name
            message["tool_calls"] = [{**call, "id": call.get("id") or f"call_{n}"} for n, call in enumerate(calls)]
        return _with_calls(message) if talk.get("tools") else message

    def _ended(self, talk: dict[str, Any], manager: ToolManager | None, turns: list[Turn], finish: str) -> str:
        """Run the tools of the last turn; return why the trajectory ends, or nothing."""
        if finish == "length":
            return "length"
        message = talk["messages"][-1]
        messages = [] if manager is None else answered(message, manager, turns[-1], ())
        if not messages:
            return "stop"
        if manager is not None and is_over(manager):
            return "done"
        if len(turns) == self.max_turns:
            return "max_turns"
        # A server matches tool messages with calls that it has seen; what answers none comes from the user.
        talk["messages"] += [m if "tool_call_id" in m else {**m, "role": "user"} for m in messages]
        return ""


def _checked(given: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    params = given if isinstance(given, SamplingParams) else SamplingParams.from_dict(given or {})
    if params.num_samples != 1:
        raise ArgumentError(
            f"APIMultiTurnRollout: num_samples is {params.num_samples}; a trajectory continues from one"
        )
    return params


def _with_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the calls that its text holds, where the server did not read them."""
    parser = None if message.get("tool_calls") else detect_first(message["content"])
    calls = parser.parse(message["content"]) if parser else []
    if parser is None or not calls:
        return message
    return {**message, "content": parser.clean(message["content"]), "tool_calls": calls}
