"""Downloads of checkpoint files by signed links that expire, for clients without a key.

Files are streamed one by one, or all together as an uncompressed tar, in constant memory.
"""

import asyncio
import os
import re
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from itsdangerous import BadData, URLSafeSerializer

from twinkle_server.engine.files import Damaged, Manifest, open_file, read_manifest
from twinkle_server.errors import NotFound
from twinkle_server.openapi import BINARY, returns

_PIECE = 2**20
_BLOCK = tarfile.BLOCKSIZE


def open_listed(folder: Path, name: str) -> tuple[BufferedReader, int]:
    """Open a file that is listed in the folder's manifest.

    Args:
        folder: a published folder.
        name: of the file.

    Returns:
        The file, and its size in bytes.

    Raises:
        LookupError: the manifest does not list the file, or the folder does not exist.
    """
    try:
        entry = read_manifest(folder).files.get(name)
    except Damaged as error:
        raise LookupError(name) from error
    if entry is None:
        raise LookupError(name)
    return _open(folder, name, entry.size), entry.size


def archive_size(manifest: Manifest) -> int:
    """Return the size of the tar of a folder in bytes."""
    return 2 * _BLOCK + sum(
        len(_head(name, entry.size)) + _padded(entry.size) for name, entry in manifest.files.items()
    )


def archive(folder: Path, manifest: Manifest) -> Iterator[bytes]:
    """Yield the tar of a folder's listed files, in pieces.

    Raises:
        LookupError: a file no longer exists; the tar is incomplete.
    """
    for name, entry in manifest.files.items():
        with _open(folder, name, entry.size) as file:
            yield _head(name, entry.size)
            yield from pieces(file)
            if rest := _padded(entry.size) - entry.size:
                yield bytes(rest)
    yield bytes(2 * _BLOCK)


