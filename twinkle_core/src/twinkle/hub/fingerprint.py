"""A cheap fingerprint of a model folder, by which a base model that was replaced is noticed before it is trained on.

It covers the configuration, and of each weight file the name, the size, the header and blocks spread over it; a change
of a few bytes between the blocks is not noticed. A folder of 100 GB takes some milliseconds per file.
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
"""Files up to this size are read whole."""
_HEADER: Final = 16 * 2**20
_SNAPSHOT: Final = re.compile(r"[0-9a-f]{40}")


def fingerprint(folder: str | Path) -> str:
    """Return the fingerprint of a model folder: 32 hexadecimal digits, the same wherever a copy of the folder is.

    Args:
        folder: with `config.json` and weight files directly in it.

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
    """Return the commit that a hub's cache folder is of (`snapshots/<commit>`); "" for other folders."""
    path = Path(folder)
    return path.name if path.parent.name == "snapshots" and _SNAPSHOT.fullmatch(path.name) else ""


def _sampled(file: FileIO, size: int) -> bytes:
    """Return the SHA-256 of a small file, or of a large one's header and of blocks that are spread over it."""
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
