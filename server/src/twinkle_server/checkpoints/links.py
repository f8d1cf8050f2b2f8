"""Downloads of a checkpoint's files: signed links for clients that fetch without a key, each of which ends by itself.

Files are streams, one by one, or all as an uncompressed tar; memory does not grow with their size.
"""

import asyncio
import os
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response, StreamingResponse
from itsdangerous import BadData, URLSafeSerializer

from twinkle_server.engine.files import Damaged, Manifest, open_file, read_manifest
from twinkle_server.errors import NotFound

_PIECE = 2**20
_BLOCK = tarfile.BLOCKSIZE


def open_listed(folder: Path, name: str) -> tuple[BufferedReader, int]:
    """Open a file that the folder's manifest lists.

    Args:
        folder: a published one.
        name: of the file.

    Returns:
        The file, and its bytes.

    Raises:
        LookupError: the manifest does not list it, or there is no such folder.
    """
    try:
        entry = read_manifest(folder).files.get(name)
    except Damaged as error:
        raise LookupError(name) from error
    if entry is None:
        raise LookupError(name)
    return _open(folder, name, entry.size), entry.size


def archive_size(manifest: Manifest) -> int:
    """Return the bytes of the tar of a folder."""
    return 2 * _BLOCK + sum(
        len(_head(name, entry.size)) + _padded(entry.size) for name, entry in manifest.files.items()
    )


def archive(folder: Path, manifest: Manifest) -> Iterator[bytes]:
    """Yield the tar of a folder's listed files, in pieces.

    Raises:
        LookupError: a file is not there any more; what was yielded is no whole tar.
    """
    for name, entry in manifest.files.items():
        with _open(folder, name, entry.size) as file:
            yield _head(name, entry.size)
            yield from _pieces(file)
            if rest := _padded(entry.size) - entry.size:
                yield bytes(rest)
    yield bytes(2 * _BLOCK)


async def stream(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield what an iterator that reads from a disk gives, without holding up the loop."""
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


def pieces_of(folder: Path, name: str) -> Iterator[bytes]:
    """Yield a listed file's bytes; it is opened with the first piece and closed after the last.

    Raises:
        LookupError: it is not there any more.
    """
    file, _ = open_listed(folder, name)
    with file:
        yield from _pieces(file)


def _open(folder: Path, name: str, size: int) -> BufferedReader:
    """Open a file that has the size that was published."""
    try:
        file = open_file(folder, name)
    except OSError as error:
        raise LookupError(name) from error
    if os.fstat(file.fileno()).st_size != size:
        file.close()
        raise LookupError(f"the size of {name} differs from the published size")
    return file


def _pieces(file: BufferedReader) -> Iterator[bytes]:
    while piece := file.read(_PIECE):
        yield piece


def _head(name: str, size: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o644
    return entry.tobuf(tarfile.PAX_FORMAT)


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


SECONDS = 3600.0
_ARCHIVE = "archive.tar"
_LONGEST = 1024


@dataclass(frozen=True, slots=True)
class Grant:
    """What a link allows.

    Attributes:
        folder: of the checkpoint, relative to the data directory.
        whole: all of it as a tar; else single files.
        expires: when that ends, in UTC seconds.
    """

    folder: str
    whole: bool
    expires: float


class Links:
    """Makes and reads links.

    Args:
        data: the data directory.
        secret: of it.
        seconds: that a link lives.
    """

    def __init__(self, data: Path, secret: bytes, seconds: float = SECONDS) -> None:
        self.data = data
        self._seconds = seconds
        self._signer = URLSafeSerializer(secret, salt="twinkle.download")

    def files(self, base_url: str, folder: str) -> tuple[dict[str, str], float]:
        """Return a link to each file of a checkpoint, by name, and when they end (UTC seconds). Reads a file.

        Args:
            base_url: of the service, as the client sees it.
            folder: of the checkpoint, relative to the data directory.

        Raises:
            NotFound: the folder is not there any more.
        """
        try:
            names = list(read_manifest(self.data / folder).files)
        except Damaged as error:
            raise NotFound("the files of the checkpoint no longer exist") from error
        token, expires = self._token(folder, whole=False)
        return {name: f"{base_url.rstrip('/')}/download/{token}/{name}" for name in names}, expires

    def archive(self, base_url: str, folder: str) -> tuple[str, float]:
        """Return a link to a checkpoint as one tar, and when it ends (UTC seconds).

        Args:
            base_url: of the service, as the client sees it.
            folder: of the checkpoint, relative to the data directory.
        """
        token, expires = self._token(folder, whole=True)
        return f"{base_url.rstrip('/')}/download/{token}/{_ARCHIVE}", expires

    def read(self, token: str) -> Grant:
        """Return what a link allows.

        Raises:
            NotFound: it is none of this service, was changed, or is over.
        """
        try:
            said: Any = self._signer.loads(token) if len(token) <= _LONGEST else None
            grant = Grant(str(said["f"]), bool(said["w"]), float(said["e"]))
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
    """Return the route that links lead to."""
    router = APIRouter()

    @router.get("/download/{token}/{file}", include_in_schema=True)
    async def download(token: str, file: str) -> Response:
        """Stream a file of a checkpoint, or all of them as a tar."""
        grant = links.read(token)
        try:
            return await asyncio.to_thread(_answer, links.data / grant.folder, grant, file)
        except (LookupError, Damaged) as error:
            raise NotFound("the checkpoint does not contain this file or no longer exists") from error

    return router


def _answer(folder: Path, grant: Grant, name: str) -> Response:
    if not grant.whole:
        file, size = open_listed(folder, name)
        file.close()
        return _streamed(stream(pieces_of(folder, name)), size, "application/octet-stream")
    if name != _ARCHIVE:
        raise LookupError(name)
    manifest = read_manifest(folder)
    return _streamed(stream(archive(folder, manifest)), archive_size(manifest), "application/x-tar")


def _streamed(pieces: Any, size: int, media_type: str) -> Response:
    headers = {"Content-Length": str(size), "Cache-Control": "private, no-store", "X-Content-Type-Options": "nosniff"}
    return StreamingResponse(pieces, media_type=media_type, headers=headers)
