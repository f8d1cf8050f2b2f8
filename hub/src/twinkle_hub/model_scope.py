"""The hub `ms://`: ModelScope, through its client library, with its cache, its login and its variables."""

import os
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from twinkle.errors import HubError
from twinkle_hub import code, rows
from twinkle_hub.fetching import has_bars, is_offline, quiet_modelscope, shown
from twinkle_hub.hugging_face import warn_if_public
from twinkle_hub.problems import Talk, Unreachable, told
from twinkle_hub.references import parsed, without_revision
from twinkle_hub.remote import KINDS, Listing, RemoteHub, checked_type, patiently
from twinkle_registry.trust.reference import HubReference

_FIRST_BRANCH = "master"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PIECE = 2**20
_PATIENCE = 30  # seconds


class MSHub(RemoteHub):
    """Answers for `ms://owner/name`.

    The client is `modelscope-hub`, which `modelscope` itself calls; unlike that, it does not load torch.
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
        """Return a `datasets.Dataset` of the repository's files, fetched first; with `streaming` an iterable one.

        Raises:
            HubError: the hub cannot be reached, or has no such data set.
            DataError: it has no such configuration or split, or its files cannot be read.
        """
        wanted = parsed(reference, revision)
        folder = self._fetched(wanted, "dataset", None, lambda _: [], token)
        options = {"num_proc": num_proc, "data_files": data_files, "data_dir": data_dir, "streaming": streaming or None}
        with shown(str(wanted), new=False):
            return rows.load(folder, str(wanted), subset_name, split, **options)

    def create_repo(
        self, reference: str, *, repo_type: Any = "model", private: bool = True, token: str | None = None
    ) -> str:
        """Make a repository unless there is one; see `Hub.create_repo`."""
        wanted = without_revision(reference)
        api = self._writing(wanted, token)
        from modelscope_hub.errors import AlreadyExistsError

        kind = checked_type(repo_type)
        with told(self._talk(wanted, token)), quiet_modelscope():
            try:
                api.create_repo(wanted.repo, kind, visibility="private" if private else "public")
            except AlreadyExistsError:
                if private:
                    warn_if_public(_is_public(api.legacy.get_repo_info(wanted.repo, kind)), str(wanted))
        return f"{self._url()}/{kind}s/{wanted.repo}"

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
        address = self.create_repo(f"ms://{wanted.repo}", repo_type=repo_type, private=private, token=token)
        with told(self._talk(wanted, token)), shown(f"{folder} to {wanted}", new=False):
            self._api(token).upload_folder(
                wanted.repo,
                repo_type,
                folder,
                path_in_repo=path_in_repo,
                commit_message=message or "Upload folder",
                commit_description=description or None,
                revision=wanted.revision or _FIRST_BRANCH,
                ignore_patterns=list(ignore_patterns) or None,
                disable_tqdm=not has_bars(),
                use_cache=False,  # it would leave a file of its own in the folder
            )
        return address

    def log_in(self, token: str | None = None) -> str | None:
        """Return the name of the token's user, or None; see `Hub.log_in`."""
        if not self._has_token(token):
            return None
        try:
            with told(self._talk(HubReference("ms", "whoami"), token)), quiet_modelscope():
                return str(self._api(token).whoami().username)
        except Unreachable:
            raise
        except HubError:
            return None

    def commit_of(self, repo: str, revision: str | None = None, *, token: str | None = None) -> tuple[str, str]:
        """Return the repository's present name and the commit; see `Hub.commit_of`.

        The listing of the files names the commit in most answers; where it does not, the repository's git server is
        asked for the commit of the branch or tag.
        """
        wanted = parsed(f"ms://{repo}", revision)
        talk = self._talk(wanted, token)
        listing = self._listing(wanted, "model", token)
        if _COMMIT.fullmatch(wanted.revision):
            return listing.repo, wanted.revision
        present = HubReference("ms", listing.repo, wanted.revision)
        commit = patiently(lambda: self._commit_from_listing(present, token), talk)
        commit = commit or patiently(lambda: self._commit_from_git(present, token), talk)
        if not commit:
            raise HubError(f"{wanted}: ModelScope does not say which commit this is; give the commit: ms://{repo}@...")
        return listing.repo, commit

    def download_code(self, repo: str, commit: str, target: Path, *, token: str | None = None) -> None:
        """Write all files of a commit into an empty folder; see `Hub.download_code`."""
        wanted = parsed(f"ms://{repo}", commit)
        paths = code.checked(str(wanted), self._listing(wanted, "model", token).files)
        client = self._api(token).legacy

        def read(path: str) -> Iterator[bytes]:
            # Bytes as they are: what a server packs could unpack to any size.
            headers = {"Accept-Encoding": "identity"}
            with quiet_modelscope(), client.download_stream(repo, "model", path, commit, headers=headers) as answer:
                code.check_plain(str(wanted), answer.headers.get("Content-Encoding"))
                yield from answer.raw.stream(_PIECE, decode_content=False)

        patiently(lambda: code.write(str(wanted), target, paths, read), self._talk(wanted, token))

    def _writing(self, wanted: HubReference, token: str | None) -> Any:
        if is_offline():
            raise HubError(f"cannot write to {wanted}: HF_HUB_OFFLINE is set; unset it to upload")
        self._talk(wanted, token).require_token()
        return self._api(token)

    def _api(self, token: str | None) -> Any:
        from modelscope_hub import HubApi

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of MODELSCOPE_DOMAIN, which scripts go on to use
            return HubApi(token=token, endpoint=_endpoint())

    def _has_token(self, token: str | None) -> bool:
        return bool(token or self._api(None).legacy.token)

    def _url(self) -> str:
        return str(self._api(None).legacy.endpoint)

    def _talk(self, wanted: HubReference, token: str | None, repo_type: str = "model") -> Talk:
        return Talk(self.title, str(wanted), self._url(), self._has_token(token), self.token_ways, KINDS[repo_type])

    def _listed(self, wanted: HubReference, repo_type: str, token: str | None) -> Listing:
        client = self._api(token).legacy
        # Asked first, and without the client's five retries, which would keep a machine without network waiting.
        told_repo = self._asked(f"api/v1/{repo_type}s/{wanted.repo}", {}, token).json().get("Data")
        with quiet_modelscope():
            entries = client.list_repo_files(wanted.repo, repo_type, revision=wanted.revision or _FIRST_BRANCH)
        files = [(str(e["Path"]), int(e.get("Size") or 0)) for e in entries if e.get("Type") != "tree"]
        return Listing(_present_name(told_repo, wanted.repo), "", files)

    def _commit_from_listing(self, wanted: HubReference, token: str | None) -> str:
        parameters = {"Revision": wanted.revision or _FIRST_BRANCH, "Recursive": "False"}
        answer = self._asked(f"api/v1/models/{wanted.repo}/repo/files", parameters, token)
        latest = (answer.json().get("Data") or {}).get("LatestCommitter") or {}
        commit = str(latest.get("Id") or "")
        return commit if _COMMIT.fullmatch(commit) else ""

    def _commit_from_git(self, wanted: HubReference, token: str | None) -> str:
        """Return the commit of a branch or tag as git's own protocol tells it before a fetch, or an empty text."""
        answer = self._asked(f"{wanted.repo}.git/info/refs", {"service": "git-upload-pack"}, token)
        refs = {name: at for at, name in re.findall(r"([0-9a-f]{40}) (refs/[^\s\0]+)", answer.text)}
        name = wanted.revision or _FIRST_BRANCH
        # An annotated tag has an object of its own; `^{}` is the commit it stands for.
        ways = (f"refs/heads/{name}", f"refs/tags/{name}^{{}}", f"refs/tags/{name}")
        return next((refs[way] for way in ways if way in refs), "")

    def _asked(self, path: str, parameters: dict[str, str], token: str | None) -> Any:
        """Ask what the client library has no method for: the web interface by cookie, git by password."""
        import requests

        secret = token or self._api(token).legacy.token
        with requests.Session() as session:
            if secret:  # bound to this host, so that no redirect carries it elsewhere
                session.cookies.set("m_session_id", secret, domain=urlsplit(self._url()).hostname or "", path="/")
            answer = session.get(
                f"{self._url()}/{path}",
                params=parameters,
                auth=("oauth2", secret) if secret and ".git/" in path else None,
                timeout=_PATIENCE,
            )
        answer.raise_for_status()
        return answer

    def _cached(
        self, wanted: HubReference, repo_type: str, allow: list[str] | None = None, ignored: Sequence[str] = ()
    ) -> Path | None:
        api = self._api(None)
        from modelscope_hub.errors import CacheNotFound

        try:
            with quiet_modelscope():
                folder = api.download_repo(
                    wanted.repo, repo_type, revision=wanted.revision or _FIRST_BRANCH, local_files_only=True
                )
        except CacheNotFound:
            return None
        return Path(folder)

    def _snapshot(
        self, wanted: HubReference, repo_type: str, allow: list[str] | None, ignored: list[str], token: str | None
    ) -> Path:
        return Path(
            self._api(token).download_repo(
                wanted.repo,
                repo_type,
                revision=wanted.revision or _FIRST_BRANCH,
                allow_patterns=allow,
                ignore_patterns=ignored or None,
            )
        )


def _present_name(told_repo: Any, asked: str) -> str:
    """Return `owner/name` as the hub tells it, or as it was asked for where it does not."""
    owner, name = (told_repo.get("Path") or told_repo.get("Owner"), told_repo.get("Name")) if told_repo else ("", "")
    return f"{owner}/{name}" if owner and name else asked


def _is_public(told_repo: Any) -> bool:
    return bool(told_repo) and int(told_repo.get("Visibility") or 0) == 5


def _endpoint() -> str | None:
    """Return where ModelScope answers, by the newer or the older variable; None leaves it to the client."""
    return os.environ.get("MODELSCOPE_ENDPOINT") or os.environ.get("MODELSCOPE_DOMAIN") or None
