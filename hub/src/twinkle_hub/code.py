"""Code on its way from a hub to an empty folder: paths that stay inside, and an end to what may be written."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

from twinkle.errors import HubError

MAX_FILES = 2_000
MAX_BYTES = 64 * 2**20


def checked(place: str, listed: Iterable[tuple[str, int]]) -> list[str]:
    """Return the paths of a listing, or raise before anything is fetched.

    Args:
        place: the repository, for messages.
        listed: path and size in bytes of each file, as the hub tells them.

    Raises:
        HubError: a path leads outside the repository or stands there twice, or there are too many files or bytes.
    """
    paths: list[str] = []
    total = 0
    for path, size in listed:
        if not _stays_inside(path):
            raise HubError(f"{place}: the hub lists {path[:200]!r}, a path outside the repository; nothing was fetched")
        paths.append(path)
        total += max(size, 0)
        if len(paths) > MAX_FILES or total > MAX_BYTES:
            raise HubError(f"{place}: {_TOO_MUCH}; nothing was fetched")
    if len({path.casefold() for path in paths}) < len(paths):
        raise HubError(f"{place}: the hub lists two files of one name; nothing was fetched")
    return paths


def write(place: str, target: Path, paths: Iterable[str], read: Callable[[str], Iterator[bytes]]) -> None:
    """Write files below `target`, which is empty again if anything goes wrong.

    Args:
        place: the repository, for messages.
        target: an empty folder.
        paths: what `checked` returned.
        read: gives the content of a path, piece by piece.

    Raises:
        HubError: there is more than was listed, or `target` is not empty.
    """
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise HubError(f"{place}: code is written into an empty folder, and {target} is not empty")
    left = MAX_BYTES
    try:
        for path in paths:
            place_of_file = target / path
            place_of_file.parent.mkdir(parents=True, exist_ok=True)
            with place_of_file.open("xb") as file:
                for piece in read(path):
                    left -= len(piece)
                    if left < 0:
                        raise HubError(f"{place}: {_TOO_MUCH}; what had come was removed")
                    file.write(piece)
    except BaseException:
        _empty(target)
        raise


def check_plain(place: str, encoding: str | None) -> None:
    """Refuse a packed answer, which was not asked for: unpacked it could have any size, packed it is another file.

    Raises:
        HubError: the header `Content-Encoding` names a packing.
    """
    if (encoding or "identity").lower() != "identity":
        raise HubError(f"{place}: the hub sent a file packed ({encoding!r}) that was asked for as it is; call again")


_TOO_MUCH = (
    f"more than {MAX_FILES:,} files or {MAX_BYTES // 2**20} MiB; a plugin is code, weights and data belong into a "
    "repository of their own"
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
