"""JSON bodies of requests: read once, checked by a model, defaults filled in, what nobody knows left out."""

import asyncio
from typing import Annotated, Any, TypeVar

from fastapi import Request
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from twinkle_server.errors import Unprocessable

LARGE = 64 * 2**10
"""Bytes of JSON that would hold up the loop."""
_METADATA = 64 * 2**10
B = TypeVar("B", bound="Body")

Id = Annotated[str, Field(min_length=1, max_length=256)]
Text = Annotated[str, Field(max_length=4096)]
Number = Annotated[int, Field(ge=0, le=2**62)]
"""A number of a queue, a session's model or a page."""
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]


def _texts(value: Any) -> Any:
    """Older clients send values of any JSON type as metadata; they are kept as text."""
    if not isinstance(value, dict):
        return value
    return {str(key): item if isinstance(item, str) else str(item) for key, item in value.items() if item is not None}


def _bounded(value: dict[str, str]) -> dict[str, str]:
    size = sum(len(key) + len(text) for key, text in value.items())
    if size > _METADATA:
        raise ValueError(f"the metadata must have at most {_METADATA} characters, got {size}")
    return value


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=256)], Annotated[str, Field(max_length=16384)]],
    Field(max_length=128),
    BeforeValidator(_texts, json_schema_input_type=dict[str, Any]),
    AfterValidator(_bounded),
]


class Body(BaseModel):
    """A JSON body; fields that it does not name are left out."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), frozen=True)


async def read(request: Request, kind: type[B]) -> B:
    """Return a request's body; an empty one is taken for `{}`.

    Raises:
        Unprocessable: it is no JSON of that form; the message names each field that is wrong.
    """
    data = await request.body()
    return parse(data, kind) if len(data) <= LARGE else await asyncio.to_thread(parse, data, kind)


def parse(data: bytes, kind: type[B]) -> B:
    """See `read`."""
    try:
        return kind.model_validate_json(data or b"{}")
    except ValidationError as error:
        raise Unprocessable(_words(error)) from error


def takes(kind: type[Body]) -> dict[str, Any]:
    """Return what the description of an endpoint says about its body."""
    schema = kind.model_json_schema()
    parts = schema.pop("$defs", {})
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _inlined(schema, parts)}}}}


def _inlined(schema: Any, parts: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inlined(item, parts) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(parts[schema["$ref"].rpartition("/")[2]], parts)
    return {key: _inlined(item, parts) for key, item in schema.items()}


def _words(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    places = [f"{'.'.join(map(str, item['loc'])) or 'the body'}: {item['msg']}" for item in found[:8]]
    more = f"; and {len(found) - 8} more" if len(found) > 8 else ""
    return "; ".join(places)[:2000] + more
