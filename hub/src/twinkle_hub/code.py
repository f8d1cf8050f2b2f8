"""Writes code downloaded from a hub into an empty folder, with checks of paths, of sizes and of the encoding."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

from twinkle.errors import HubError

MAX_FILES = 2_000
MAX_BYTES = 64 * 2**20


def checked(place: str, listed: Iterable[tuple[str, int]]) -> list[str]:
    """Return the paths of a listing; raise before any download if it is invalid.

    Args:
        place: the repository, for messages.
        listed: path and size in bytes of each file, as reported by the hub.

    Raises:
        HubError: a path leads outside the repository or occurs twice, or there are too many files or bytes.
    """
    paths: list[str] = []
    total = 0
    for path, size in listed:
        if not _stays_inside(path):
            raise HubError(
                f"{place}: the hub lists {path[:200]!r}, a path outside the repository; nothing was downloaded"
            )
        paths.append(path)
        total += max(size, 0)
        if len(paths) > MAX_FILES or total > MAX_BYTES:
            raise HubError(f"{place}: {_TOO_MUCH}; nothing was downloaded")
    if len({path.casefold() for path in paths}) < len(paths):
        raise HubError(f"{place}: the hub lists two files with the same name; nothing was downloaded")
    return paths


def write(place: str, target: Path, paths: Iterable[str], read: Callable[[str], Iterator[bytes]]) -> None:
    """Write files below `target`; after an error, `target` is empty again.

    Args:
        place: the repository, for messages.
        target: an empty folder.
        paths: result of `checked`.
        read: yields the content of a path in chunks.

    Raises:
        HubError: the files exceed the size limit, or `target` is not empty.
    """
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise HubError(f"{place}: code must be written into an empty folder, but {target} is not empty")
    remaining = MAX_BYTES
    try:
        for path in paths:
            place_of_file = target / path
            place_of_file.parent.mkdir(parents=True, exist_ok=True)
            with place_of_file.open("xb") as file:
                for chunk in read(path):
                    remaining -= len(chunk)
                    if remaining < 0:
                        raise HubError(f"{place}: {_TOO_MUCH}; the partial download was removed")
                    file.write(chunk)
    except BaseException:
        _empty(target)
        raise


def check_plain(place: str, encoding: str | None) -> None:
    """Refuse a compressed response, which was not requested: decompressed, it could have any size.

    Raises:
        HubError: the header `Content-Encoding` names a compression.
    """
    if (encoding or "identity").lower() != "identity":
        raise HubError(f"{place}: the hub sent a compressed file ({encoding!r}), which was not requested; call again")


_TOO_MUCH = (
    f"more than {MAX_FILES:,} files or {MAX_BYTES // 2**20} MiB; a plugin must be code only; put weights and data "
    "into another repository"
)


def _stays_inside(path: str) -> bool:
    windows = PureWindowsPath(path)
    parts = path.split("/")
    return (
        path.isprintable()
        and "\\" not in path
        and not PurePosixPath(path).is_absolute()
        and not windows.drive
        and not windows.is_absolute()
        and not any(part in ("", ".", "..") for part in parts)
        and ".git" not in parts
    )


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
