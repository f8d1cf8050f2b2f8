"""The hub `hf://`: Hugging Face, through `huggingface_hub`, with its cache, its login and its environment variables."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from twinkle.errors import DataError, HubError
from twinkle_hub import code, rows
from twinkle_hub.fetching import is_offline, progress
from twinkle_hub.problems import RequestContext, Unreachable, translated_errors
from twinkle_hub.references import parse_reference, without_revision
from twinkle_hub.remote import KINDS, Listing, RemoteHub, checked_type, is_set, with_retries
from twinkle_registry.trust.reference import HubReference

_CHUNK = 2**20


class HFHub(RemoteHub):
    """The hub for `hf://owner/name`."""

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
        hub_ref = parse_reference(reference, revision)
        options = {"revision": hub_ref.revision or None, "token": token, "num_proc": num_proc}
        options |= {"data_files": data_files, "data_dir": data_dir, "streaming": streaming or None}
        try:
            # Check the connection first: without a network, the library would retry for half a minute.
            listing = self._listing(hub_ref, "dataset", token)
        except Unreachable as error:
            return self._cached_rows(hub_ref, error, subset_name, split, options)
        new = self._cached(hub_ref, "dataset") is None
        with translated_errors(self._request_context(hub_ref, token, "dataset")), progress(str(hub_ref), new=new):
            # The library refuses ids without an owner; the hub reports the full id.
            repo = hub_ref.repo if "/" in hub_ref.repo else listing.repo
            return rows.load(repo, str(hub_ref), subset_name, split, **options)

    def _cached_rows(
        self, hub_ref: HubReference, error: Unreachable, subset_name: str, split: str, options: dict[str, Any]
    ) -> Any:
        from twinkle.logging import get_logger

        try:
            with rows.library_offline(), progress(str(hub_ref), new=False):
                cached = rows.load(hub_ref.repo, str(hub_ref), subset_name, split, **options)
        except (OSError, DataError) as cache_error:
            reason = f"{error.reason}, and these rows are not in the cache; load them once with a network"
            raise Unreachable(reason) from cache_error
        get_logger().warning("%s; using the rows in the cache", error.reason)
        return cached

    def create_repo(
        self, reference: str, *, repo_type: Any = "model", private: bool = True, token: str | None = None
    ) -> str:
        """Create a repository if it does not exist; see `Hub.create_repo`."""
        hub_ref = without_revision(reference)
        self._check_writable(hub_ref, token)
        with translated_errors(self._request_context(hub_ref, token)):
            repository = self._api(token).create_repo(
                hub_ref.repo, repo_type=checked_type(repo_type), private=private, exist_ok=True
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
        """Upload the files of a folder to a repository; see `Hub.push`."""
        hub_ref = parse_reference(reference, revision)
        address = self.create_repo(f"hf://{hub_ref.repo}", repo_type=repo_type, private=private, token=token)
        api = self._api(token)
        with translated_errors(self._request_context(hub_ref, token)), progress(f"{folder} to {hub_ref}", new=False):
            if private:
                warn_if_public(not api.repo_info(hub_ref.repo, repo_type=repo_type).private, str(hub_ref))
            if hub_ref.revision:
                api.create_branch(hub_ref.repo, branch=hub_ref.revision, repo_type=repo_type, exist_ok=True)
            api.upload_folder(
                repo_id=hub_ref.repo,
                folder_path=folder,
                path_in_repo=path_in_repo or None,
                commit_message=message or "Upload folder",
                commit_description=description or None,
                repo_type=repo_type,
                revision=hub_ref.revision or None,
                ignore_patterns=list(ignore_patterns) or None,
            )
        return address

    def log_in(self, token: str | None = None) -> str | None:
        """Return the name of the token's user, or None; see `Hub.log_in`."""
        self._check_allowed()
        if not self._has_token(token):
            return None
        try:
            with translated_errors(self._request_context(HubReference("hf", "whoami"), token)):
                return str(self._api(token).whoami()["name"])
        except Unreachable:
            raise
        except HubError:
            return None

    def commit_of(self, repo: str, revision: str | None = None, *, token: str | None = None) -> tuple[str, str]:
        """Return the repository's current name and the commit; see `Hub.commit_of`."""
        self._check_allowed()
        listing = self._listing(parse_reference(f"hf://{repo}", revision), "model", token)
        return listing.repo, listing.commit

    def download_code(self, repo: str, commit: str, target: Path, *, token: str | None = None) -> None:
        """Write all files of a commit into an empty folder; see `Hub.download_code`."""
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        self._check_allowed()
        hub_ref = parse_reference(f"hf://{repo}", commit)
        paths = code.checked(str(hub_ref), self._listing(hub_ref, "model", token).files)
        # Without compression: a small compressed response could expand to any size.
        headers = {**build_hf_headers(token=token), "Accept-Encoding": "identity"}

        def read(path: str) -> Iterator[bytes]:
            url = hf_hub_url(repo, path, revision=commit, endpoint=_endpoint())
            with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
                hf_raise_for_status(response)
                code.check_plain(str(hub_ref), response.headers.get("Content-Encoding"))
                yield from response.iter_raw(_CHUNK)

        request = self._request_context(hub_ref, token)
        with_retries(lambda: code.write(str(hub_ref), target, paths, read), request)

    def _check_allowed(self) -> None:
        if is_set("TWINKLE_FORBID_HF"):
            raise HubError(
                "cannot use hf://: TWINKLE_FORBID_HF is set; use ms:// or a local folder, or unset the variable"
            )

    def _check_writable(self, hub_ref: HubReference, token: str | None) -> None:
        self._check_allowed()
        if is_offline():
            raise HubError(f"cannot write to {hub_ref}: HF_HUB_OFFLINE is set; unset it to upload")
        self._request_context(hub_ref, token).require_token()

    def _api(self, token: str | None) -> Any:
        from huggingface_hub import HfApi

        return HfApi(endpoint=_endpoint(), token=token)

    def _has_token(self, token: str | None) -> bool:
        from huggingface_hub import get_token

        return bool(token or get_token())

    def _request_context(self, hub_ref: HubReference, token: str | None, repo_type: str = "model") -> RequestContext:
        url = _endpoint() or "https://huggingface.co"
        return RequestContext(self.title, str(hub_ref), url, self._has_token(token), self.token_ways, KINDS[repo_type])

    def _request_listing(self, hub_ref: HubReference, repo_type: str, token: str | None) -> Listing:
        info = self._api(token).repo_info(
            hub_ref.repo, repo_type=repo_type, revision=hub_ref.revision or None, files_metadata=True
        )
        files = [(file.rfilename, file.size or 0) for file in info.siblings or ()]
        return Listing(info.id, info.sha, files)

    def _cached(
        self, hub_ref: HubReference, repo_type: str, allow: list[str] | None = None, ignored: Sequence[str] = ()
    ) -> Path | None:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        revision = hub_ref.revision or None
        try:
            folder = snapshot_download(
                hub_ref.repo,
                repo_type=repo_type,
                revision=revision,
                allow_patterns=allow,
                ignore_patterns=list(ignored) or None,
                local_files_only=True,
            )
        except LocalEntryNotFoundError:
            return None
        return Path(folder)

    def _download_snapshot(
        self, hub_ref: HubReference, repo_type: str, allow: list[str] | None, ignored: list[str], token: str | None
    ) -> Path:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                hub_ref.repo,
                repo_type=repo_type,
                revision=hub_ref.revision or None,
                allow_patterns=allow,
                ignore_patterns=ignored or None,
                token=token,
                endpoint=_endpoint(),
            )
        )


def warn_if_public(public: bool, place: str) -> None:
    """Warn if a private upload goes to a public repository."""
    if public:
        from twinkle.logging import get_logger

        get_logger().warning("%s exists and is public: everybody can read the uploaded files", place)


def _endpoint() -> str | None:
    """Return the current value of `HF_ENDPOINT`; the library reads it only at import."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
