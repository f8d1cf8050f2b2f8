"""DeepSeek-V4: the published encoding of its conversations, which has no chat template in the model's folder.

Source of the format: `encoding/README.md` of deepseek-ai/DeepSeek-V4-Flash. Not supported: the roles `developer`
and `latest_reminder`, and the `task` tokens of quick instructions.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from twinkle.data_format import Trajectory
from twinkle.errors import ArgumentError
from twinkle.runtime import remote_class
from twinkle_chat.rendering import ChatRenderer
from twinkle_chat.template import Template

_EFFORTS = (None, "high", "max")


@cache
def _chat_template() -> str:
    return Path(__file__).with_name("deepseek_v4.jinja").read_text("utf-8")


@remote_class()
class DeepseekV4Template(Template):
    """DeepSeek-V4-Flash and -Pro.

    With `enable_thinking` the prompt opens the reasoning, without it closes it. Earlier turns lose their reasoning,
    unless the row has tools. Tool calls are written in DSML; tool results are part of the user's turn, in the order
    of the calls that they answer.
    """

    def __init__(
        self, model_id: str = "", *args: Any, reasoning_effort: Literal["high", "max"] | None = None, **kwargs: Any
    ) -> None:
        """Store the options; the tokenizer is loaded on first use.

        Args:
            model_id: a folder or a hub id whose tokenizer is used.
            *args: those of `Template`.
            reasoning_effort: `max` starts the prompt with the model's instruction to think at length, if thinking is
                enabled; `high` is the same as None, as in the published encoding.
            **kwargs: those of `Template`.

        Raises:
            ArgumentError: an argument is unknown, missing, or outside its range.
        """
        super().__init__(model_id, *args, **kwargs)
        if reasoning_effort not in _EFFORTS:
            raise ArgumentError(f"reasoning_effort must be None, 'high' or 'max', got {reasoning_effort!r}")
        self.reasoning_effort = reasoning_effort

    def format_trajectory(self, trajectory: Mapping[str, Any], add_default_system: bool = False) -> Trajectory:
        """Return the conversation as `Template.format_trajectory` does, tool results in the order of their calls."""
        formatted: Any = super().format_trajectory(trajectory, add_default_system)
        ordered: Any = {**formatted, "messages": _in_call_order(formatted["messages"])}
        return ordered  # type: ignore[no-any-return]

    def _chat(self, **options: Any) -> ChatRenderer:
        return ChatRenderer(
            **options, chat_template=_chat_template(), variables={"reasoning_effort": self.reasoning_effort}
        )


def _in_call_order(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the tool results of each user's turn in the order of the calls before it."""
    ordered, places = list(messages), list[int]()
    order: dict[Any, int] = {}
    for place, message in enumerate([*messages, {"role": "assistant"}]):
        if message["role"] == "tool":
            places.append(place)
        elif message["role"] != "user":
            results = sorted((messages[at] for at in places), key=lambda m: order.get(m.get("tool_call_id"), 0))
            for at, result in zip(places, results, strict=True):
                ordered[at] = result
            places = []
            if message.get("tool_calls"):
                order = {call.get("id"): number for number, call in enumerate(message["tool_calls"])}
    return ordered
