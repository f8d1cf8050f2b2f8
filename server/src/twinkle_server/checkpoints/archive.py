"""Files of a checkpoint as streams: one by one, or all as an uncompressed tar; memory does not grow with their size."""

import asyncio
import os
import tarfile
from collections.abc import AsyncIterator, Iterator
from io import BufferedReader
from pathlib import Path

from twinkle_server.engine.files import Damaged, Manifest, open_file, read_manifest

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
