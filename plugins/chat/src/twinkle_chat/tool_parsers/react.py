"""The text of ReAct: a line `Action: name[arguments]`, answered by a line that begins with `Observation:`."""

import re
from collections.abc import Iterator

from twinkle.tool_parser import Block, BlockParser, json_object

_ACTION = re.compile(r"^[ \t]*Action(?: \d+)?:[ \t]*([A-Za-z_][\w.-]*)\[(.*)\][ \t]*$", re.MULTILINE)
_OBSERVATION = re.compile(r"^[ \t]*Observation(?: \d+)?:[ \t]*(.*)", re.MULTILINE | re.DOTALL)
_NEXT = re.compile(r"^[ \t]*(?:Thought|Action|Observation)(?: \d+)?:", re.MULTILINE)


class ReActParser(BlockParser):
    """Tool calls as `Action: search[Paris]`, whose argument is `input`; a JSON object has all arguments."""

    name = "react"
    open_marker = "Action:"
    close_marker = "]"

    def blocks(self, text: str) -> Iterator[Block]:
        """Yield each line that is an action."""
        for match in _ACTION.finditer(text):
            arguments = json_object(match[2])
            yield Block(*match.span(), [(match[1], {"input": match[2]} if arguments is None else arguments)])

    def extract_tool_result(self, text: str) -> str | None:
        """Return the first observation, up to the next thought, action or observation."""
        match = _OBSERVATION.search(text)
        return None if match is None else _NEXT.split(match[1], maxsplit=1)[0].strip()
