"""The OpenAPI description: complete, valid JSON schemas, and changed only on purpose."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twinkle_client import wire
from twinkle_server.application import describe_routes
from twinkle_server.responses.routes import ROUTES

PLAIN = ("/twinkle/merge", "/twinkle/hub/", "/twinkle/data")
"""Beginnings of paths whose bodies are JSON alone, or a frame alone."""
REFUSED = {"DELETE /api/v1/auth/apikey/me", "POST /api/v1/auth/token"}
"""Operations that the service always refuses."""
SNAPSHOT = Path(__file__).with_name("openapi.json")


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    return json.loads(json.dumps(describe_routes()))


def operations(described: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def test_it_is_the_snapshot(described: dict[str, Any]) -> None:
    """To change it on purpose: `python server/tests/openapi/test_description.py`."""
    assert described == json.loads(SNAPSHOT.read_bytes())


def test_every_native_route_is_described(described: dict[str, Any]) -> None:
    native = {name: operation for name, operation in operations(described) if " /twinkle/" in name}
    native = {name: operation for name, operation in native.items() if not any(part in name for part in PLAIN)}
    assert len(native) > 35
    without_body = {"POST /twinkle/futures/{request_id}/cancel"}
    for name, operation in native.items():
        assert operation["description"].endswith("."), name
        if name.startswith("POST") and name not in without_body:
            content = operation["requestBody"]["content"]
            assert set(content) == {"application/json", "application/x-twinkle-frame"}, name
            schema = content["application/json"]["schema"]
            assert schema["type"] == "object", name
            assert schema["additionalProperties"] is False, name
        numbered = "/twinkle/models/" in name and name.startswith("POST")
        parameters = {parameter["name"] for parameter in operation.get("parameters", [])}
        assert ("seq_id" in parameters) is numbered, name


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the schemas of objects with named fields that a schema contains."""
    if isinstance(schema, list):
        for item in schema:
            yield from objects(item)
    elif isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict):
            yield schema
        for item in schema.values():
            yield from objects(item)


def test_bodies_of_own_protocols_refuse_unknown_fields(described: dict[str, Any]) -> None:
    checked = 0
    for name, operation in operations(described):
        content = operation.get("requestBody", {}).get("content", {}) if " /twinkle/" in name else {}
        for schema in objects([media.get("schema") for media in content.values()]):
            assert schema["additionalProperties"] is False, (name, schema.get("title"))
            checked += 1
    assert checked > 60


def test_every_response_has_a_schema_of_its_own(described: dict[str, Any]) -> None:
    schemas = described["components"]["schemas"]
    for name, operation in operations(described):
        for status, response in operation["responses"].items():
            for kind, media in response.get("content", {}).items():
                where = f"{name} {status} {kind}"
                schema = media["schema"]
                if kind in ("application/json", "text/event-stream"):
                    text = json.dumps(schema)
                    [model] = re.findall(r'"\$ref": "#/components/schemas/(\w+)"', text)
                    assert schemas[model]["description"], where
                    assert {"properties", "anyOf"} & set(schemas[model]) or model == "Empty", where
                else:
                    assert schema.get("type") == "string" or "$ref" in schema, where


def test_streams_and_files_have_their_media_types(described: dict[str, Any]) -> None:
    def kinds(path: str, method: str = "get", status: str = "200") -> set[str]:
        return set(described["paths"][path][method]["responses"][status]["content"])

    assert kinds("/twinkle/samplers/{sampler_id}/stream", "post") == {"text/event-stream"}
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages"):
        assert kinds(path, "post") == {"application/json", "text/event-stream"}
    assert kinds("/download/{token}/{file}") == {"application/octet-stream", "application/x-tar"}
    assert kinds("/metrics") == {"text/plain"}
    assert kinds("/twinkle/data/{resource_id}/call", "post") == {wire.CONTENT_TYPE}
    assert kinds("/api/v1/retrieve_future", "post") == {"application/json", "application/x-protobuf"}
    assert kinds("/twinkle/models", "post", "202") == {"application/json"}


def test_every_described_route_is_served(described: dict[str, Any]) -> None:
    assert set(ROUTES) <= {name for name, _ in operations(described)}


def test_no_schema_refers_to_what_is_not_there(described: dict[str, Any]) -> None:
    text = json.dumps(described)
    for part in text.split('"$ref": "')[1:]:
        place: Any = described
        for name in part.partition('"')[0].removeprefix("#/").split("/"):
            assert name in place, part[:80]
            place = place[name]


def test_every_operation_says_what_it_answers_and_where_its_places_are(described: dict[str, Any]) -> None:
    for name, operation in operations(described):
        responses = operation["responses"]
        assert {"4XX", "503"} <= set(responses), name
        assert {"200", "302"} & set(responses) or name in REFUSED, name
        assert all("$ref" in response or response["description"] for response in responses.values()), name
        places = {each["name"] for each in operation.get("parameters", ()) if each["in"] == "path"}
        assert places == set(re.findall(r"\{(\w+)", name)), name
    assert set(described["components"]["securitySchemes"]) == {"key", "bearer"}


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(describe_routes(), indent=1, sort_keys=True) + "\n", "utf-8")
