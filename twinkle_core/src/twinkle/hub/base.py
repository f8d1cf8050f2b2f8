"""The contract of a hub: what stands behind `scheme://`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from twinkle.errors import Unsupported

RepoType = Literal["model", "dataset"]


class Hub(ABC):
    """Resolves references `scheme://...`; the component's name is its scheme. A hub overrides what it offers.

    A reference is `scheme://owner/name`, or `scheme://owner/name@revision` with a branch, a tag or a commit. Where a
    token is taken, None means the one of the usual place (a variable or a login); no token is ever printed.

    All methods raise `HubError` when the hub cannot be reached, refuses, or lacks what was asked.
    """

    @abstractmethod
    def download_model(self, reference: str, **kwargs: Any) -> Path:
        """Return a local folder (or a GGUF file) with the model's files, fetched if need be."""

    @abstractmethod
    def load_dataset(self, reference: str, subset_name: str = "default", split: str = "train", **kwargs: Any) -> Any:
        """Return the rows: a list of dicts, or a `datasets.Dataset`."""

    def download_file(
        self,
        reference: str,
        allow_patterns: str | Sequence[str] | None = None,
        *,
        repo_type: RepoType = "model",
        revision: str | None = None,
        token: str | None = None,
    ) -> Path:
        """Return the local folder of a repository with those of its files that match, fetched if need be.

        Args:
            reference: the repository.
            allow_patterns: a path, or patterns such as `*.json`; None for all files.
            repo_type: of the repository.
            revision: a branch, tag or commit, unless the reference names one.
            token: for a private repository.
        """
        raise Unsupported(f"{reference}: this hub does not give out single files")

    def create_repo(
        self, reference: str, *, repo_type: RepoType = "model", private: bool = True, token: str | None = None
    ) -> str:
        """Make a repository unless there is one, and return its address for people."""
        raise Unsupported(f"{reference}: nothing can be written to this hub")

    def push(
        self,
        reference: str,
        folder: str | Path,
        *,
        path_in_repo: str = "",
        message: str = "",
        description: str = "",
        repo_type: RepoType = "model",
        private: bool = True,
        revision: str | None = None,
        ignore_patterns: Sequence[str] = (),
        token: str | None = None,
    ) -> str:
        """Write a folder's files into a repository, as one commit, and return its address for people.

        Args:
            reference: the repository; made if there is none.
            folder: what to write; files of the repository that are not in it stay.
            path_in_repo: the folder of the repository to write into; empty for its root.
            message: the first line of the commit.
            description: more about the commit.
            repo_type: of the repository.
            private: make a new repository private; one that exists stays as it is.
            revision: the branch to commit to, unless the reference names one.
            ignore_patterns: files to leave out.
            token: one that may write.
        """
        raise Unsupported(f"{reference}: nothing can be written to this hub")

    def log_in(self, token: str | None = None) -> str | None:
        """Return the user's name that a token belongs to, or None if there is no token or it is unknown."""
        raise Unsupported(f"{type(self).__name__} knows no users")

    def commit_of(self, repo: str, revision: str | None = None, *, token: str | None = None) -> tuple[str, str]:
        """Return the present name of a repository, after redirects, and the whole commit that a revision means now.

        Args:
            repo: `owner/name`, or a path where the hub is a folder.
            revision: a branch, a tag or a commit; None for the branch that a repository begins with.
            token: for a private repository.
        """
        raise Unsupported(f"{repo}: this hub carries models and data, not components")

    def download_code(self, repo: str, commit: str, target: Path, *, token: str | None = None) -> None:
        """Write all files of a repository at a commit into an empty folder.

        Args:
            repo: as `commit_of` returned it.
            commit: as `commit_of` returned it.
            target: the folder. It is empty again when this raises.
            token: for a private repository.

        Raises:
            HubError: also when a path leads outside the folder, or there are more than 2,000 files or 64 MiB.
        """
        raise Unsupported(f"{repo}: this hub carries models and data, not components")
