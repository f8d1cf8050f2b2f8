"""A cheap fingerprint of a model folder, which detects that the base model of a run was replaced.

It covers the configuration, and the name, size, header and some blocks of each weight file; a change of a few bytes
between these blocks is not detected. The cost is some milliseconds per file, also for a folder of 100 GB.
"""

import hashlib
import os
import re
from io import FileIO
from pathlib import Path
from typing import Final

from twinkle.errors import ModelLoadError
from twinkle_registry.regular import open_regular

_ENDINGS: Final = (".safetensors", ".bin", ".gguf")
_BLOCK: Final = 4096
_BLOCKS: Final = 64
_WHOLE: Final = 4 * 2**20
"""Files up to this size are read completely."""
_HEADER: Final = 16 * 2**20
_SNAPSHOT: Final = re.compile(r"[0-9a-f]{40}")


def fingerprint(folder: str | Path) -> str:
    """Return the fingerprint of a model folder: 32 hexadecimal digits that do not depend on the folder's path.

    Args:
        folder: a folder with `config.json` and weight files directly in it.

    Raises:
        ModelLoadError: one of these files cannot be read, or is not a regular file.
    """
    folder = Path(folder)
    total = hashlib.sha256(b"twinkle model 1\0")
    for path in sorted(folder.iterdir()):
        if path.name != "config.json" and path.suffix not in _ENDINGS:
            continue
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                total.update(f"{path.name}\0{size}\0".encode())
                total.update(_sampled(file, size))
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}; fetch the model again") from error
    return total.hexdigest()[:32]


def commit_of(folder: str | Path) -> str:
    """Return the commit of a hub's cache folder (`snapshots/<commit>`); "" for other folders."""
    path = Path(folder)
    return path.name if path.parent.name == "snapshots" and _SNAPSHOT.fullmatch(path.name) else ""


def _sampled(file: FileIO, size: int) -> bytes:
    """Return the SHA-256 of a small file, or of the header and some blocks of a large one."""
    digest = hashlib.sha256()
    if size <= _WHOLE:
        spans = [(0, size)]
    else:
        header = 8 + int.from_bytes(file.read(8), "little")
        step = (size - _BLOCK) / (_BLOCKS - 1)
        spans = [(0, min(header, _HEADER)), *((int(index * step), _BLOCK) for index in range(_BLOCKS))]
    for begin, length in spans:
        file.seek(begin)
        digest.update(file.read(length))
    return digest.digest()
