"""Ranks of single layers for Tinker's `create_model`, whose LoRA options have one rank for all layers.

The unmodified SDK sends them as metadata of the training run, as JSON texts under reserved keys.
"""

from collections.abc import Mapping
from typing import Final

import orjson
from pydantic import ValidationError

from twinkle_client.types.models import LayerPatterns
from twinkle_registry import nearest
from twinkle_server.errors import BadRequest
from twinkle_server.requests import validation_message

PREFIX: Final = "twinkle."
"""Keys of metadata that begin with this are options of the service."""
_KEYS: Final = tuple(f"{PREFIX}{name}" for name in LayerPatterns.model_fields)


def read_layer_patterns(metadata: Mapping[str, str] | None) -> LayerPatterns:
    """Return the patterns in the metadata of a request.

    Raises:
        BadRequest: a reserved key is unknown, or its value is not valid.
    """
    values = {}
    for key, text in _reserved(metadata).items():
        if key not in _KEYS:
            close = nearest(key, _KEYS)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise BadRequest(
                f"user_metadata has the reserved key {key[:80]!r}{hint}; keys that begin with {PREFIX!r} are options: "
                f"{', '.join(_KEYS)}"
            )
        try:
            values[key.removeprefix(PREFIX)] = orjson.loads(text)
        except ValueError as error:
            raise BadRequest(f"user_metadata[{key!r}] must be a JSON object, got {text[:80]!r}: {error}") from error
    try:
        return LayerPatterns.model_validate(values)
    except ValidationError as error:
        raise BadRequest(f"user_metadata: {validation_message(error)}") from error


def refuse_layer_patterns(metadata: Mapping[str, str] | None) -> None:
    """Refuse options for a model that begins with a checkpoint, which has its own.

    Raises:
        BadRequest: the metadata has reserved keys.
    """
    if reserved := _reserved(metadata):
        raise BadRequest(
            f"user_metadata has the reserved key {next(iter(reserved))[:80]!r}; a model that begins with a checkpoint "
            "has the ranks of the checkpoint; leave it out"
        )


def _reserved(metadata: Mapping[str, str] | None) -> dict[str, str]:
    return {key: text for key, text in (metadata or {}).items() if key.startswith(PREFIX)}
