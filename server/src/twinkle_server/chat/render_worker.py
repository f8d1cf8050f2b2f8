"""`python -m twinkle_server.chat.render_worker DESCRIPTOR MODEL TEMPLATE`: renders conversations to tokens.

A process of its own, because a chat template is code of the model's author and importing transformers takes seconds and
much memory. It answers messages in order: `about`, `chat`, `texts` and `grammar`; see the functions of these names.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from twinkle import registry
from twinkle.errors import EncodeError, TwinkleError
from twinkle_server.engine.messages import BlockingLink, LinkClosed, Message
from twinkle_server.environment import die_with_parent

COMPILE_SECONDS = 0.25
"""Maximum time to compile a grammar, since the engine compiles it between decode steps."""
PROBE: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string"}}, "required": ["probe_key"]},
    },
}
_CALL = {"name": "probe_tool", "arguments": '{"probe_key": "probe value"}'}


def _parsed(call: Mapping[str, Any]) -> tuple[str, Any]:
    """Return name and arguments of a call; parsers return them as text or as a mapping."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    return name, json.loads(arguments) if isinstance(arguments, str) else arguments


class Refused(Exception):
    """The request is invalid; the text is for the client."""


class Worker:
    """Answers requests with the template of one model.

    Args:
        model: folder of the model.
        template: name of a component of kind `template`.
    """

    def __init__(self, model: str, template: str) -> None:
        options = {"model_id": model, "max_length": None}
        self._templates = {
            thinking: registry().build(template, "template", enable_thinking=thinking, **options)
            for thinking in (True, False)
        }
        self._tokenizer = self._templates[True].tokenizer
        self._matcher_tokenizer: Any = None

    def about(self) -> dict[str, Any]:
        """Return the tokenizer as JSON text, and the format of tool calls."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise Refused("the tokenizer of this model is not a fast one; use the Tinker protocol, with token ids")
        backend.no_padding()
        backend.no_truncation()
        return {"tokenizer": backend.to_str(), "tools": self._tool_format()}

    def _tool_format(self) -> dict[str, Any] | None:
        """Return how this model writes tool calls: the parser that reads back what its chat template renders."""
        from twinkle.tool_parser import detect_first

        user = {"role": "user", "content": "x"}
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": _CALL}]}
        try:
            asked = self._text([user], tools=[PROBE])
            text = self._text([user, call])
        except (EncodeError, TypeError):  # a chat template may fail on a turn without text
            return None
        parser = detect_first(text)
        calls = parser.parse(text) if parser else []
        if parser is None or "probe_tool" not in asked or list(map(_parsed, calls)) != [_parsed({"function": _CALL})]:
            return None
        inside = text.rpartition(parser.open_marker)[2].partition(parser.close_marker)[0]
        special = parser.open_marker in self._tokenizer.all_special_tokens
        return {
            "parser": type(parser).__name__,
            "json": _is_json_call(inside),
            "before": inside[: len(inside) - len(inside.lstrip())],
            "after": inside[len(inside.rstrip()) :],
            "special": special,
        }

    def _text(self, messages: list[Any], tools: list[Any] | None = None) -> str:
        template = self._templates[True]
        return str(template.decode(template.encode({"messages": messages, "tools": tools or []})["input_ids"]))

    def chat(self, messages: list[Any], tools: list[Any] | None, thinking: bool, continued: bool) -> list[int]:
        """Return the tokens of a conversation with the header of an assistant turn, or with its beginning."""
        if continued:
            return self._continued(messages, tools, thinking)
        trajectory = {"messages": messages, "tools": tools or []}
        tokens: list[int] = self._templates[thinking].encode(trajectory, add_generation_prompt=True)["input_ids"]
        return tokens

    def _continued(self, messages: list[Any], tools: list[Any] | None, thinking: bool) -> list[int]:
        """Return the tokens up to the end of the last message's text, which a mark shows in the rendered text."""
        template: Any = self._templates[thinking]
        if not hasattr(template, "renderer"):
            raise Refused("the template of this model cannot continue a message; end with a message of the user")
        *history, last = messages
        mark = "TWINKLEEND"
        while mark in json.dumps(messages):
            mark += "X"
        marked = {"messages": [*history, {**last, "content": last["content"] + mark}], "tools": tools or []}
        formatted = template.format_trajectory(marked, add_default_system=True)
        text, found, _ = template.renderer(marked).render(formatted["messages"]).rpartition(mark)
        if not found:
            raise Refused("the chat template of this model does not show the text of the last message to continue")
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def texts(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of texts, with the special tokens that the tokenizer adds."""
        return [list(self._tokenizer(text)["input_ids"]) for text in texts]

    def grammar(self, structure: dict[str, Any]) -> str:
        """Check `SamplingParams.structured_outputs`: it must compile, and quickly."""
        import llguidance

        if self._matcher_tokenizer is None:
            self._matcher_tokenizer = llguidance.LLTokenizer(
                self._tokenizer.backend_tokenizer.to_str(), eos_token=self._tokenizer.eos_token_id
            )
        ((kind, value),) = structure.items()
        try:
            if kind == "grammar":
                source = llguidance.LLMatcher.grammar_from_lark(value)
            elif kind == "regex":
                source = llguidance.LLMatcher.grammar_from_regex(value)
            elif kind == "choice":
                texts = " | ".join(json.dumps(text) for text in value)
                source = llguidance.LLMatcher.grammar_from_lark(f"start: {texts}")
            else:
                schema = {"type": "object"} if kind == "json_object" else value
                text = schema if isinstance(schema, str) else json.dumps(schema)
                source = llguidance.LLMatcher.grammar_from_json_schema(text)
        except ValueError as error:
            raise Refused(f"the JSON schema cannot be read: {error}") from error
        began = time.perf_counter()
        matcher = llguidance.LLMatcher(self._matcher_tokenizer, source, log_level=0)
        what = {"grammar": "grammar", "regex": "regular expression", "choice": "choice"}.get(kind, "schema")
        if matcher.is_error():
            raise Refused(f"the {what} cannot be used: {_problem(matcher)}")
        if (seconds := time.perf_counter() - began) > COMPILE_SECONDS:
            raise Refused(
                f"the schema is too complex: it took {seconds:.2f} s to compile, and {COMPILE_SECONDS:g} s are allowed"
            )
        matcher.compute_bitmask()
        if matcher.is_error():
            raise Refused(f"the {what} cannot be used: {_problem(matcher)}")
        return ""

    def answer(self, message: Message) -> Message:
        """Return the answer to a message: its body is JSON, or its head has an error."""
        functions: dict[str, Callable[..., Any]] = {
            "about": self.about, "chat": self.chat, "texts": self.texts, "grammar": self.grammar,
        }  # fmt: skip
        try:
            return Message("answer", {}, orjson.dumps(functions[message.type](**orjson.loads(message.body))))
        except (Refused, EncodeError) as error:
            return Message("answer", {"error": str(error), "category": "user"})
        except RecursionError:
            return Message("answer", {"error": "the request is nested too deeply", "category": "user"})
        except Exception as error:  # the code of a chat template may raise anything
            return Message("answer", {"error": f"{type(error).__name__}: {error}", "category": "server"})


def _problem(matcher: Any) -> str:
    """Return why a grammar cannot be used, without the state of its parser."""
    reason = " ".join(matcher.get_error().partition("<state>")[0].split())[:500]
    return "no text matches it" if reason == "NoExtensionBias" else reason


def _is_json_call(inside: str) -> bool:
    try:
        return bool(json.loads(inside) == {"name": "probe_tool", "arguments": {"probe_key": "probe value"}})
    except ValueError:
        return False


def main(arguments: list[str]) -> None:
    """Answer until the service closes the socket."""
    descriptor, model, template = arguments
    die_with_parent()
    link = BlockingLink.from_descriptor(int(descriptor))
    try:
        worker = Worker(model, template)
        ready = Message("ready")
    except TwinkleError as error:
        link.send(Message("ready", {"error": " ".join(str(error).split())}))
        return
    try:
        link.send(ready)
        for message in link:
            link.send(worker.answer(message))
    except LinkClosed:
        return


if __name__ == "__main__":
    main(sys.argv[1:])
