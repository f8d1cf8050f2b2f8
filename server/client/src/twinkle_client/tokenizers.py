"""`download_tokenizer`: the tokenizer of a served model, on machines that have neither its folder nor a hub."""

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from twinkle_client.errors import ServiceError
from twinkle_client.http import Connection
from twinkle_client.tinker import address_and_key


def download_tokenizer(
    folder: str | os.PathLike[str] | None = None, *, base_url: str | None = None, api_key: str | None = None
) -> Path:
    """Download the files of the served model's tokenizer; files that are there already are kept.

    Args:
        folder: where the files are written. By default a folder of the working directory with the name that the service
            announces for the tokenizer: `get_tokenizer()` of the Tinker SDK finds it there.
        base_url: address of the service; by default `TWINKLE_SERVER_URL` or `TINKER_BASE_URL`.
        api_key: key of the tenant; by default `TWINKLE_SERVER_TOKEN` or `TINKER_API_KEY`.

    Returns:
        The folder, for `AutoTokenizer.from_pretrained(folder)` and `set_template(..., model_id=folder)`.

    Raises:
        NotFound: the served model has no tokenizer.
        ServiceError: the service names or sends files that cannot be those of a tokenizer.
        TwinkleClientError: the service cannot be reached, or refuses the key.
    """
    connection = Connection(*address_and_key(base_url, api_key))
    try:
        listed = connection.run(connection.request("GET", "/tokenizer"))
        target = Path(folder) if folder is not None else default_folder(listed)
        if target.exists():
            _fetch_all(connection, target, listed["files"])
        else:
            _make(connection, target, listed["files"])
    finally:
        connection.close()
    return target


def default_folder(listed: Mapping[str, Any]) -> Path:
    """Return the folder in which the SDK looks for the tokenizer of an answer of `GET /twinkle/tokenizer`."""
    announced = PurePosixPath(listed["tokenizer_id"] or listed["model_name"])
    if announced.is_absolute():  # the operator on the machine of the service sees the model's own folder
        announced = PurePosixPath(announced.name)
    if not announced.parts or ".." in announced.parts:
        raise ServiceError(f"the service announces the tokenizer {str(announced)!r}; pass a folder")
    return Path(announced)


def _make(connection: Connection, target: Path, files: Mapping[str, Any]) -> None:
    """Fetch files into a new folder, which others see only when it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent, ignore_cleanup_errors=True) as name:
        draft = Path(name) / target.name
        draft.mkdir()
        _fetch_all(connection, draft, files)
        try:
            draft.rename(target)
        except OSError:  # another process has made the folder meanwhile
            _fetch_all(connection, target, files)


def _fetch_all(connection: Connection, folder: Path, files: Mapping[str, Any]) -> None:
    for name, entry in files.items():
        _fetch(connection, folder, name, entry)


def _fetch(connection: Connection, folder: Path, name: str, entry: Mapping[str, Any]) -> None:
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        raise ServiceError(f"the service offers the file {name!r}, which is not in the folder of a tokenizer")
    path = folder / name
    if path.is_file() and _sha256(path.read_bytes()) == entry["sha256"]:
        return
    content = connection.run(connection.request("GET", f"/tokenizer/{name}"))
    if not isinstance(content, bytes) or _sha256(content) != entry["sha256"]:
        raise ServiceError(f"the file {name} differs from the digest that the service announced; repeat the call")
    part = path.with_name(f".{name}.part")
    part.write_bytes(content)
    part.replace(path)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
