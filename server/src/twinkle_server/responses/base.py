"""What models of responses have in common."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Time = Annotated[str, Field(description="UTC, in ISO format")]
Plain = dict[str, Any]


class Answer(BaseModel):
    """A response, or a part of one; a field with a default may be absent."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class Empty(Answer):
    """A response without content."""
