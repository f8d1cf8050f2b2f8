"""The markup of DeepSeek-V4: DSML tags, which declare for each parameter whether it is a string."""

import re
from collections.abc import Iterator
from typing import Any

from twinkle.tool_parser import Block, BlockParser, between, elements, json_or_text

_INVOKE = re.compile(r'\s*<｜DSML｜invoke name="([^"\n]+)">')
_PARAMETER = re.compile(r'\s*<｜DSML｜parameter name="([^"\n]*)" string="(true|false)">')


class DSMLParser(BlockParser):
    """Tool calls of DeepSeek-V4, one or more in each `<｜DSML｜tool_calls>`."""

    name = "dsml"
    open_marker = "<｜DSML｜tool_calls>"
    close_marker = "</｜DSML｜tool_calls>"

    def blocks(self, text: str) -> Iterator[Block]:
        """Yield each block that contains only calls."""
        for start, end, inside in between(text, self.open_marker, self.close_marker):
            invokes = elements(inside, _INVOKE, "</｜DSML｜invoke>") or []
            calls = [(name, arguments) for name, body in invokes if (arguments := _arguments(body)) is not None]
            if calls and len(calls) == len(invokes):
                yield Block(start, end, calls)

    def extract_tool_result(self, text: str) -> str | None:
        """Return the content of the first `<tool_result>`."""
        result = next(between(text, "<tool_result>", "</tool_result>"), None)
        return None if result is None else result[2]


def _arguments(body: str) -> dict[str, Any] | None:
    parameters = elements(body, _PARAMETER, "</｜DSML｜parameter>")
    if parameters is None:
        return None
    return {key: text if is_text == "true" else json_or_text(text) for key, is_text, text in parameters}
