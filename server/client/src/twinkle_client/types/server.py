"""The service, and the session of a client."""

from typing import Annotated

from pydantic import Field

from twinkle_client.types.base import Metadata, Name, Request, Response, Text


class CreateSessionRequest(Request):
    """A new session."""

    metadata: Metadata | None = None
    tags: Annotated[list[Text], Field(default_factory=list, max_length=256)]
    client_version: Text | None = None


class SessionRequest(Request):
    """A heartbeat of a session, or its end."""

    session_id: Name


class CapacityInfoResponse(Response):
    """How many adapters this key may have; None where memory is the only limit."""

    max_loras: int | None = None
    used_loras: int = 0
    free_loras: int | None = None


class SupportedModel(Response):
    """A served model."""

    model_name: str
    trainable: bool = True
    sampleable: bool = True
    max_context_length: int | None = None


class ServerCapabilities(Response):
    """What a service offers: models, and components by kind."""

    supported_models: list[SupportedModel]
    components: dict[str, list[str]] = Field(default_factory=dict)
