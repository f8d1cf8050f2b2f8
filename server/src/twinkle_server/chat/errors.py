"""Errors of the chat endpoints that name a parameter or a code, as OpenAI's clients expect."""

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


class ModelNotFound(NotFound):
    """The caller has no such model."""

    param, code = "model", "model_not_found"
