"""The hub `file://`: a folder on this machine, trusted like other hubs; its commit is the digest of its files."""

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from twinkle.errors import HubError
from twinkle.hub import Hub
from twinkle_hub import code, rows
from twinkle_hub.references import absolute, folder_of
from twinkle_hub.remote import checked_type
from twinkle_registry.regular import kind_of, open_regular, read_regular

_LEFT_OUT = {".git", ".hg", ".svn", ".cache", "__pycache__"}


class FileHub(Hub):
    """The hub for `file:///path/to/folder`."""

    def download_model(self, reference: str) -> Path:
        """Return the folder itself, or the GGUF file."""
        self.check_model(reference)
        return folder_of(reference)

    def check_model(self, reference: str) -> None:
        """Raise `HubError` if the folder does not exist; see `Hub.check_model`."""
        if not (path := folder_of(reference)).exists():
            raise HubError(f"{reference}: there is no {path}")

    def download_file(
        self,
        reference: str,
        allow_patterns: str | Sequence[str] | None = None,
        *,
        repo_type: Any = "model",
        revision: str | None = None,
        token: str | None = None,
    ) -> Path:
        """Return the folder itself; see `Hub.download_file`."""
        checked_type(repo_type)
        _refuse(reference, revision=revision, token=token)
        return _existing(reference, str(folder_of(reference)))

    def load_dataset(
        self,
        reference: str,
        subset_name: str = "default",
        split: str = "train",
        *,
        streaming: bool = False,
        data_files: Any = None,
        data_dir: str | None = None,
    ) -> Any:
        """Return a `datasets.Dataset` of the folder's files; or with `streaming` an iterable one."""
        folder = _existing(reference, str(folder_of(reference)))
        options = {"streaming": streaming or None, "data_files": data_files, "data_dir": data_dir}
        return rows.load(folder, reference, subset_name, split, **options)

    def create_repo(
        self, reference: str, *, repo_type: Any = "model", private: bool = True, token: str | None = None
    ) -> str:
        """Create the folder if it does not exist; it inherits the permissions of its parent folder."""
        checked_type(repo_type)
        _refuse(reference, token=token)
        folder = folder_of(reference)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HubError(f"cannot create {reference}: {error.strerror or error}") from error
        return f"file://{folder}"

    def push(
        self,
        reference: str,
        folder: str | Path,
        *,
        path_in_repo: str = "",
        message: str = "",
        description: str = "",
        repo_type: Any = "model",
        private: bool = True,
        revision: str | None = None,
        ignore_patterns: Sequence[str] = (),
        token: str | None = None,
    ) -> str:
        """Copy the files of a folder; the target has no history, so `message` and `description` are not stored."""
        _refuse(reference, revision=revision)
        address = self.create_repo(reference, repo_type=repo_type, private=private, token=token)
        if path_in_repo:
            code.checked(reference, [(path_in_repo, 0)])
        target = folder_of(reference) / path_in_repo
        try:
            for path in _files(Path(folder), reference):
                if any(fnmatch(path, pattern) for pattern in ignore_patterns):
                    continue
                place = target / path
                place.parent.mkdir(parents=True, exist_ok=True)
                work = place.with_name(f".{place.name}.{os.getpid()}.tmp")
                with open_regular(Path(folder) / path, follow=False) as source, work.open("wb") as copy:
                    shutil.copyfileobj(source, copy)
                work.replace(place)
        except OSError as error:
            raise HubError(f"cannot write to {reference}: {error.strerror or error}") from error
        return address

    def commit_of(self, repo: str, revision: str | None = None, *, token: str | None = None) -> tuple[str, str]:
        """Return the folder's resolved path and the SHA-256 over its files; every edit changes it.

        Raises:
            HubError: there is no such folder, it is not at that commit, it contains links, or it is too large.
        """
        _refuse(f"file://{repo}", token=token)
        folder = _existing(f"file://{repo}", repo).resolve()
        digest = _digest(folder, f"file://{repo}")
        if revision not in (None, "", digest):
            raise HubError(
                f"file://{repo}@{revision}: the folder is at {digest} now, and it has no history; "
                "omit the revision, or use this one"
            )
        return str(folder), digest

    def download_code(self, repo: str, commit: str, target: Path, *, token: str | None = None) -> None:
        """Copy the folder's files after checking that they are those of the commit; see `Hub.download_code`."""
        _refuse(f"file://{repo}", token=token)
        folder, place = _existing(f"file://{repo}", repo), f"file://{repo}"
        paths = code.checked(place, _sized(folder, place))
        code.write(place, target, paths, lambda path: iter([_read(folder / path, place)]))
        if _digest(target, place) != commit:
            shutil.rmtree(target)
            target.mkdir()
            raise HubError(f"{place}: its files have changed since commit {commit}; get its commit again")


def _refuse(reference: str, **given: Any) -> None:
    from twinkle.errors import ArgumentError

    if used := [name for name, value in given.items() if value]:
        raise ArgumentError(f"{reference} is a folder, which does not support {', '.join(used)}; omit it")


def _existing(reference: str, path: str) -> Path:
    folder = absolute(path, reference)
    if not folder.is_dir():
        raise HubError(f"{reference}: there is no folder {folder}")
    return folder


def _files(folder: Path, place: str) -> Iterator[str]:
    """Yield the paths of the files of a folder, sorted; links and special files are refused."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _LEFT_OUT)
        for name in [*folders, *sorted(names)]:
            path = Path(root, name)
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                raise HubError(
                    f"{place}: {path.relative_to(folder)} is a link, which may point outside the "
                    "folder; replace it by a copy of the file"
                )
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise HubError(
                    f"{place}: {path.relative_to(folder)} is {kind_of(mode)}, not a regular file; remove it from the "
                    "folder"
                )
        yield from (Path(root, name).relative_to(folder).as_posix() for name in sorted(names))


def _read(path: Path, place: str) -> bytes:
    """Return the bytes of a file; fail if it is no longer a regular file."""
    try:
        return read_regular(path, follow=False)
    except OSError as error:
        raise HubError(f"{place}: {path.name} cannot be read: {error.strerror}") from error


def _sized(folder: Path, place: str) -> Iterator[tuple[str, int]]:
    for path in _files(folder, place):
        yield path, (folder / path).stat().st_size


def _digest(folder: Path, place: str) -> str:
    paths = code.checked(place, _sized(folder, place))
    lines = [f"{hashlib.sha256(_read(folder / path, place)).hexdigest()}  {path}\n" for path in sorted(paths)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
