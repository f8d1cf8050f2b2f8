"""Signed links to a checkpoint's files, for clients that fetch without a key; each ends by itself."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response, StreamingResponse
from itsdangerous import BadData, URLSafeSerializer

from twinkle_server.checkpoints.archive import archive, archive_size, open_listed, pieces_of, stream
from twinkle_server.engine.files import Damaged, read_manifest
from twinkle_server.errors import NotFound

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
