"""The hub `hf://`: Hugging Face, through `huggingface_hub`, with its cache, its login and its variables."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from twinkle.errors import DataError, HubError
from twinkle_hub import code, rows
from twinkle_hub.fetching import is_offline, shown
from twinkle_hub.problems import Talk, Unreachable, told
from twinkle_hub.references import parsed, without_revision
from twinkle_hub.remote import KINDS, Listing, RemoteHub, checked_type, is_set, patiently
from twinkle_registry.trust.reference import HubReference

_PIECE = 2**20


class HFHub(RemoteHub):
    """Answers for `hf://owner/name`."""

    scheme = "hf"
    title = "Hugging Face"
    token_ways = "give token=, set HF_TOKEN, or run: hf auth login"

    def load_dataset(
        self,
        reference: str,
        subset_name: str = "default",
        split: str = "train",
        *,
        streaming: bool = False,
        revision: str | None = None,
        token: str | None = None,
        num_proc: int | None = None,
        data_files: Any = None,
        data_dir: str | None = None,
    ) -> Any:
        """Return a `datasets.Dataset`, or with `streaming` an iterable one; see `datasets.load_dataset`.

        Raises:
            HubError: the hub cannot be reached, or has no such data set.
            DataError: it has no such configuration or split, or its files cannot be read.
        """
        self._check_allowed()
        wanted = parsed(reference, revision)
        options = {"revision": wanted.revision or None, "token": token, "num_proc": num_proc}
        options |= {"data_files": data_files, "data_dir": data_dir, "streaming": streaming or None}
        try:
            # Asked before the library asks: without a network that would try for half a minute.
            self._listing(wanted, "dataset", token)
        except Unreachable as error:
            return self._rows_from_cache(wanted, error, subset_name, split, options)
        new = self._cached(wanted, "dataset") is None
        with told(self._talk(wanted, token, "dataset")), shown(str(wanted), new=new):
            return rows.load(wanted.repo, str(wanted), subset_name, split, **options)

    def _rows_from_cache(
        self, wanted: HubReference, why: Unreachable, subset_name: str, split: str, options: dict[str, Any]
    ) -> Any:
        from twinkle.logging import get_logger

        try:
            with rows.library_offline(), shown(str(wanted), new=False):
                cached = rows.load(wanted.repo, str(wanted), subset_name, split, **options)
        except (OSError, DataError) as error:
            reason = f"{why.reason}, and the cache has no such rows of it; fetch them once with a network"
            raise Unreachable(reason) from error
        get_logger().warning("%s; using the rows in the cache", why.reason)
        return cached

    def create_repo(
        self, reference: str, *, repo_type: Any = "model", private: bool = True, token: str | None = None
    ) -> str:
        """Make a repository unless there is one; see `Hub.create_repo`."""
        wanted = without_revision(reference)
        self._check_writable(wanted, token)
        with told(self._talk(wanted, token)):
            repository = self._api(token).create_repo(
                wanted.repo, repo_type=checked_type(repo_type), private=private, exist_ok=True
            )
        return str(repository)

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
        """Write a folder's files into a repository; see `Hub.push`."""
        wanted = parsed(reference, revision)
        address = self.create_repo(f"hf://{wanted.repo}", repo_type=repo_type, private=private, token=token)
        api = self._api(token)
        with told(self._talk(wanted, token)), shown(f"{folder} to {wanted}", new=False):
            if private:
                warn_if_public(not api.repo_info(wanted.repo, repo_type=repo_type).private, str(wanted))
            if wanted.revision:
                api.create_branch(wanted.repo, branch=wanted.revision, repo_type=repo_type, exist_ok=True)
            api.upload_folder(
                repo_id=wanted.repo,
                folder_path=folder,
                path_in_repo=path_in_repo or None,
                commit_message=message or "Upload folder",
                commit_description=description or None,
                repo_type=repo_type,
                revision=wanted.revision or None,
                ignore_patterns=list(ignore_patterns) or None,
            )
        return address

    def log_in(self, token: str | None = None) -> str | None:
        """Return the name of the token's user, or None; see `Hub.log_in`."""
        self._check_allowed()
        if not self._has_token(token):
            return None
        try:
            with told(self._talk(HubReference("hf", "whoami"), token)):
                return str(self._api(token).whoami()["name"])
        except Unreachable:
            raise
        except HubError:
            return None

    def commit_of(self, repo: str, revision: str | None = None, *, token: str | None = None) -> tuple[str, str]:
        """Return the repository's present name and the commit; see `Hub.commit_of`."""
        self._check_allowed()
        listing = self._listing(parsed(f"hf://{repo}", revision), "model", token)
        return listing.repo, listing.commit

    def download_code(self, repo: str, commit: str, target: Path, *, token: str | None = None) -> None:
        """Write all files of a commit into an empty folder; see `Hub.download_code`."""
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        self._check_allowed()
        wanted = parsed(f"hf://{repo}", commit)
        paths = code.checked(str(wanted), self._listing(wanted, "model", token).files)
        # Bytes as they are: what a server packs could unpack to any size.
        headers = {**build_hf_headers(token=token), "Accept-Encoding": "identity"}

        def read(path: str) -> Iterator[bytes]:
            url = hf_hub_url(repo, path, revision=commit, endpoint=_endpoint())
            with get_session().stream("GET", url, headers=headers, follow_redirects=True) as answer:
                hf_raise_for_status(answer)
                code.check_plain(str(wanted), answer.headers.get("Content-Encoding"))
                yield from answer.iter_raw(_PIECE)

        talk = self._talk(wanted, token)
        patiently(lambda: code.write(str(wanted), target, paths, read), talk)

    def _check_allowed(self) -> None:
        if is_set("TWINKLE_FORBID_HF"):
            raise HubError(
                "hf:// is forbidden here: TWINKLE_FORBID_HF is set; use ms:// or a local folder, or unset the variable"
            )

    def _check_writable(self, wanted: HubReference, token: str | None) -> None:
        self._check_allowed()
        if is_offline():
            raise HubError(f"cannot write to {wanted}: HF_HUB_OFFLINE is set; unset it to upload")
        self._talk(wanted, token).require_token()

    def _api(self, token: str | None) -> Any:
        from huggingface_hub import HfApi

        return HfApi(endpoint=_endpoint(), token=token)

    def _has_token(self, token: str | None) -> bool:
        from huggingface_hub import get_token

        return bool(token or get_token())

    def _talk(self, wanted: HubReference, token: str | None, repo_type: str = "model") -> Talk:
        url = _endpoint() or "https://huggingface.co"
        return Talk(self.title, str(wanted), url, self._has_token(token), self.token_ways, KINDS[repo_type])

    def _listed(self, wanted: HubReference, repo_type: str, token: str | None) -> Listing:
        info = self._api(token).repo_info(
            wanted.repo, repo_type=repo_type, revision=wanted.revision or None, files_metadata=True
        )
        files = [(file.rfilename, file.size or 0) for file in info.siblings or ()]
        return Listing(info.id, info.sha, files)

    def _cached(
        self, wanted: HubReference, repo_type: str, allow: list[str] | None = None, ignored: Sequence[str] = ()
    ) -> Path | None:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        revision = wanted.revision or None
        try:
            folder = snapshot_download(
                wanted.repo,
                repo_type=repo_type,
                revision=revision,
                allow_patterns=allow,
                ignore_patterns=list(ignored) or None,
                local_files_only=True,
            )
        except LocalEntryNotFoundError:
            return None
        return Path(folder)

    def _snapshot(
        self, wanted: HubReference, repo_type: str, allow: list[str] | None, ignored: list[str], token: str | None
    ) -> Path:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                wanted.repo,
                repo_type=repo_type,
                revision=wanted.revision or None,
                allow_patterns=allow,
                ignore_patterns=ignored or None,
                token=token,
                endpoint=_endpoint(),
            )
        )


def warn_if_public(public: bool, place: str) -> None:
    """Say so where a private upload goes into a repository that everybody can read."""
    if public:
        from twinkle.logging import get_logger

        get_logger().warning("%s exists and is public: what is uploaded there can be read by everybody", place)


def _endpoint() -> str | None:
    """Return `HF_ENDPOINT` as it is now: the library reads it once, when it is imported."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
