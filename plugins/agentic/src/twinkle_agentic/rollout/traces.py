"""Traces of rollouts that people can read: one file a trajectory, and the same for a callback."""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from twinkle import get_logger
from twinkle.platform import Platform
from twinkle_agentic.rollout.turns import Turn, name_of

_RUN = re.compile(r"`+")
_ENDS = ("stop_reason", "truncated", "success", "error")


class Traces:
    """Writes what became of trajectories; neither a full disk nor a callback that raises ends a run, the log says so.

    Args:
        folder: for one Markdown file a trajectory, `step-000003-0007.md` of step 3 (`step-000003-rank1-0007.md` where
            several processes run); a file appears whole or not at all.
        trace_callback: called with each trace: a dict with `trajectory` (its place), `step`, `messages` (the prompt),
            `turns` (dicts of `Turn`), `stop_reason`, `truncated`, and `success` and `error` where there is one.
        success_callback: called with each finished trajectory; what it returns stands as `success` in both.
    """

    def __init__(
        self,
        folder: str | Path | None,
        trace_callback: Callable[[dict[str, Any]], Any] | None,
        success_callback: Callable[[dict[str, Any]], Any] | None,
    ) -> None:
        self._folder = None if folder is None else Path(folder)
        self._trace, self._success = trace_callback, success_callback
        self._calls = 0

    def keep(
        self,
        results: Sequence[dict[str, Any]],
        prompts: Sequence[Sequence[Any]],
        turns: Sequence[Sequence[Turn]],
        step: int | None,
    ) -> None:
        """Note the end of a rollout.

        Args:
            results: the finished trajectories, which get `success`.
            prompts: the messages of each before.
            turns: of each.
            step: of the training; None counts the calls.
        """
        self._calls += 1
        number = self._calls if step is None else int(step)
        rank = f"rank{Platform.get_rank()}-" if Platform.get_world_size() > 1 else ""
        for place, (result, prompt, own) in enumerate(zip(results, prompts, turns, strict=True)):
            if self._success is not None:
                result["success"] = _guarded(self._success, result)
            if self._folder is None and self._trace is None:
                continue
            trace = _guarded(partial(_trace, place, number, prompt, own), result)
            if self._folder is not None and trace is not None:
                _guarded(partial(_write, self._folder / f"step-{number:06d}-{rank}{place:04d}.md"), trace)
            if self._trace is not None and trace is not None:
                _guarded(self._trace, trace)


def markdown(trace: Mapping[str, Any]) -> str:
    """Return a trace as Markdown."""
    parts = [f"# Trajectory {trace['trajectory']} of step {trace['step']}"]
    for message in trace["messages"]:
        parts += [f"## {message['role']}", _fenced(_text(message.get("content"))), *_calls(message)]
    for number, turn in enumerate(trace["turns"], 1):
        counted = f", {turn['tokens']} tokens" if turn["tokens"] else ""
        parts += [f"## Turn {number} ({turn['stop_reason']}{counted})", _fenced(turn["text"])]
        parts += _calls(turn)
        parts += [part for text in turn["results"] for part in ("Result:", _fenced(text))]
        if turn["reward"] is not None:
            parts.append(f"Reward: {turn['reward']:g}")
    ended = f"**Ended: {trace['stop_reason']}**" + (" (truncated)" if trace["truncated"] else "")
    rest = [f"{key}: {trace[key]}" for key in ("success", "error") if key in trace]
    return "\n\n".join([*parts, ended, *rest]) + "\n"


def _trace(
    place: int, step: int, prompt: Sequence[Any], turns: Sequence[Turn], result: Mapping[str, Any]
) -> dict[str, Any]:
    trace = {"trajectory": place, "step": step, "messages": list(prompt), "turns": [asdict(turn) for turn in turns]}
    return trace | {key: result[key] for key in _ENDS if key in result}


def _calls(turn: Mapping[str, Any]) -> list[str]:
    """Return the calls of a turn, each with its arguments."""
    called = [(name_of(call), (call.get("function") or {}).get("arguments")) for call in turn.get("tool_calls") or ()]
    return [part for name, arguments in called for part in (f"Calls `{name}`:", _fenced(_text(arguments)))]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _fenced(text: str) -> str:
    """Return a block of code that no run of backticks in the text can end."""
    fence = "`" * max(3, 1 + max((len(run) for run in _RUN.findall(text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def _write(target: Path, trace: Mapping[str, Any]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        unfinished.write_text(markdown(trace), "utf-8", errors="replace")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _guarded(function: Callable[[dict[str, Any]], Any], value: dict[str, Any]) -> Any:
    """Call what may fail without harm, and return its answer; None where it failed."""
    try:
        return function(value)
    except Exception as error:  # a callback raises what it likes
        get_logger().warning("a trace of a rollout is lost: %s: %s", type(error).__name__, error)
        return None
