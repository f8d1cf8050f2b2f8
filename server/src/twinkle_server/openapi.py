"""What the OpenAPI description says beside parameters and bodies: results, errors, keys, and places in paths."""

import re
from collections.abc import Mapping
from typing import Any, Final

from twinkle_server.error_forms import ANTHROPIC, is_chat

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
BINARY: Final = "application/octet-stream"
_PLACE: Final = re.compile(r"\{(\w+)(?::\w+)?\}")
_TEXT: Final[Mapping[str, Any]] = {"type": "string"}
_OPTIONAL: Final[Mapping[str, Any]] = {"type": ["string", "null"]}
_ERRORS: Final[Mapping[str, Mapping[str, Any]]] = {
    "Error": {
        "type": "object", "required": ["detail"],
        "properties": {"detail": _TEXT, "error": {**_TEXT, "description": "class of the error in a local call"}},
    },
    "OpenAIError": {
        "type": "object", "required": ["error"],
        "properties": {
            "error": {
                "type": "object", "required": ["message", "type", "param", "code"],
                "properties": {"message": _TEXT, "type": _TEXT, "param": _OPTIONAL, "code": _OPTIONAL},
            }
        },
    },
    "AnthropicError": {
        "type": "object", "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object", "required": ["type", "message"], "properties": {"type": _TEXT, "message": _TEXT},
            },
        },
    },
}  # fmt: skip
_STATUSES: Final[Mapping[str, str]] = {
    "4XX": "The request is invalid, not permitted, or over a limit",
    "503": "The service cannot handle the request now; retry",
}
_KEYS: Final[Mapping[str, Mapping[str, str]]] = {
    "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    "bearer": {"type": "http", "scheme": "bearer"},
}
_FASTAPIS: Final = ("HTTPValidationError", "ValidationError")
"""Schemas of errors that FastAPI describes, and this service does not send."""


def returns(
    *kinds: str, status: int = 200, description: str = "Successful Response", json: bool = True
) -> dict[str, Any]:
    """Return the `openapi_extra` of an endpoint that has another response than JSON with status 200.

    Args:
        kinds: media types.
        status: of the response.
        description: of the response.
        json: whether a response with status 200 may also be JSON.
    """
    content: dict[str, Any] = {kind: {} for kind in kinds}
    if not json:
        content[JSON] = None  # the description that FastAPI makes has it, and `complete` removes it
    return {"responses": {str(status): {"description": description, "content": content}}}


def complete(described: dict[str, Any]) -> dict[str, Any]:
    """Complete the description that FastAPI makes of an application, in place, and return it."""
    schemas = described.setdefault("components", {}).setdefault("schemas", {})
    for name in _FASTAPIS:
        schemas.pop(name, None)
    schemas |= {name: dict(schema) for name, schema in _ERRORS.items()}
    described["components"]["responses"] = {
        f"{status}{name}": {
            "description": text,
            "content": {JSON: {"schema": {"$ref": f"#/components/schemas/{name}"}}},
        }
        for name in _ERRORS
        for status, text in _STATUSES.items()
    }
    described["components"]["securitySchemes"] = {name: dict(scheme) for name, scheme in _KEYS.items()}
    described["security"] = [{name: []} for name in _KEYS]
    for path, operations in described["paths"].items():
        for operation in operations.values():
            _add_places(path, operation)
            for status, response in operation["responses"].items():
                content = ({JSON: {}} if status == "200" else {}) | response.get("content", {})
                response["content"] = {kind: {} for kind, value in content.items() if value is not None}
            _add_errors(path, operation["responses"])
    return described


def _add_places(path: str, operation: dict[str, Any]) -> None:
    """Describe places in the path that an endpoint reads itself."""
    parameters = operation.get("parameters", [])
    known = {parameter["name"] for parameter in parameters if parameter["in"] == "path"}
    missing = [name for name in _PLACE.findall(path) if name not in known]
    if missing:
        places = [{"name": name, "in": "path", "required": True, "schema": dict(_TEXT)} for name in missing]
        operation["parameters"] = places + parameters


def _add_errors(path: str, responses: dict[str, Any]) -> None:
    responses.pop("422", None)
    name = "Error"
    if is_chat(path):
        name = "AnthropicError" if path.startswith(ANTHROPIC) else "OpenAIError"
    for status in _STATUSES:
        responses.setdefault(status, {"$ref": f"#/components/responses/{status}{name}"})
