"""What the OpenAPI description says beside parameters and bodies: results, errors, keys, and places in paths."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from twinkle_server.error_forms import ANTHROPIC, is_chat, is_shared

if TYPE_CHECKING:
    from twinkle_server.responses.routes import Answers

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
                "type": "object", "required": ["type", "message"],
                "properties": {"type": _TEXT, "message": _TEXT, "details": {"type": "object"}},
            },
        },
    },
    "ChatError": {
        "anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in ("OpenAIError", "AnthropicError")]
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
_BYTES: Final[Mapping[str, Any]] = {"type": "string", "format": "binary"}
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
    from twinkle_server.responses import routes

    schemas = described.setdefault("components", {}).setdefault("schemas", {})
    for name in _FASTAPIS:
        schemas.pop(name, None)
    schemas |= routes.definitions()
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
        for method, operation in operations.items():
            _add_places(path, operation)
            _describe_content(f"{method.upper()} {path}", operation["responses"])
            _add_errors(path, operation["responses"])
    return described


def _describe_content(route: str, responses: dict[str, Any]) -> None:
    """Add the schemas of the content of responses that are not errors, in place."""
    from twinkle_server.responses.routes import Answers, answers_of

    known = answers_of(route)
    answers = known or Answers()
    for status, model in answers.other.items():
        responses.setdefault(status, {"description": _STATUSES.get(status, "")}).setdefault("content", {})[JSON] = model
    for status, response in list(responses.items()):
        content = ({JSON: answers.json} if status == "200" else {}) | response.get("content", {})
        response["content"] = {
            kind: _schema_of(kind, status, answers)
            for kind, value in content.items()
            if value is not None and (kind != JSON or status != "200" or known is None or answers.json is not None)
        }
    if known is not None and not responses.get("200", {"content": True})["content"]:
        del responses["200"]  # the endpoint always refuses, or redirects


def _schema_of(kind: str, status: str, answers: "Answers") -> dict[str, Any]:
    from twinkle_client.wire import CONTENT_TYPE
    from twinkle_server.responses.routes import event_schema, reference

    if kind == JSON:
        model = answers.json if status == "200" else answers.other.get(status)
        return {} if model is None else {"schema": reference(model)}
    if kind == EVENTS:
        return {"schema": event_schema(answers)}
    if kind == CONTENT_TYPE and answers.frame is not None:
        return {"schema": reference(answers.frame)}
    return {"schema": {"type": "string"} if kind.startswith("text/") else dict(_BYTES)}


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
    if is_shared(path):
        name = "ChatError"
    elif is_chat(path):
        name = "AnthropicError" if path.startswith(ANTHROPIC) else "OpenAIError"
    for status in _STATUSES:
        responses.setdefault(status, {"$ref": f"#/components/responses/{status}{name}"})
