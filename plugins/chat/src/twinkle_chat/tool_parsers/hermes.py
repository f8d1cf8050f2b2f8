"""The markup of Hermes and Qwen: `<tool_call>` around JSON, or around `<function=...>` with its parameters."""

import re
from collections.abc import Iterator
from typing import Any

from twinkle.tool_parser import Block, BlockParser, between, elements, json_object, json_or_text, trimmed

_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>")


class HermesQwenParser(BlockParser):
    """Tool calls of Hermes, Qwen2.5, Qwen3 (JSON) and Qwen3-Coder, Qwen3.5 (`<function=name><parameter=key>value`).

    A call whose `</tool_call>` is missing at the end of the text is complete, if its content is: samplers do not return
    their stop strings. The markup has no types: a parameter's value is parsed as JSON if it is valid JSON other than a
    string.
    """

    name = "hermes_qwen"
    open_marker = "<tool_call>"
    close_marker = "</tool_call>"

    def blocks(self, text: str) -> Iterator[Block]:
        """Yield each `<tool_call>` that contains one call."""
        place = 0
        for start, end, inside in between(text, self.open_marker, self.close_marker):
            place = end
            if (call := _from_json(inside) or _from_markup(inside)) is not None:
                yield Block(start, end, [call])
        start = text.rfind(self.open_marker, place)
        inside = text[start + len(self.open_marker) :]
        if start >= 0 and self.close_marker not in inside and (call := _from_json(inside) or _from_markup(inside)):
            yield Block(start, len(text), [call])

    def extract_tool_result(self, text: str) -> str | None:
        """Return the content of the first `<tool_response>`."""
        result = next(between(text, "<tool_response>", "</tool_response>"), None)
        return None if result is None else result[2].strip("\n")


def _from_json(inside: str) -> tuple[str, Any] | None:
    call = json_object(inside)
    name = (call or {}).get("name") or (call or {}).get("tool_name")
    if call is None or not isinstance(name, str) or not name:
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str) and arguments.strip():
        arguments = json_object(arguments)
    elif arguments is None or isinstance(arguments, str):
        arguments = {}
    return (name, arguments) if isinstance(arguments, dict) else None


def _from_markup(inside: str) -> tuple[str, Any] | None:
    functions = elements(inside, _FUNCTION, "</function>")
    if functions is None or len(functions) != 1:
        return None
    name, body = functions[0]
    parameters = elements(body, _PARAMETER, "</parameter>")
    if parameters is None:
        return None
    return name.strip(), {key.strip(): json_or_text(trimmed(value)) for key, value in parameters}
