"""What follows a turn of the assistant: the tools that it calls, and the messages that answer it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinkle.data_format import Trajectory
from twinkle.errors import ArgumentError
from twinkle.tool_parser import detect_first, parsers
from twinkle_agentic.tools.tool_manager import ToolManager


@dataclass
class Turn:
    """One turn as traces show it.

    Attributes:
        text: what the assistant wrote, markup of calls included.
        stop_reason: why the turn ended.
        tokens: number of sampled tokens; 0 if they were not counted.
        tool_calls: the calls that were read from it.
        results: what was answered, one text a call, and one for calls that could not be read.
        reward: the rewards of environments in this turn; None where there are none.
    """

    text: str
    stop_reason: str = "stop"
    tokens: int = 0
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    reward: float | None = None


def managers(given: Any, count: int, what: str) -> list[ToolManager | None]:
    """Return the tool manager of each trajectory, of one for all or of a list with one for each.

    Raises:
        ArgumentError: it is neither, trajectories would act in one environment, or in an episode that is over.
    """
    found = list(given) if (several := isinstance(given, list | tuple)) else [given] * count
    for place, manager in enumerate(found):
        if manager is not None and not isinstance(manager, ToolManager):
            listed = f"[{place}]; a list holds one manager for each trajectory" if several else ""
            raise ArgumentError(
                f"{what}: a {type(manager).__name__} was given as tool_manager{listed}; "
                "for tools that all trajectories call: tool_manager=ToolManager([tool, ...])"
            )
    if len(found) != count:
        raise ArgumentError(f"{what}: {len(found)} tool managers for {count} trajectories; give one, or one for each")
    acting = [id(episode.env) for manager in found if manager is not None for episode in manager.episodes]
    if len(set(acting)) < len(acting):
        raise ArgumentError(
            f"{what}: several trajectories would act in one environment; give each an environment and a tool manager "
            "of its own: tool_manager=[ToolManager(EnvTool.from_env(env)) for env in envs]"
        )
    for row, manager in enumerate(found):
        if manager is not None and is_over(manager):
            raise ArgumentError(
                f"{what}: the episode of trajectory {row} has ended; call reset() of its EnvTool, or create "
                "new tools with EnvTool.from_env(env)"
            )
    return found


def with_tools(trajectory: Trajectory, manager: ToolManager | None) -> dict[str, Any]:
    """Return the trajectory with the schemas of its tools, where it does not say itself which the model sees."""
    row: dict[str, Any] = dict(trajectory)
    if manager is not None and manager.names() and row.get("tools") is None:
        row["tools"] = manager.tool_infos()
    return row


def answered(message: Mapping[str, Any], manager: ToolManager, turn: Turn, special: Collection[str]) -> list[Any]:
    """Run the calls of a turn, in order, and return the messages that answer them; none if it calls nothing.

    Args:
        message: the assistant's.
        manager: of its tools.
        turn: where to note the calls, the results and the reward of environments.
        special: the special tokens of the tokenizer as text, which no result may contain: it could forge a turn.
    """
    before = [(episode, len(episode.results)) for episode in manager.episodes]
    turn.tool_calls = [dict(call) for call in message.get("tool_calls") or ()]
    messages = []
    for call in turn.tool_calls:
        name, text = _harmless(name_of(call), special), _harmless(manager(call), special)
        messages.append({"role": "tool", "name": name, "content": text} | _id_of(call))
    if (marker := _unread(str(message.get("content") or ""))) is not None:
        text = (
            f"Error: a tool call could not be read. Write it whole, from {marker[0]} to {marker[1]}, with the tool's "
            "name and its arguments."
        )
        messages.append({"role": "tool", "content": text})
    turn.results = [message["content"] for message in messages]
    if before and turn.tool_calls:
        turn.reward = sum((sum(episode.rewards[start:]) for episode, start in before), 0.0)
    return messages


def read_turn(text: str, template: Any = None) -> dict[str, Any]:
    """Return the assistant's message of a sampled text, with its tool calls.

    Args:
        text: what was sampled.
        template: its `parse_tool_call` and `clean_tool_call` read the text; the installed parsers do where it has none.
    """
    parser = detect_first(text)
    parse = getattr(template, "parse_tool_call", None) or (parser.parse if parser else None)
    clean = getattr(template, "clean_tool_call", None) or (parser.clean if parser else None)
    calls = parse(text) if parse else []
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": clean(text) if clean else text, "tool_calls": list(calls)}


def is_over(manager: ToolManager) -> bool:
    """Return whether an environment has ended its episode."""
    return any(episode.done for episode in manager.episodes)


def name_of(call: Any) -> str:
    """Return the name of the tool of a call; "" if it has none, or is not a call."""
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def _id_of(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"tool_call_id": call["id"]} if call.get("id") else {}


def _unread(text: str) -> tuple[str, str] | None:
    """Return opening and closing marker of a call that no parser could read, if there is one.

    Markers that occur in prose too (Cline's `<`, ReAct's `Action:`) say nothing.
    """
    known = [(parser.open_marker or "", parser.close_marker or "") for parser in parsers()]
    return next((pair for pair in known if len(pair[0]) > 3 and pair[0].startswith("<") and pair[0] in text), None)


def _harmless(text: str, special: Collection[str]) -> str:
    """Return a text in which special tokens are broken up by a space."""
    for token in sorted(special, key=len, reverse=True):
        text = text.replace(token, f"{token[:1]} {token[1:]}")
    return text


def checked_rows(trajectories: Any, what: str) -> list[Any]:
    """Return the trajectories as a list.

    Raises:
        ArgumentError: they are none.
    """
    if isinstance(trajectories, str | Mapping) or not isinstance(trajectories, Iterable):
        raise ArgumentError(f"{what}: trajectories is a {type(trajectories).__name__}; give a list of trajectories")
    rows: Sequence[Any] = list(trajectories)
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping) or not row.get("messages"):
            raise ArgumentError(f"{what}: trajectory {number} has no messages; give a dict with 'messages'")
    return list(rows)


def checked_turns(max_turns: Any, what: str) -> int:
    """Return the number of turns.

    Raises:
        ArgumentError: it is none.
    """
    if isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1:
        raise ArgumentError(f"{what}: max_turns is {max_turns!r}; it is a number of turns from 1")
    return max_turns
