"""The contract of a hub, which resolves references `scheme://...`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from twinkle.errors import Unsupported

RepoType = Literal["model", "dataset"]


class Hub(ABC):
    """Resolves references `scheme://...`; the component's name is the scheme. Subclasses override what they support.

    A reference is `scheme://owner/name`, or `scheme://owner/name@revision` with a branch, a tag or a commit. A token
    that is None is read from the hub's environment variable or login. Tokens are never printed.

    All methods raise `HubError` if the hub cannot be reached, refuses, or does not have the object.
    """

    @abstractmethod
    def download_model(self, reference: str, **kwargs: Any) -> Path:
        """Return a local folder (or a GGUF file) with the model's files; download them if necessary."""

    def check_model(self, reference: str) -> None:  # noqa: B027 - most hubs would need a request
        """Raise if it is known without a request that this hub does not have the model, so that a run fails early."""

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
        """Return a local folder with the matching files of a repository; download them if necessary.

        Args:
            reference: the repository.
            allow_patterns: a path, or patterns such as `*.json`; None for all files.
            repo_type: type of the repository.
            revision: a branch, tag or commit, unless the reference names one.
            token: token for a private repository.
        """
        raise Unsupported(f"{reference}: this hub does not give out single files")

    def create_repo(
        self, reference: str, *, repo_type: RepoType = "model", private: bool = True, token: str | None = None
    ) -> str:
        """Create a repository if it does not exist, and return its web address."""
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
        """Upload the files of a folder to a repository in one commit, and return the repository's web address.

        Args:
            reference: the repository; created if it does not exist.
            folder: the folder to upload; other files of the repository are kept.
            path_in_repo: target folder in the repository; empty for its root.
            message: first line of the commit message.
            description: rest of the commit message.
            repo_type: type of the repository.
            private: create a new repository as private; an existing one is not changed.
            revision: the branch to commit to, unless the reference names one.
            ignore_patterns: files to leave out.
            token: token with write access.
        """
        raise Unsupported(f"{reference}: nothing can be written to this hub")

    def log_in(self, token: str | None = None) -> str | None:
        """Return the name of the user to whom a token belongs, or None if there is no token or it is unknown."""
        raise Unsupported(f"{type(self).__name__} knows no users")

    def commit_of(self, repo: str, revision: str | None = None, *, token: str | None = None) -> tuple[str, str]:
        """Return the current name of a repository, after redirects, and the full commit id of a revision.

        Args:
            repo: `owner/name`, or a path where the hub is a folder.
            revision: a branch, a tag or a commit; None for the default branch.
            token: token for a private repository.
        """
        raise Unsupported(f"{repo}: this hub has models and data only, no components")

    def download_code(self, repo: str, commit: str, target: Path, *, token: str | None = None) -> None:
        """Write all files of a repository at a commit into an empty folder.

        Args:
            repo: as `commit_of` returned it.
            commit: as `commit_of` returned it.
            target: the folder. It is emptied again if this method raises.
            token: token for a private repository.

        Raises:
            HubError: a path leads outside of the folder, or there are more than 2,000 files or 64 MiB.
        """
        raise Unsupported(f"{repo}: this hub has models and data only, no components")
