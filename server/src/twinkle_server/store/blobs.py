"""Files of large payloads and results, which are durable before a row names them.

A file name is the SHA-256 of the content and random digits, so that each file belongs to one row.
"""

import asyncio
import contextlib
import hashlib
import os
import re
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from twinkle_server.errors import Unavailable
from twinkle_server.failpoints import reach
from twinkle_server.store.filesystem import sync_folder

_NAME: Final = re.compile(r"[0-9a-f]{64}-[0-9a-f]{16}")


class Blobs:
    """A folder of such files."""

    def __init__(self, folder: Path, threads: int = 2) -> None:
        """Use a folder.

        Args:
            folder: an existing folder.
            threads: number of threads for reading and writing.
        """
        self.folder = folder
        self._threads = ThreadPoolExecutor(threads, f"twinkle-{folder.name}")

    async def put(self, data: bytes) -> str:
        """Write a file, and return its name.

        Raises:
            Unavailable: the disk is full or fails; no file is left.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._put, data)

    async def get(self, name: str) -> bytes:
        """Return the content of a file.

        Raises:
            LookupError: the file is missing or was changed.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._get, name)

    async def drop(self, names: list[str]) -> None:
        """Remove files that no row names any more; missing files are ignored."""
        if names:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._drop, names)

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown()

    def _put(self, data: bytes) -> str:
        name = f"{hashlib.sha256(data).hexdigest()}-{secrets.token_hex(8)}"
        temporary = self.folder / f".tmp-{secrets.token_hex(8)}"
        try:
            self._write(temporary, data)
            reach("blob.before_rename")
            temporary.rename(self.folder / name)
            reach("blob.after_rename")
            sync_folder(self.folder)
        except OSError as error:
            for left in (temporary, self.folder / name):
                with contextlib.suppress(OSError):
                    left.unlink(missing_ok=True)
            raise Unavailable("the store cannot write at the moment (disk full or failing): try again", 5.0) from error
        return name

    @staticmethod
    def _write(path: Path, data: bytes) -> None:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb", buffering=0) as file:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())

    def _get(self, name: str) -> bytes:
        try:
            data = self._path(name).read_bytes()
        except OSError as error:
            raise LookupError(f"cannot read file {name} of {self.folder.name}") from error
        if hashlib.sha256(data).hexdigest() != name[:64]:
            raise LookupError(f"file {name} of {self.folder.name} does not match its checksum")
        return data

    def _drop(self, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise LookupError(f"{name[:100]!r} is not a valid file name in {self.folder.name}")
        return self.folder / name
