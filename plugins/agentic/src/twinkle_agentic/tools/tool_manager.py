"""The manager of a trajectory's tools: runs a model's call, valid or not, and returns text."""

import copy
import json
from collections.abc import Iterable, Mapping
from typing import Any

from twinkle import registry
from twinkle.data_format import ToolCall
from twinkle.errors import ArgumentError
from twinkle.tool import Tool, ToolInfo
from twinkle_agentic.tools.calling import Hung, TimedCalls, as_text, error_text, shortened
from twinkle_registry import nearest


class ToolManager:
    """Holds tools by name and calls them; a failed call does not raise, but returns text that begins with `Error:`.

    So answers: a tool that is not there, arguments that are no JSON object, a tool that raises (class and message, no
    traceback), one that does not return in time, and a result that is no text. Results longer than `max_result_chars`
    lose their middle.

    A call that hangs is given up after `time_limit` and its thread left behind, since Python cannot end threads. No
    more than `max_threads` calls run at one time, hung ones included, and copies share this count: where all of them
    hang, calls are refused until one returns.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool] | Iterable[Tool] | None = None,
        *,
        time_limit: float | None = 20.0,
        max_threads: int = 16,
        max_result_chars: int = 10_000,
    ) -> None:
        """Register tools.

        Args:
            tools: tools, each in any form of component argument, which bear the names of their schemas; or a mapping
                that gives each another name, which the model then sees.
            time_limit: seconds for one call; None is no limit, and no thread.
            max_threads: how many calls may run at one time, hung ones included.
            max_result_chars: how much of a result the model sees.

        Raises:
            ArgumentError: something is no tool, two have one name, or a limit does not fit.
        """
        if isinstance(max_result_chars, bool) or not isinstance(max_result_chars, int) or max_result_chars < 1:
            raise ArgumentError(f"max_result_chars is {max_result_chars!r}; it is a number of characters from 1")
        self.max_result_chars = max_result_chars
        self.calls = TimedCalls(time_limit, max_threads)
        self._tools: dict[str, Tool] = {}
        if isinstance(tools, str | Tool):
            raise ArgumentError(f"tools is {tools!r:.80}; give a list of tools, or a mapping of names to tools")
        named = tools.items() if isinstance(tools, Mapping) else ((None, tool) for tool in tools or ())
        for name, tool in named:
            self.register(tool, name)

    def register(self, tool: Any, name: str | None = None) -> None:
        """Add a tool.

        Args:
            tool: in any form of component argument.
            name: under which the model calls it; None is that of its schema.

        Raises:
            ArgumentError: the name is taken, or `tool` is none.
        """
        built = tool if isinstance(tool, Tool) else registry().build(tool, "tool")
        if not callable(getattr(built, "tool_info", None)):
            raise ArgumentError(f"{built!r:.80} is not a tool: it has no tool_info(); subclass twinkle.tool.Tool")
        try:
            name = str(built.tool_info()["function"]["name"]) if name is None else name
        except (KeyError, TypeError) as error:
            raise ArgumentError(
                f"the schema of {built!r:.80} has no function.name: {built.tool_info()!r:.80}"
            ) from error
        if name in self._tools:
            raise ArgumentError(f"a tool {name!r} is registered already; unregister it first, or give this one a name")
        self._tools[name] = built

    def unregister(self, name: str) -> None:
        """Remove a tool.

        Raises:
            ArgumentError: there is no tool of that name.
        """
        if name not in self._tools:
            raise ArgumentError(self._unknown(name))
        del self._tools[name]

    def names(self) -> list[str]:
        """Return the names of all tools, in the order of registration."""
        return list(self._tools)

    def copy(self) -> "ToolManager":
        """Return a manager of the same tools, to which others may be added."""
        twin = copy.copy(self)
        twin._tools = dict(self._tools)
        return twin

    def tool_infos(self) -> list[ToolInfo]:
        """Return the schemas of all tools, as the model sees them."""
        infos: list[Any] = [copy.deepcopy(tool.tool_info()) for tool in self._tools.values()]
        for name, info in zip(self._tools, infos, strict=True):
            info["function"]["name"] = name
        return infos

    @property
    def episodes(self) -> list[Any]:
        """The episodes that tools of environments act in, each once."""
        found = {id(episode): episode for tool in self._tools.values() if (episode := getattr(tool, "episode", None))}
        return list(found.values())

    def __call__(self, tool_call: ToolCall | Mapping[str, Any]) -> str:
        """Run one call, in OpenAI's form, and return its result or what went wrong as text."""
        function: Any = tool_call.get("function", tool_call) if isinstance(tool_call, Mapping) else {}
        name = function.get("name") if isinstance(function, Mapping) else None
        tool = self._tools.get(name) if isinstance(name, str) else None
        if tool is None or not isinstance(name, str):
            return f"Error: {self._unknown(name)}"
        arguments = _arguments(function.get("arguments"))
        if arguments is None:
            return f"Error: the arguments of {name} are no JSON object: {_shown(function['arguments'])}"
        try:
            return self.calls(lambda: as_text(tool(name, arguments), self.max_result_chars))
        except Hung as error:
            return f"Error: {name}: {error}"
        except BaseException as error:  # a tool may raise anything
            if isinstance(error, KeyboardInterrupt):
                raise
            return f"Error: {error_text(error)}"

    def _unknown(self, name: Any) -> str:
        close = nearest(name, self._tools, 1) if isinstance(name, str) and len(name) < 200 else []
        hint = f", nearest: {close[0]!r}" if close else ""
        return f"there is no tool {shortened(str(name), 80)!r}{hint}; there is: {', '.join(self._tools) or 'none'}"


def _arguments(given: Any) -> dict[str, Any] | None:
    """Return the arguments of a call as a new dict; None if they are not valid."""
    if given is None or given == "":
        return {}
    try:
        own = json.loads(given) if isinstance(given, str) else copy.deepcopy(given)
    except (ValueError, RecursionError):
        return None
    return dict(own) if isinstance(own, Mapping) else None


def _shown(given: Any) -> str:
    try:
        return repr(shortened(str(given), 200))
    except RecursionError:
        return f"a {type(given).__name__} that is nested too deeply"
