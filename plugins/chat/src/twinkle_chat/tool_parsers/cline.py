"""The markup of Cline: a tag named like the tool, with a tag for each parameter."""

import re
from collections.abc import Iterator

from twinkle.tool_parser import Block, BlockParser, elements, trimmed

_TOOL = re.compile(r"<([a-z][a-z0-9_]*)>")
_PARAMETER = re.compile(r"\s*<([A-Za-z_][\w-]*)>")
_RESULT = re.compile(r"\A\[[a-z][a-z0-9_]*(?: [^\]\n]*)?\] Result:(?:[ \t]*\n|[ \t]*)(.*)\Z", re.DOTALL)
_CONVERSATION = (
    "answer assistant content function function_call function_calls message messages output parameter parameters "
    "reasoning reasoning_content response role system think thinking tool tool_call tool_calls tool_response "
    "tool_result tools user"
)
_HTML = (
    "a article aside audio b blockquote body br button canvas caption center code col colgroup dd del details div dl "
    "dt em fieldset figcaption figure footer form h1 h2 h3 h4 h5 h6 head header hr html i iframe img input ins label "
    "legend li link main mark math meta nav ol optgroup option p picture pre q s script section select small source "
    "span strong style sub summary sup svg table tbody td template textarea tfoot th thead title tr u ul video"
)
_OTHERS = frozenset(f"{_CONVERSATION} {_HTML}".split())


class ClineParser(BlockParser):
    """Tool calls as `<read_file><path>a.py</path></read_file>`, also within a line.

    A tag is a call if it contains parameters only, and is neither HTML nor markup of conversations. The markup has no
    types: values are text. A value of one line is returned without spaces around it, a longer one without the line
    breaks after its opening and before its closing tag.
    """

    name = "cline"
    open_marker = "<"
    close_marker = ">"

    def blocks(self, text: str) -> Iterator[Block]:
        """Yield each tag of a tool that contains only parameters."""
        place, unclosed = 0, set[str]()
        while (tool := _TOOL.search(text, place)) is not None:
            place, name = tool.end(), tool[1]
            if name in _OTHERS or name in unclosed:
                continue
            end = text.find(f"</{name}>", place)
            if end < 0:
                unclosed.add(name)
                continue
            parameters = elements(text[place:end], _PARAMETER, r"</\1>")
            if parameters:
                place = end + len(name) + 3
                yield Block(tool.start(), place, [(name, {key: _value(value) for key, value in parameters})])

    def extract_tool_result(self, text: str) -> str | None:
        """Return what follows `[tool for '...'] Result:`."""
        match = _RESULT.match(text)
        return None if match is None else match[1]


def _value(text: str) -> str:
    value = trimmed(text)
    return value if "\n" in value else value.strip()