async def stream(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Iterate over an iterator that reads from disk on a thread, without blocking the event loop."""
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


def pieces(file: BufferedReader, left: int | None = None) -> Iterator[bytes]:
    """Yield the content of an open file from its position, at most `left` bytes, and close it."""
    with file:
        while piece := file.read(_PIECE if left is None else min(_PIECE, left)):
            yield piece
            left = None if left is None else left - len(piece)


def _open(folder: Path, name: str, size: int) -> BufferedReader:
    """Open a file, and check that it has its published size."""
    try:
        file = open_file(folder, name)
    except OSError as error:
        raise LookupError(name) from error
    if os.fstat(file.fileno()).st_size != size:
        file.close()
        raise LookupError(f"the size of {name} differs from the published size")
    return file


def _head(name: str, size: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o644
    return entry.tobuf(tarfile.PAX_FORMAT)


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


SECONDS = 3600.0
_ARCHIVE = "archive.tar"
_LONGEST = 1024
_TAR = "application/x-tar"
_FILES = {
    "parameters": [{"name": "Range", "in": "header", "required": False, "schema": {"type": "string"}}],
    "responses": {
        **returns(BINARY, _TAR, json=False)["responses"],
        **returns(BINARY, status=206, description="The part of the file in the header Range")["responses"],
        **returns(status=416, description="The range is outside the file")["responses"],
    },
}


@dataclass(frozen=True, slots=True)
class Grant:
    """The content of a link.

    Attributes:
        folder: of the checkpoint, relative to the data folder.
        whole: whether the link is for a tar of all files, not for single files.
        expires: UTC seconds.
    """

    folder: str
    whole: bool
    expires: float


class Links:
    """Creates and verifies signed links.

    Args:
        data: the data folder.
        secret: of the data folder.
        seconds: lifetime of a link.
    """

    def __init__(self, data: Path, secret: bytes, seconds: float = SECONDS) -> None:
        self.data = data
        self._seconds = seconds
        self._signer = URLSafeSerializer(secret, salt="twinkle.download")

    def files(self, base_url: str, folder: str) -> tuple[dict[str, str], float]:
        """Return a link to each file of a checkpoint by name, and their expiry in UTC seconds; reads the manifest.

        Args:
            base_url: of the service, as seen by the client.
            folder: of the checkpoint, relative to the data folder.

        Raises:
            NotFound: the folder no longer exists.
        """
        try:
            names = list(read_manifest(self.data / folder).files)
        except Damaged as error:
            raise NotFound("the files of the checkpoint no longer exist") from error
        token, expires = self._token(folder, whole=False)
        return {name: f"{base_url.rstrip('/')}/download/{token}/{name}" for name in names}, expires

    def archive(self, base_url: str, folder: str) -> tuple[str, float]:
        """Return a link to a tar of a checkpoint, and its expiry in UTC seconds.

        Args:
            base_url: of the service, as seen by the client.
            folder: of the checkpoint, relative to the data folder.
        """
        token, expires = self._token(folder, whole=True)
        return f"{base_url.rstrip('/')}/download/{token}/{_ARCHIVE}", expires

    def read(self, token: str) -> Grant:
        """Verify a link and return its content.

        Raises:
            NotFound: it was not created by this service, was modified, or has expired.
        """
        try:
            fields: Any = self._signer.loads(token) if len(token) <= _LONGEST else None
            grant = Grant(str(fields["f"]), bool(fields["w"]), float(fields["e"]))
        except (BadData, TypeError, KeyError, ValueError) as error:
            raise NotFound("the download link is not valid for this service") from error
        if grant.expires < time.time():
            raise NotFound("the download link has expired; request a new one")
        return grant

    def _token(self, folder: str, whole: bool) -> tuple[str, float]:
        expires = float(round(time.time() + self._seconds))
        token = self._signer.dumps({"f": folder, "w": whole, "e": expires})
        return token if isinstance(token, str) else token.decode(), expires


def download_routes(links: Links) -> APIRouter:
    """Return the route of the links."""
    router = APIRouter()

    @router.get("/download/{token}/{file}", openapi_extra=_FILES)
    async def download(request: Request, token: str, file: str) -> Response:
        """Stream a file of a checkpoint, or all of them as a tar; `Range` resumes the download of a file."""
        grant = links.read(token)
        part = request.headers.get("range"), request.headers.get("if-range")
        try:
            return await asyncio.to_thread(_response, links.data / grant.folder, grant, file, *part)
        except (LookupError, Damaged) as error:
            raise NotFound("the checkpoint does not contain this file or no longer exists") from error

    return router


def _response(folder: Path, grant: Grant, name: str, wanted: str | None, condition: str | None) -> Response:
    if grant.whole:
        if name != _ARCHIVE:
            raise LookupError(name)
        manifest = read_manifest(folder)
        return streamed(stream(archive(folder, manifest)), archive_size(manifest), _TAR)
    file, size = open_listed(folder, name)
    tag = f'"{read_manifest(folder).files[name].sha256}"'
    headers = {"Accept-Ranges": "bytes", "ETag": tag}
    try:
        part = byte_range(wanted, size) if condition in (None, tag) else None
    except IndexError:
        file.close()
        return Response(None, 416, {**headers, "Content-Range": f"bytes */{size}"})
    first, last = part or (0, size - 1)
    file.seek(first)
    response = streamed(stream(pieces(file, last + 1 - first)), last + 1 - first, BINARY)
    response.headers.update(headers)
    if part is not None:
        response.status_code = 206
        response.headers["Content-Range"] = f"bytes {first}-{last}/{size}"
    return response


def byte_range(text: str | None, size: int) -> tuple[int, int] | None:
    """Return the first and last byte of a `Range` header; None sends the whole file.

    Only a single range is supported; others are ignored, as the standard allows.

    Raises:
        IndexError: the range is outside the file.
    """
    match = re.fullmatch(r"bytes=(\d{0,19})-(\d{0,19})", text or "")
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        first, last = max(0, size - int(match[2])), size - 1
    else:
        first, last = int(match[1]), min(int(match[2] or size - 1), size - 1)
    if first >= size or (match[2] == "0" and not match[1]):
        raise IndexError(text)
    return (first, last) if first <= last else None


def streamed(pieces: Any, size: int, media_type: str) -> Response:
    """Return a response with an iterator of `size` bytes as its body, which no cache keeps."""
    headers = {"Content-Length": str(size), "Cache-Control": "private, no-store", "X-Content-Type-Options": "nosniff"}
    return StreamingResponse(pieces, media_type=media_type, headers=headers)
