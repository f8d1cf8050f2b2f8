"""Templates, preprocessors, filters and rewards that run on a service, by name."""

# mypy: disable-error-code="empty-body"

from collections.abc import Sequence
from typing import Any, ClassVar

from twinkle_client.data import Client, DataResource, remote

__all__ = ["Filter", "Preprocessor", "Reward", "Template"]


class _Named(DataResource):
    """A component of the service.

    Args:
        name: of the component.
        client: by default that of the last `init_twinkle_client`.
        **kwargs: arguments of its constructor.
    """

    def __init__(self, name: str, /, *, client: Client | None = None, **kwargs: Any) -> None:
        super().__init__(name, (), kwargs, client=client)


class Template(_Named):
    """A template of the service: `Template("Qwen3_5Template", model_id=...)`."""

    kind: ClassVar[str] = "template"

    @remote
    def encode(self, trajectory: Any, add_generation_prompt: bool = False, **kwargs: Any) -> Any:
        """Return the encoded row of one conversation."""

    @remote
    def batch_encode(self, trajectories: Any, add_generation_prompt: bool = False, **kwargs: Any) -> Any:
        """Return the encoded rows of several conversations."""

    @remote
    def check(self, trajectory: Any) -> Any:
        """Return the conversation if it can be encoded, or None."""

    @remote
    def batch_check(self, trajectories: Any) -> Any:
        """Return `check` of each."""

    @remote
    def format_trajectory(self, trajectory: Any, add_default_system: bool = False) -> Any:
        """Return the text of a conversation, rendered by the chat template."""

    @remote
    def decode(self, token_ids: Any, **kwargs: Any) -> str:
        """Return the text of tokens."""

    @remote
    def batch_decode(self, token_ids: Any, **kwargs: Any) -> list[str]:
        """Return the texts of several rows of tokens."""

    @remote
    def parse_tool_call(self, decoded: str) -> list[Any]:
        """Return the tool calls in a text."""

    @remote
    def clean_tool_call(self, decoded: str) -> str:
        """Return a text without its tool calls."""

    @remote
    def concat_input_feature(self, prompt_input_feature: Any, new_tokens: Sequence[int]) -> Any:
        """Append sampled tokens to an encoded prompt; the new tokens are trained."""


class Preprocessor(_Named):
    """A preprocessor of the service."""

    kind: ClassVar[str] = "preprocessor"

    @remote
    def __call__(self, rows: Any) -> Any:
        """Return columns for a batch of columns."""


class Filter(_Named):
    """A filter of the service."""

    kind: ClassVar[str] = "filter"

    @remote
    def __call__(self, row: Any) -> bool:
        """Return whether the row is kept."""


class Reward(_Named):
    """A reward of the service."""

    kind: ClassVar[str] = "reward"

    @remote
    def __call__(self, trajectories: Any, ground_truths: Any = None) -> list[float]:
        """Return the score of each trajectory."""
