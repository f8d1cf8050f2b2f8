"""SHA-256 digests of the files in a folder: written to `digests.json`, and compared before the files are used."""

import hashlib
import json
import stat
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from twinkle.errors import CheckpointError
from twinkle.logging import get_logger
from twinkle_registry.regular import open_regular

FILE: Final = "digests.json"
_FORMAT: Final = 1
_THREADS: Final = 4
_LARGEST: Final = 2**20
_reported: set[Path] = set()


def write_digests(folder: Path) -> None:
    """Write `digests.json` for the regular files directly in a folder.

    Args:
        folder: a folder that no other process reads yet, such as that of `twinkle.paths.new_directory`.
    """
    names = sorted(path.name for path in folder.iterdir() if stat.S_ISREG(path.lstat().st_mode) and path.name != FILE)
    with ThreadPoolExecutor(_THREADS) as threads:
        digests = list(threads.map(lambda name: _digest(folder / name), names))
    files = {
        name: {"sha256": digest, "size": (folder / name).stat().st_size}
        for name, digest in zip(names, digests, strict=True)
    }
    (folder / FILE).write_text(json.dumps({"format": _FORMAT, "files": files}, indent=2) + "\n", "utf-8")


def check_digests(folder: Path, names: Collection[str] | None = None) -> None:
    """Compare files of a folder with the digests that were written with them.

    A folder without `digests.json` (from an older version, or another tool) is accepted, with one line in the log.

    Args:
        folder: folder of the files.
        names: names of the files that will be used; None means all. Files without a digest are not compared.

    Raises:
        CheckpointError: a file is missing or was changed since it was saved, or `digests.json` cannot be read.
    """
    if not folder.is_dir():
        return
    expected = _read(folder)
    if expected is None:
        if folder not in _reported:
            _reported.add(folder)
            get_logger().info("%s has no %s, so its files are used without a check", folder, FILE)
        return
    chosen = sorted(expected if names is None else expected.keys() & set(names))
    with ThreadPoolExecutor(_THREADS) as threads:
        digests = list(threads.map(lambda name: _digest(folder / name), chosen))
    for name, digest in zip(chosen, digests, strict=True):
        if digest is None:
            raise CheckpointError(
                f"{folder / name} is missing, or is not a regular file; the checkpoint is incomplete: restore the file "
                "from a backup, or use an earlier checkpoint"
            )
        if digest != expected[name]:
            raise CheckpointError(
                f"{folder / name} was changed since it was saved: its SHA-256 is {digest}, {FILE} says "
                f"{expected[name]}; restore the file from a backup or use an earlier checkpoint, or, if you changed it "
                f"on purpose, remove {folder / FILE}"
            )


def _read(folder: Path) -> dict[str, str] | None:
    """Return the digests that a folder lists; None if it has no `digests.json`."""
    path = folder / FILE
    try:
        with open_regular(path) as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST} bytes")
        said = json.loads(content)
        if said["format"] != _FORMAT:
            raise ValueError(f"format must be {_FORMAT}, got {said['format']!r}")
        files = {str(name): str(entry["sha256"]) for name, entry in said["files"].items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); restore it from a backup, or remove it to use the files without a check"
        ) from error
    if odd := [name for name in files if name != Path(name).name]:
        raise CheckpointError(f"{path} must list files of its own folder, got {odd[0]!r}")
    return files


def _digest(path: Path) -> str | None:
    """Return the SHA-256 of a regular file; None if the file does not exist."""
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
