"""One tree of code in the store: its files are read through here, and each is hashed as it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..errors import NotTrusted
from ..regular import read_regular
from .listing import DIGEST_IN_NAMES, digest_of, sha256, shown


@dataclass(frozen=True)
class Tree:
    """The files of one version of one repository.

    Attributes:
        folder: Where they lie.
        files: Each path, relative and with `/`, with the SHA-256 it must have. What is not listed does not exist.
    """

    folder: Path
    files: Mapping[str, str]

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the listing, which names the tree."""
        return digest_of(self.files)

    @cached_property
    def folders(self) -> frozenset[str]:
        """Every folder that holds a file, at any depth; the tree itself is the empty path."""
        return frozenset(str(parent) for path in self.files for parent in _parents(path))

    def read(self, path: str) -> bytes:
        """Return the bytes of a listed file.

        Raises:
            NotTrusted: They are gone or are not those that were added.
            FileNotFoundError: The file is not listed.
        """
        if path not in self.files:
            raise FileNotFoundError(f"{shown(path)} is not among the files of {self.folder}")
        try:
            content = read_regular(self.folder / path)
        except OSError as error:
            raise NotTrusted(
                f"{self.folder / path} was there when it was added, and cannot be read now ({error.strerror}); {RENEW}"
            ) from error
        if sha256(content) != self.files[path]:
            raise NotTrusted(
                f"{self.folder / path} is not the file that was added: its SHA-256 is {sha256(content)[:16]}..., "
                f"and {self.files[path][:16]}... was added. Nothing of it is run; {RENEW}"
            )
        return content

    def verify(self) -> None:
        """Read every file; the first that is not what was added raises `NotTrusted`."""
        for path in self.files:
            self.read(path)

    def module_name(self, repository: str) -> str:
        """Return what the tree is imported as: the name of its repository and the digest."""
        stem = repository.rstrip("/").rpartition("/")[2].lower()
        word = "".join(c if c.isascii() and c.isalnum() else "_" for c in stem).strip("_") or "code"
        return f"{__package__}.{word}_{self.digest[:DIGEST_IN_NAMES]}"


RENEW = "fetch it again with: twinkle plugins verify --fetch"


def _parents(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[:count]) for count in range(len(parts) + 1)]
