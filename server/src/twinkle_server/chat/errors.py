"""Errors of the chat endpoints that name a parameter or a code, as OpenAI's clients expect."""

from collections.abc import Mapping
from typing import Any

from twinkle_server.errors import BadRequest, NotFound


class InvalidParameter(BadRequest):
    """A parameter of the request is invalid or not supported.

    Attributes:
        param: its name.
        code: short name of the problem.
    """

    def __init__(self, param: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class ThreadsUnsupported(InvalidParameter):
    """The request asks for a thread; the SDK of Anthropic repeats it without one.

    Attributes:
        details: what the SDK reads to decide that.
    """

    details: Mapping[str, Any] = {"error_code": "thread_unsupported_request", "unsupported": []}

    def __init__(self) -> None:
        super().__init__("thread", "threads are not supported; leave out thread, and send the whole conversation")


class ModelNotFound(NotFound):
    """The caller has no such model."""

    param, code = "model", "model_not_found"
