"""The markup of VCP: a tool request in triple angle brackets, its parameters between 「始」 and 「末」."""

import re
from collections.abc import Iterator

from twinkle.tool_parser import Block, BlockParser, between, elements

_PARAMETER = re.compile(r"[\s,，]*([\w-]+)\s*[:：]\s*「始(ESCAPE)?」")
_RESULT = ("[[VCP调用结果信息汇总:", "VCP调用结果结束]]")


class VCPParser(BlockParser):
    """Tool calls as `<<<[TOOL_REQUEST]>>>` with `key:「始」value「末」`, the tool's name under `tool_name`.

    A value between `「始ESCAPE」` and `「末ESCAPE」` may contain the other marks. Values are returned as they are
    written.
    """

    name = "vcp"
    open_marker = "<<<[TOOL_REQUEST]>>>"
    close_marker = "<<<[END_TOOL_REQUEST]>>>"

    def blocks(self, text: str) -> Iterator[Block]:
        """Yield each request that has a tool name."""
        for start, end, inside in between(text, self.open_marker, self.close_marker):
            parameters = elements(inside.rstrip(" \n\t,，"), _PARAMETER, r"「末\2」") or ()
            arguments = {key: value for key, _, value in parameters}
            name = arguments.pop("tool_name", "").strip()
            if name:
                yield Block(start, end, [(name, arguments)])

    def extract_tool_result(self, text: str) -> str | None:
        """Return the summary of results."""
        result = next(between(text, *_RESULT), None)
        return None if result is None else result[2].strip()
