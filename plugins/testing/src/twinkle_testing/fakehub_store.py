"""The repositories of a fake hub, with commits, branches and tags, in memory."""

import hashlib
import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

RepoType = Literal["model", "dataset"]

_LARGE = (".safetensors", ".bin", ".gguf", ".parquet", ".pt")
_DEFAULT_NAMES = ("main", "master")  # default branches of the two hubs


@dataclass(frozen=True)
class Commit:
    """One state of a repository.

    Attributes:
        id: 40 hexadecimal digits, a function of the content and of the parent.
        parent: id of the parent commit, or None.
        message: commit message.
        files: content by path.
    """

    id: str
    parent: str | None
    message: str
    files: Mapping[str, bytes]


@dataclass
class Repository:
    """A repository: its commits, and the names that point to them.

    Attributes:
        name: `owner/name`.
        repo_type: `model` or `dataset`.
        private: only tokens may see it.
        commits: by id.
        branches: commit ids by name; the first branch is `main`, with the alias `master`.
        tags: commit ids by name.
    """

    name: str
    repo_type: RepoType = "model"
    private: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(
        self,
        files: Mapping[str, bytes | str],
        message: str = "change",
        branch: str = "main",
        delete: Iterable[str] = (),
    ) -> str:
        """Add a commit on top of a branch and return its id; a new branch begins at the first one's head.

        Args:
            files: content by path; other files are kept.
            message: commit message.
            branch: the branch to commit to.
            delete: paths to delete.
        """
        branch = "main" if branch in _DEFAULT_NAMES else branch
        head = self.branches.get(branch) or self.branches.get("main")
        kept = dict(self.commits[head].files) if head else {}
        kept |= {path: data.encode() if isinstance(data, str) else data for path, data in files.items()}
        for path in delete:
            kept.pop(path, None)
        told = [head, message, {path: hashlib.sha256(data).hexdigest() for path, data in sorted(kept.items())}]
        made = Commit(hashlib.sha1(json.dumps(told).encode()).hexdigest(), head, message, kept)
        self.commits[made.id] = made
        self.branches[branch] = made.id
        return made.id

    def at(self, revision: str | None) -> Commit | None:
        """Return the commit of a branch, tag or id, or None."""
        name = "main" if revision in (None, *_DEFAULT_NAMES) else str(revision)
        return self.commits.get(self.branches.get(name) or self.tags.get(name) or name)


class Store:
    """All repositories of a fake hub, with access rights and redirects of renamed ones."""

    def __init__(self, tokens: Mapping[str, str]) -> None:
        """Begin empty.

        Args:
            tokens: the user's name by token.
        """
        self.tokens = dict(tokens)
        self.repositories: dict[tuple[RepoType, str], Repository] = {}
        self.moved: dict[tuple[RepoType, str], str] = {}
        self.blobs: dict[str, bytes] = {}
        self.tells_commits = True  # ModelScope's list of files sometimes lacks the commit
        self.lock = threading.RLock()

    def create(self, name: str, repo_type: RepoType, private: bool) -> Repository | None:
        """Return a new repository with an empty first commit, or None if the name is taken."""
        with self.lock:
            if (repo_type, name) in self.repositories:
                return None
            made = self.repositories[repo_type, name] = Repository(name, repo_type, private)
            made.commit({}, "begin")
            return made

    def find(self, name: str, repo_type: RepoType) -> Repository | None:
        """Return a repository by its current name."""
        return self.repositories.get((repo_type, name))


def is_large(path: str, data: bytes) -> bool:
    """Return whether a hub would keep this file outside git."""
    return bool(data) and path.endswith(_LARGE)


def blob_id(data: bytes) -> str:
    """Return git's id of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sha256(data: bytes) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    return hashlib.sha256(data).hexdigest()
