"""The layout of a backup folder: one folder per generation, each a complete data folder with a list of its files.

A generation is written into a temporary folder and renamed when it is complete and on disk.
"""

import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import orjson

from twinkle_server.engine.files import sync_directory
from twinkle_server.errors import StoreError
from twinkle_server.failpoints import reach

LISTING: Final = "backup.json"
PARTIAL: Final = ".tmp-partial"
_NAME: Final = re.compile(r"\d{8}T\d{6}Z(-\d+)?")
"""The unfinished generation; the next backup continues it."""
FORMAT: Final = 1
_REMOVED: Final = ".tmp-removed-"
_PIECE: Final = 2**20


@dataclass(frozen=True, slots=True)
class Listing:
    """What a generation contains.

    Attributes:
        created: UTC seconds of the state that it holds.
        schema: version of the database.
        instance: random id of the data folder.
        files: SHA-256 and size by path.
        damaged: problems of the data folder that the backup has found; changed files are included as they are.
        format: version of this list.
    """

    created: float
    schema: str
    instance: str
    files: Mapping[str, tuple[str, int]]
    damaged: tuple[str, ...] = ()
    format: int = field(default=FORMAT)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size in self.files.values())

    def write(self, folder: Path) -> None:
        """Write the list into a generation."""
        with (folder / LISTING).open("wb") as file:
            file.write(orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))
            file.flush()
            os.fsync(file.fileno())
        sync_directory(folder)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the list of a generation.

        Raises:
            StoreError: there is none, or it is not one.
        """
        try:
            fields: dict[str, Any] = orjson.loads((folder / LISTING).read_bytes())
            files = {str(name): (str(entry[0]), int(entry[1])) for name, entry in fields.pop("files").items()}
            found = cls(**{**fields, "files": files, "damaged": tuple(fields.get("damaged", ()))})
        except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
            raise StoreError(
                f"{folder} is not a complete backup: {LISTING} cannot be read; "
                "give the folder of `twinkle server backup --to`, or one of its generations"
            ) from error
        if found.format != FORMAT:
            raise StoreError(f"{folder} has the backup format {found.format}, but this program reads {FORMAT}")
        for name in found.files:
            if name.startswith("/") or ".." in Path(name).parts:
                raise StoreError(f"{folder}/{LISTING} names the file {name!r}, which is outside the backup")
        return found


def generations(folder: Path) -> list[Path]:
    """Return the complete generations of a backup folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if not path.name.startswith(".") and (path / LISTING).is_file())


def newest(folder: Path) -> Path:
    """Return a generation itself, or the newest one of a backup folder.

    Raises:
        StoreError: there is none.
    """
    if (folder / LISTING).is_file():
        return folder
    if found := generations(folder):
        return found[-1]
    raise StoreError(f"{folder} contains no complete backup; make one with `twinkle server backup`")


def name_of(folder: Path, now: float) -> Path:
    """Return an unused name for a generation, which sorts behind the others: their order is their age.

    Args:
        folder: with the generations.
        now: UTC seconds. If the newest generation is of a later time, because the clock was set, its time counts.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    last = max((path.name for path in folder.iterdir() if _NAME.fullmatch(path.name)), default="")
    stamp = max(stamp, last.partition("-")[0])
    names = [stamp, *(f"{stamp}-{number:03}" for number in range(2, 1000))]
    return folder / next(name for name in names if name > last and not (folder / name).exists())


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create a backup folder if needed, and lock it against other backups.

    Raises:
        StoreError: another backup is running, or the folder contains other data.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot create {folder}: {error.strerror}; choose another folder for --to") from error
    if foreign := [path.name for path in folder.iterdir() if path.name[0] != "." and path not in generations(folder)]:
        raise StoreError(f"{folder} contains other data ({foreign[0]!r}); choose an empty folder for --to")
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(f"another backup to {folder} is running; wait for it to end") from error
        yield
    finally:
        os.close(handle)


def remove(generation: Path) -> None:
    """Remove a generation; after a crash in the middle, it is not taken for a complete one."""
    aside = generation.with_name(_REMOVED + generation.name)
    generation.rename(aside)  # atomic, and what is left of a crash is removed by `tidy`
    reach("backup.before_remove")
    shutil.rmtree(aside, ignore_errors=True)


def tidy(folder: Path) -> None:
    """Finish removals that a crash interrupted."""
    for left in folder.glob(f"{_REMOVED}*"):
        shutil.rmtree(left, ignore_errors=True)


def copy(source: Path, target: Path) -> tuple[str, int]:
    """Copy a file to disk, and return the SHA-256 and the size of what was copied."""
    digest, size = hashlib.sha256(), 0
    temporary = target.with_name(f".tmp-{target.name}")
    with source.open("rb") as reader, temporary.open("wb") as writer:
        while piece := reader.read(_PIECE):
            digest.update(piece)
            size += len(piece)
            writer.write(piece)
        writer.flush()
        os.fsync(writer.fileno())
    temporary.chmod(0o600)
    temporary.rename(target)  # within a generation that is not complete
    return digest.hexdigest(), size


def digest_of(path: Path) -> tuple[str, int]:
    """Return the SHA-256 and the size of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size


def link_or_copy(source: Path, target: Path) -> None:
    """Place a file that never changes at a second path.

    Raises:
        FileNotFoundError: the source does not exist.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        copy(source, target)
