"""Base classes of the models of this package."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(min_length=1, max_length=256)]
Text = Annotated[str, Field(max_length=4096)]
Number = Annotated[int, Field(ge=0, le=2**62)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=256)], Annotated[str, Field(max_length=16384)]], Field(max_length=128)
]


class Request(BaseModel):
    """A body of a request; an unknown field is an error, so that nothing is accepted and ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), arbitrary_types_allowed=True)


class Response(BaseModel):
    """A result of the service; unknown fields of a newer service are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


Plain = dict[str, Any]
"""A mapping of numbers, texts, lists, mappings and tensors."""
