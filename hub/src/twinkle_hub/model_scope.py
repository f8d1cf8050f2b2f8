"""The hub `ms://`: ModelScope, through its client library, with its cache, its login and its environment variables."""

import os
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from twinkle.errors import HubError
from twinkle_hub import code, rows
from twinkle_hub.fetching import has_bars, is_offline, progress, quiet_modelscope
from twinkle_hub.hugging_face import warn_if_public
from twinkle_hub.problems import RequestContext, Unreachable, translated_errors
from twinkle_hub.references import parse_reference, without_revision
from twinkle_hub.remote import KINDS, Listing, RemoteHub, checked_type, with_retries
from twinkle_registry.trust.reference import HubReference

_FIRST_BRANCH = "master"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CHUNK = 2**20
_TIMEOUT = 30  # seconds


class MSHub(RemoteHub):
    """The hub for `ms://owner/name`.

    The client is `modelscope-hub`, on which `modelscope` is built; unlike `modelscope`, it does not import torch.
    """

    scheme = "ms"
    title = "ModelScope"
    token_ways = "give token=, set MODELSCOPE_API_TOKEN, or run: modelscope login"

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
        """Return a `datasets.Dataset` of the repository's files, after a download; with `streaming` an iterable one.

        Raises:
            HubError: the hub cannot be reached, or has no such data set.
            DataError: it has no such configuration or split, or its files cannot be read.
        """
        hub_ref = parse_reference(reference, revision)
        folder = self._download(hub_ref, "dataset", None, lambda _: [], token)
        options = {"num_proc": num_proc, "data_files": data_files, "data_dir": data_dir, "streaming": streaming or None}
        with progress(str(hub_ref), new=False):
            return rows.load(folder, str(hub_ref), subset_name, split, **options)

    def create_repo(
        self, reference: str, *, repo_type: Any = "model", private: bool = True, token: str | None = None
    ) -> str:
        """Create a repository if it does not exist; see `Hub.create_repo`."""
        hub_ref = without_revision(reference)
        api = self._writable_api(hub_ref, token)
        from modelscope_hub.errors import AlreadyExistsError

        kind = checked_type(repo_type)
        with translated_errors(self._request_context(hub_ref, token)), quiet_modelscope():
            try:
                api.create_repo(hub_ref.repo, kind, visibility="private" if private else "public")
            except AlreadyExistsError:
                if private:
                    warn_if_public(_is_public(api.legacy.get_repo_info(hub_ref.repo, kind)), str(hub_ref))
        return f"{self._url()}/{kind}s/{hub_ref.repo}"

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
        address = self.create_repo(f"ms://{hub_ref.repo}", repo_type=repo_type, private=private, token=token)
        with translated_errors(self._request_context(hub_ref, token)), progress(f"{folder} to {hub_ref}", new=False):
            self._api(token).upload_folder(
                hub_ref.repo,
                repo_type,
                folder,
                path_in_repo=path_in_repo,
                commit_message=message or "Upload folder",
                commit_description=description or None,
                revision=hub_ref.revision or _FIRST_BRANCH,
                ignore_patterns=list(ignore_patterns) or None,
                disable_tqdm=not has_bars(),
                use_cache=False,  # the cache is a file in the uploaded folder
            )
        return address

    def log_in(self, token: str | None = None) -> str | None:
        """Return the name of the token's user, or None; see `Hub.log_in`."""
        if not self._has_token(token):
            return None
        try:
            with translated_errors(self._request_context(HubReference("ms", "whoami"), token)), quiet_modelscope():
                return str(self._api(token).whoami().username)
        except Unreachable:
            raise
        except HubError:
            return None

    def commit_of(self, repo: str, revision: str | None = None, *, token: str | None = None) -> tuple[str, str]:
        """Return the repository's current name and the commit; see `Hub.commit_of`.

        Most file listings contain the commit; if one does not, the repository's git server is asked for the commit of
        the branch or tag.
        """
        hub_ref = parse_reference(f"ms://{repo}", revision)
        request = self._request_context(hub_ref, token)
        listing = self._listing(hub_ref, "model", token)
        if _COMMIT.fullmatch(hub_ref.revision):
            return listing.repo, hub_ref.revision
        present = HubReference("ms", listing.repo, hub_ref.revision)
        commit = with_retries(lambda: self._commit_from_listing(present, token), request)
        commit = commit or with_retries(lambda: self._commit_from_git(present, token), request)
        if not commit:
            raise HubError(
                f"{hub_ref}: ModelScope does not report the commit of this revision; write the commit: ms://{repo}@..."
            )
        return listing.repo, commit

    def download_code(self, repo: str, commit: str, target: Path, *, token: str | None = None) -> None:
        """Write all files of a commit into an empty folder; see `Hub.download_code`."""
        hub_ref = parse_reference(f"ms://{repo}", commit)
        paths = code.checked(str(hub_ref), self._listing(hub_ref, "model", token).files)
        client = self._api(token).legacy

        def read(path: str) -> Iterator[bytes]:
            # Without compression: a small compressed response could expand to any size.
            headers = {"Accept-Encoding": "identity"}
            with quiet_modelscope(), client.download_stream(repo, "model", path, commit, headers=headers) as response:
                code.check_plain(str(hub_ref), response.headers.get("Content-Encoding"))
                yield from response.raw.stream(_CHUNK, decode_content=False)

        with_retries(lambda: code.write(str(hub_ref), target, paths, read), self._request_context(hub_ref, token))

    def _writable_api(self, hub_ref: HubReference, token: str | None) -> Any:
        if is_offline():
            raise HubError(f"cannot write to {hub_ref}: HF_HUB_OFFLINE is set; unset it to upload")
        self._request_context(hub_ref, token).require_token()
        return self._api(token)

    def _api(self, token: str | None) -> Any:
        from modelscope_hub import HubApi

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about MODELSCOPE_DOMAIN, which scripts still use
            return HubApi(token=token, endpoint=_endpoint())

    def _has_token(self, token: str | None) -> bool:
        return bool(token or self._api(None).legacy.token)

    def _url(self) -> str:
        return str(self._api(None).legacy.endpoint)

    def _request_context(self, hub_ref: HubReference, token: str | None, repo_type: str = "model") -> RequestContext:
        return RequestContext(
            self.title, str(hub_ref), self._url(), self._has_token(token), self.token_ways, KINDS[repo_type]
        )

    def _request_listing(self, hub_ref: HubReference, repo_type: str, token: str | None) -> Listing:
        client = self._api(token).legacy
        # Checked first, without the client's five retries, which take long on a machine without a network.
        repo_data = self._get(f"api/v1/{repo_type}s/{hub_ref.repo}", {}, token).json().get("Data")
        with quiet_modelscope():
            entries = client.list_repo_files(hub_ref.repo, repo_type, revision=hub_ref.revision or _FIRST_BRANCH)
        files = [(str(e["Path"]), int(e.get("Size") or 0)) for e in entries if e.get("Type") != "tree"]
        return Listing(_current_name(repo_data, hub_ref.repo), "", files)

    def _commit_from_listing(self, hub_ref: HubReference, token: str | None) -> str:
        parameters = {"Revision": hub_ref.revision or _FIRST_BRANCH, "Recursive": "False"}
        response = self._get(f"api/v1/models/{hub_ref.repo}/repo/files", parameters, token)
        latest = (response.json().get("Data") or {}).get("LatestCommitter") or {}
        commit = str(latest.get("Id") or "")
        return commit if _COMMIT.fullmatch(commit) else ""

    def _commit_from_git(self, hub_ref: HubReference, token: str | None) -> str:
        """Return the commit of a branch or tag by git's ref advertisement, or an empty string."""
        response = self._get(f"{hub_ref.repo}.git/info/refs", {"service": "git-upload-pack"}, token)
        refs = {name: at for at, name in re.findall(r"([0-9a-f]{40}) (refs/[^\s\0]+)", response.text)}
        name = hub_ref.revision or _FIRST_BRANCH
        # An annotated tag is an object of its own; `^{}` is the commit that it points to.
        ways = (f"refs/heads/{name}", f"refs/tags/{name}^{{}}", f"refs/tags/{name}")
        return next((refs[way] for way in ways if way in refs), "")

    def _get(self, path: str, parameters: dict[str, str], token: str | None) -> Any:
        """Send a GET request for which the client library has no method; the web API uses a cookie, git a password."""
        import requests

        secret = token or self._api(token).legacy.token
        with requests.Session() as session:
            if secret:  # bound to this host, so that a redirect does not leak it
                session.cookies.set("m_session_id", secret, domain=urlsplit(self._url()).hostname or "", path="/")
            response = session.get(
                f"{self._url()}/{path}",
                params=parameters,
                auth=("oauth2", secret) if secret and ".git/" in path else None,
                timeout=_TIMEOUT,
            )
        response.raise_for_status()
        return response

    def _cached(
        self, hub_ref: HubReference, repo_type: str, allow: list[str] | None = None, ignored: Sequence[str] = ()
    ) -> Path | None:
        api = self._api(None)
        from modelscope_hub.errors import CacheNotFound

        try:
            with quiet_modelscope():
                folder = api.download_repo(
                    hub_ref.repo, repo_type, revision=hub_ref.revision or _FIRST_BRANCH, local_files_only=True
                )
        except CacheNotFound:
            return None
        return Path(folder)

    def _download_snapshot(
        self, hub_ref: HubReference, repo_type: str, allow: list[str] | None, ignored: list[str], token: str | None
    ) -> Path:
        return Path(
            self._api(token).download_repo(
                hub_ref.repo,
                repo_type,
                revision=hub_ref.revision or _FIRST_BRANCH,
                allow_patterns=allow,
                ignore_patterns=ignored or None,
            )
        )


def _current_name(repo_data: Any, requested: str) -> str:
    """Return `owner/name` as reported by the hub, or the requested name if it reports none."""
    owner, name = (repo_data.get("Path") or repo_data.get("Owner"), repo_data.get("Name")) if repo_data else ("", "")
    return f"{owner}/{name}" if owner and name else requested


def _is_public(repo_data: Any) -> bool:
    return bool(repo_data) and int(repo_data.get("Visibility") or 0) == 5


def _endpoint() -> str | None:
    """Return the endpoint that the newer or the older variable sets; None uses the client's default."""
    return os.environ.get("MODELSCOPE_ENDPOINT") or os.environ.get("MODELSCOPE_DOMAIN") or None
