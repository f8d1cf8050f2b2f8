"""`HubOperation`, the published interface to all hubs; the prefix of an id selects the hub."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from twinkle.errors import ArgumentError, HubError
from twinkle.hub.base import Hub, RepoType
from twinkle.hub.local import alias_of, default_hub, open_hub, scheme_of
from twinkle_hub.uploads import Upload, begin


class HubOperation:
    """Downloads and uploads by id: `hf://owner/name`, `ms://owner/name`, or without a prefix.

    An id without a prefix belongs to the default hub, `TWINKLE_DEFAULT_HUB` (`ms` if unset).
    """

    _uploads: ClassVar[dict[str, list[Upload]]] = {}

    @classmethod
    def source_type(cls, name: str) -> str:
        """Return the hub that an id belongs to: `hf`, `ms`, ..."""
        return scheme_of(name) or default_hub()

    @classmethod
    def remove_source_type(cls, name: str) -> str:
        """Return an id without its prefix."""
        return name.partition("://")[2] if scheme_of(name) else name

    @classmethod
    def try_login(cls, token: str | None = None) -> bool:
        """Return whether the default hub accepts the token (None uses the stored one)."""
        return open_hub(f"{default_hub()}://").log_in(token) is not None

    @classmethod
    def create_repo(
        cls, repo_id: str, token: str | None = None, private: bool = True, repo_type: RepoType = "model"
    ) -> str:
        """Create a repository if it does not exist, and return its address."""
        return cls._hub(repo_id).create_repo(cls._reference(repo_id), repo_type=repo_type, private=private, token=token)

    @classmethod
    def create_model_repo(cls, repo_id: str, token: str | None = None, private: bool = True) -> str:
        """Create a repository for a model; see `create_repo`."""
        return cls.create_repo(repo_id, token=token, private=private)

    @classmethod
    def push_to_hub(
        cls,
        repo_id: str,
        folder_path: str | Path,
        path_in_repo: str | None = None,
        commit_message: str | None = None,
        commit_description: str | None = None,
        token: str | None = None,
        private: bool = True,
        revision: str | None = None,
        ignore_patterns: str | Sequence[str] | None = None,
        repo_type: RepoType = "model",
    ) -> str:
        """Upload the files of a folder to a repository and return its address; see `twinkle.hub.Hub.push`."""
        folder = Path(folder_path).expanduser()
        if not folder.is_dir():
            raise HubError(f"cannot upload {folder}: there is no such folder; give the folder of a checkpoint")
        return cls._hub(repo_id).push(
            cls._reference(repo_id),
            folder,
            path_in_repo=path_in_repo or "",
            message=commit_message or "",
            description=commit_description or "",
            repo_type=repo_type,
            private=private,
            revision=revision,
            ignore_patterns=[ignore_patterns] if isinstance(ignore_patterns, str) else list(ignore_patterns or ()),
            token=token,
        )

    @classmethod
    def async_push_to_hub(cls, repo_id: str, folder_path: str | Path, *args: Any, **kwargs: Any) -> Upload:
        """Start `push_to_hub` in the background, with the same arguments, and return immediately.

        The folder is uploaded in its current state. `await` the result, call `.result()`, or `wait_for` all uploads.
        """
        from twinkle_registry import check_keywords

        # Check the arguments here, so that errors are raised by this call and not in the background.
        check_keywords(cls.push_to_hub, kwargs, what="async_push_to_hub", args=(repo_id, folder_path, *args))
        cls._hub(repo_id)
        upload = begin(
            cls._reference(repo_id),
            Path(folder_path).expanduser(),
            lambda snapshot: cls.push_to_hub(repo_id, snapshot, *args, **kwargs),
        )
        cls._uploads.setdefault(repo_id, []).append(upload)
        return upload

    @classmethod
    def wait_for(cls, repo_ids: str | Sequence[str] | None = None) -> dict[str, str]:
        """Wait for uploads, and return the address of each id.

        Args:
            repo_ids: ids that `async_push_to_hub` was called with; None waits for all that were not waited for before.

        Raises:
            ArgumentError: no upload to one of the ids was started.
            HubError: some uploads failed; all have ended, and the message lists the failures.
        """
        ids = list(cls._uploads) if repo_ids is None else [repo_ids] if isinstance(repo_ids, str) else list(repo_ids)
        if unknown := [name for name in ids if name not in cls._uploads]:
            active = ", ".join(map(repr, cls._uploads)) or "none"
            raise ArgumentError(f"no upload to {unknown[0]!r} is in progress; in progress: {active}")
        uploads = {name: cls._uploads.pop(name) for name in ids}
        ended = [upload.exception() for group in uploads.values() for upload in group]
        if failed := [error for error in ended if error is not None]:
            reasons = "; ".join(map(str, failed))
            raise HubError(f"{len(failed)} of {len(ended)} uploads failed: {reasons}") from failed[0]
        return {name: group[-1].result() for name, group in uploads.items()}

    @classmethod
    def load_dataset(
        cls,
        dataset_id: str,
        subset_name: str | None = None,
        split: str | None = None,
        streaming: bool = False,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the rows of a data set: a `datasets.Dataset`, or with `streaming` an iterable one."""
        options = {
            **kwargs,
            **({"streaming": True} if streaming else {}),
            **({"revision": revision} if revision else {}),
        }
        return cls._hub(dataset_id).load_dataset(
            cls._reference(dataset_id), subset_name or "default", split or "train", **options
        )

    @classmethod
    def download_model(
        cls,
        model_id_or_path: str | Path,
        revision: str | None = None,
        download_model: bool = True,
        ignore_patterns: str | Sequence[str] | None = None,
        token: str | None = None,
    ) -> str:
        """Return the local folder of a model, downloading it if necessary; an existing path is returned unchanged.

        Args:
            model_id_or_path: an id, or an alias of `TWINKLE_MODEL_ID_ALIASES`.
            revision: a branch, tag or commit.
            download_model: False downloads only the configuration and the tokenizer.
            ignore_patterns: files to skip.
            token: for a private repository.
        """
        if not str(model_id_or_path):
            raise ArgumentError("the model id is empty; give a model folder, hf://owner/name or ms://owner/name")
        place = alias_of(str(model_id_or_path))
        if scheme_of(place) is None and Path(place).expanduser().exists():
            return str(Path(place).expanduser())
        options: dict[str, Any] = {"revision": revision, "token": token}
        if not download_model:
            options["weights"] = False
        if ignore_patterns:
            options["ignore_patterns"] = [ignore_patterns] if isinstance(ignore_patterns, str) else [*ignore_patterns]
        options = {name: value for name, value in options.items() if value is not None}
        return str(cls._hub(place).download_model(cls._reference(place), **options))

    @classmethod
    def download_file(
        cls,
        repo_id: str,
        repo_type: RepoType = "model",
        allow_patterns: str | Sequence[str] | None = None,
        token: str | None = None,
        revision: str | None = None,
    ) -> str:
        """Return the local folder of a repository with the files that match, downloading them if necessary."""
        return str(
            cls._hub(repo_id).download_file(
                cls._reference(repo_id), allow_patterns, repo_type=repo_type, revision=revision, token=token
            )
        )

    @classmethod
    def _reference(cls, name: str) -> str:
        return name if scheme_of(name) else f"{default_hub()}://{name}"

    @classmethod
    def _hub(cls, name: str) -> Hub:
        return open_hub(cls._reference(name))
