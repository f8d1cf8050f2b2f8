"""One trajectory on its way: its row, its log-probabilities, its turns, and how it ended."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.data_format import SampledSequence
from twinkle.errors import DataError
from twinkle_agentic.rollout.bridge import extend_with_bridge, special_tokens
from twinkle_agentic.rollout.turns import Turn, answered, is_over, read_turn
from twinkle_agentic.tools.tool_manager import ToolManager


class Track:
    """One trajectory of a rollout.

    Attributes:
        feature: its encoded row so far.
        manager: of its tools.
        turns: those taken.
        reason: why it ended; None while it lives.
    """

    def __init__(self, feature: Mapping[str, Any], manager: ToolManager | None) -> None:
        self.feature: dict[str, Any] = dict(feature)
        self.manager = manager
        self.turns: list[Turn] = []
        self.reason: str | None = None
        self._truncated = False
        self._logprobs: list[float] = []
        self._sampled = self.feature  # the row up to its last sampled token

    @property
    def length(self) -> int:
        """Tokens so far."""
        return len(self.feature["input_ids"])

    def end(self, reason: str, truncated: bool = False) -> None:
        """Let it end."""
        self.reason, self._truncated = reason, truncated

    def cut(self, reason: str) -> None:
        """Let it end for lack of room; a bridge to a turn that cannot be taken is left out again."""
        self.feature = self._sampled
        self.end(reason, truncated=True)

    def take(self, sequence: SampledSequence, template: Any, cut_reason: str) -> None:
        """Append a sampled turn, which may be empty.

        Args:
            sequence: what the sampler returned.
            template: joins the tokens and reads the calls.
            cut_reason: what a turn that was not finished for lack of tokens means.

        Raises:
            DataError: it has log-probabilities, but not one a token; or only some turns have them.
        """
        pairs = sequence.logprobs or []
        if pairs and len(pairs) != len(sequence.tokens):
            raise DataError(
                f"the sampler gave {len(sequence.tokens)} tokens with {len(pairs)} log-probabilities; give one a "
                "token, or none"
            )
        text = template.decode(sequence.tokens, skip_special_tokens=True)
        joined = dict(template.concat_input_feature(self.feature, sequence.tokens))
        self.feature = self._sampled = with_turn(joined, self.feature, text, template)
        self._logprobs += [float(entry[0][1]) for entry in pairs]
        self.turns.append(Turn(text, sequence.stop_reason, len(sequence.tokens)))
        if sequence.stop_reason == "length":
            self.end(cut_reason, truncated=True)
        elif sequence.stop_reason != "stop":
            self.end(sequence.stop_reason)

    def answer(self, template: Any) -> list[Any]:
        """Run the tools that the last turn calls and return the messages that follow; without any it has ended."""
        messages: list[Any] = []
        if self.manager is not None:
            special = special_tokens(template, self.feature)
            messages = answered(self.feature["messages"][-1], self.manager, self.turns[-1], special)
        if not messages:
            self.end("stop")
        elif self.manager is not None and is_over(self.manager):
            self.end("done")
            return []
        return messages

    def bridge(self, messages: Sequence[Any], template: Any) -> None:
        """Continue with the next turn, or end if the chat template cannot render it."""
        extended = extend_with_bridge(self.feature, messages, template)
        if extended is None:
            self.end("bridge")
        else:
            self.feature = extended

    def result(self) -> dict[str, Any]:
        """Return the finished trajectory.

        Raises:
            DataError: trained labels and log-probabilities do not match in number.
        """
        trained = sum(int(label) != -100 for label in self.feature["labels"])
        if self._logprobs and trained != len(self._logprobs):
            raise DataError(f"a trajectory has {trained} trained tokens and {len(self._logprobs)} log-probabilities")
        acting = self.manager is not None and bool(self.manager.episodes)
        rewards = {"turn_rewards": [turn.reward or 0.0 for turn in self.turns]} if acting else {}
        return {
            **self.feature,
            "logprobs": self._logprobs,
            "turns": len(self.turns),
            "turn_tokens": [turn.tokens for turn in self.turns],
            **rewards,
            "stop_reason": self.reason,
            "truncated": self._truncated,
        }


def with_turn(joined: dict[str, Any], before: Mapping[str, Any], text: str, template: Any) -> dict[str, Any]:
    """Return a row whose last message is the assistant's turn with its calls, where the template did not append them.

    Args:
        joined: the row as the template extended it.
        before: the row before the turn.
        text: the sampled text.
        template: reads the calls, see `read_turn`.
    """
    messages = list(joined.get("messages") or before.get("messages") or ())
    if len(messages) <= len(before.get("messages") or ()):
        messages.append(read_turn(text, template))
    elif not messages[-1].get("tool_calls"):
        read = read_turn(text, template)
        if calls := read.get("tool_calls"):
            content = messages[-1].get("content")
            content = read["content"] if content == text else content
            messages[-1] = {**messages[-1], "content": content, "tool_calls": calls}
    return {**joined, "messages": messages}
