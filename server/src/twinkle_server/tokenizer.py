"""Routes with the files of the model's tokenizer, for clients on machines that do not have the model folder."""

import asyncio
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson
from fastapi import APIRouter, Request, Response

from twinkle_server.app_state import app_state_of, caller_of
from twinkle_server.checkpoints.links import pieces, stream, streamed
from twinkle_server.errors import NotFound
from twinkle_server.openapi import BINARY, returns
from twinkle_server.requests import json_response
from twinkle_server.tinker.models import tokenizer_of

PATH: Final = "/twinkle/tokenizer"
_FILES: Final = re.compile(
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|tokenizer\.model|spiece\.model|sentencepiece\.bpe\.model|tekken\.json|chat_template\.(jinja|json)"
    r"|additional_chat_templates-[\w-]+\.jinja|config\.json"
)
"""Files that transformers reads to build a tokenizer; `config.json` names its class for some models."""
_MOST: Final = 256 * 2**20


_CLEANED: Final = ("config.json", "tokenizer_config.json")
_PATHS: Final = ("_name_or_path", "name_or_path")
"""Keys under which transformers records the folder that a file was saved from."""


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """A file of the tokenizer.

    Attributes:
        path: of the file.
        size: in bytes, as sent.
        sha256: of the content, as sent.
        content: that is sent instead of the file's; None sends the file.
    """

    path: Path
    size: int
    sha256: str
    content: bytes | None = None


def tokenizer_routes(folder: Path, known: Callable[[], bool] = lambda: True) -> APIRouter:
    """Return the routes.

    Args:
        folder: of the model.
        known: returns whether the engine has found a tokenizer.
    """
    router = APIRouter()
    listed: dict[str, TokenizerFile] = {}

    async def files() -> dict[str, TokenizerFile]:
        if not listed and known():
            listed.update(await asyncio.to_thread(tokenizer_files, folder))
        if not listed:
            raise NotFound("the served model has no tokenizer, or the service is starting")
        return listed

    @router.get(PATH)
    async def tokenizer(request: Request) -> Response:
        """List the files of the tokenizer with their sizes, SHA-256 and links."""
        caller_of(request)
        state, base = app_state_of(request), str(request.base_url).rstrip("/")
        entries = {
            name: {"size": file.size, "sha256": file.sha256, "url": f"{base}{PATH}/{name}"}
            for name, file in (await files()).items()
        }
        model, tokenizer_id = state.service.info.name, tokenizer_of(state, request)
        return json_response({"model_name": model, "tokenizer_id": tokenizer_id, "files": entries})

    @router.get(f"{PATH}/{{file}}", openapi_extra=returns(BINARY, json=False))
    async def tokenizer_file(request: Request) -> Response:
        """Return a file of the tokenizer."""
        caller_of(request)
        name = request.path_params["file"]
        entry = (await files()).get(name)
        if entry is None:
            raise NotFound(f"the tokenizer has no file {name[:100]!r}; GET {PATH} lists its files")
        if entry.content is not None:
            return Response(entry.content, media_type=BINARY)
        try:
            file = await asyncio.to_thread(entry.path.open, "rb")
        except OSError as error:
            raise NotFound(f"the file {name} no longer exists") from error
        return streamed(stream(pieces(file)), entry.size, BINARY)

    return router


def tokenizer_files(folder: Path) -> dict[str, TokenizerFile]:
    """Return the files of a model's tokenizer by name; links are followed, because caches of hubs consist of them.

    Names of folders that transformers has recorded are left out.
    """
    found = {}
    for path in sorted(folder.iterdir()):
        if not _FILES.fullmatch(path.name) or not path.is_file() or path.stat().st_size > _MOST:
            continue
        if path.name in _CLEANED:
            content = _cleaned(path.read_bytes())
            found[path.name] = TokenizerFile(path, len(content), hashlib.sha256(content).hexdigest(), content)
            continue
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found[path.name] = TokenizerFile(path, path.stat().st_size, digest)
    return found if set(found) - {"config.json"} else {}


def _cleaned(data: bytes) -> bytes:
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError:
        return data
    if not isinstance(fields, dict) or not any(name in fields for name in _PATHS):
        return data
    return orjson.dumps(
        {name: value for name, value in fields.items() if name not in _PATHS}, option=orjson.OPT_INDENT_2
    )
