"""The markup of Cline: a tag named like the tool, with a tag for each parameter."""

import re
from collections.abc import Iterator

from twinkle.tool_parser import Block, BlockParser, elements, json_or_text, trimmed

_TOOL = re.compile(r"^[ \t]*<([a-z][a-z0-9]*(?:_[a-z0-9]+)+)>", re.MULTILINE)
_PARAMETER = re.compile(r"\s*<([A-Za-z_][\w-]*)>")
_OTHERS = ("tool_call", "tool_calls", "tool_response", "tool_result", "function_call", "function_calls")
_RESULT = re.compile(r"\A\[[a-z][a-z0-9_]*(?: [^\]\n]*)?\] Result:\n(.*)\Z", re.DOTALL)


class ClineParser(BlockParser):
    """Tool calls as `<read_file><path>a.py</path></read_file>`.

    A tag is a call if its name has an underscore, as all tools of Cline and no HTML tags do, if it is on lines of its
    own, and if it contains parameters only. A value is parsed as JSON if it is valid JSON other than a string.
    """

    name = "cline"
    open_marker = "<"
    close_marker = ">"

    def blocks(self, text: str) -> Iterator[Block]:
        """Yield each tag of a tool that contains only parameters."""
        place = 0
        while (tool := _TOOL.search(text, place)) is not None:
            place = tool.end()
            ending = f"</{tool[1]}>"
            end = text.find(ending, place)
            after = end + len(ending)
            if end < 0 or tool[1] in _OTHERS or text[after:].partition("\n")[0].strip():
                continue
            parameters = elements(text[place:end], _PARAMETER, r"</\1>")
            if parameters:
                place = after
                yield Block(
                    tool.start(), after, [(tool[1], {key: json_or_text(trimmed(value)) for key, value in parameters})]
                )

    def extract_tool_result(self, text: str) -> str | None:
        """Return what follows `[tool for '...'] Result:`."""
        match = _RESULT.match(text)
        return None if match is None else match[1]
