"""Base class of hubs on the network: use of the cache, retries, and the selection of files."""

import os
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from twinkle.errors import ArgumentError, HubError
from twinkle.hub import Hub
from twinkle_hub.fetching import Unfinished, is_offline, progress
from twinkle_hub.problems import RequestContext, Unreachable, translated_errors
from twinkle_hub.references import parse_reference
from twinkle_registry.trust.reference import HubReference

T = TypeVar("T")

KINDS = {"model": "repository", "dataset": "data set"}
"""Noun for a repository of each type, for messages."""

_ATTEMPTS, _WAIT = 3, 0.5  # seconds, doubled each time
# Weights in formats that transformers does not read, and copies of what it reads.
_OTHER_FORMATS = ("*.h5", "*.msgpack", "*.ot", "*.onnx", "*.onnx_data", "*.tflite", "onnx/*", "original/*")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_WEIGHTS = ("*.safetensors", *_PICKLED, "*.gguf", *_OTHER_FORMATS)


class Listing(NamedTuple):
    """Files of a repository at a revision; ModelScope's listing has no commit."""

    repo: str
    commit: str
    files: list[tuple[str, int]]


class _CacheQuery(NamedTuple):
    """Files to look up in a cache: a repository, patterns of its files, and the mark of an interrupted download."""

    hub_ref: HubReference
    repo_type: str
    allow: list[str] | None
    ignored: list[str]
    unfinished: Unfinished


class RemoteHub(Hub):
    """A hub on the network; its client library is imported on first use."""

    scheme: str
    title: str
    token_ways: str

    def download_model(
        self,
        reference: str,
        *,
        revision: str | None = None,
        weights: bool = True,
        ignore_patterns: str | Sequence[str] = (),
        token: str | None = None,
    ) -> Path:
        """Return a folder with the model's files, downloading them if necessary; an interrupted download resumes.

        Skips pickled weights if there are safetensors, and formats that transformers does not read.

        Args:
            reference: `hf://owner/name`, optionally with `@revision`.
            revision: a branch, tag or commit.
            weights: False downloads only the configuration and the tokenizer.
            ignore_patterns: more files to skip.
            token: for a private repository.
        """
        extra = [ignore_patterns] if isinstance(ignore_patterns, str) else list(ignore_patterns)
        hub_ref = parse_reference(reference, revision)

        def ignored(listing: Listing | None) -> list[str]:
            if not weights:
                return [*_WEIGHTS, *extra]
            safe = listing is None or any(path.endswith(".safetensors") for path, _ in listing.files)
            return [*_OTHER_FORMATS, *(_PICKLED if safe else ()), *extra]

        return self._download(hub_ref, "model", None, ignored, token)

    def download_file(
        self,
        reference: str,
        allow_patterns: str | Sequence[str] | None = None,
        *,
        repo_type: Any = "model",
        revision: str | None = None,
        token: str | None = None,
    ) -> Path:
        """Return the folder of a repository with the files that match; see `Hub.download_file`."""
        allow = [allow_patterns] if isinstance(allow_patterns, str) else list(allow_patterns or ())
        return self._download(
            parse_reference(reference, revision), checked_type(repo_type), allow or None, lambda _: [], token
        )

    def _download(
        self,
        hub_ref: HubReference,
        repo_type: str,
        allow: list[str] | None,
        ignored: Callable[[Listing | None], list[str]],
        token: str | None,
    ) -> Path:
        self._check_allowed()
        unfinished = Unfinished(str(hub_ref), repo_type, repr(allow))
        query = _CacheQuery(hub_ref, repo_type, allow, ignored(None), unfinished)
        if is_offline():
            return self._from_cache(query, f"{hub_ref}: HF_HUB_OFFLINE is set")
        try:
            listing = self._listing(hub_ref, repo_type, token)
        except Unreachable as error:
            folder = self._from_cache(query, error.reason)
            from twinkle.logging import get_logger

            get_logger().warning("%s; using the copy in the cache, %s", error.reason, folder)
            return folder
        if not listing.files:
            raise HubError(f"{hub_ref}: this repository on {self.title} has no files")
        if listing.repo != hub_ref.repo:
            from twinkle.logging import get_logger

            get_logger().warning("%s has moved to %s://%s; use the new name", hub_ref, hub_ref.scheme, listing.repo)
        if allow:
            self._check_patterns(hub_ref, allow, listing)
        skipped = ignored(listing)
        new = bool(unfinished) or self._cached(hub_ref, repo_type, allow, skipped) is None
        with (
            translated_errors(self._request_context(hub_ref, token)),
            progress(str(hub_ref), new=new),
            unfinished.in_progress(),
        ):
            return self._download_snapshot(hub_ref, repo_type, allow, skipped, token)

    def _from_cache(self, query: "_CacheQuery", reason: str) -> Path:
        folder = None if query.unfinished else self._cached(query.hub_ref, query.repo_type, query.allow, query.ignored)
        if folder is None:
            state = "only a part of it" if query.unfinished else "no complete copy of it"
            raise Unreachable(f"{reason}, and the cache has {state}; download it once with a network")
        cached_files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        if absent := [pattern for pattern in query.allow or () if not _matches(pattern, cached_files)]:
            raise Unreachable(f"{reason}, and no cached file matches {absent[0]!r}; download it with a network")
        return folder

    def _check_patterns(self, hub_ref: HubReference, allow: list[str], listing: Listing) -> None:
        from twinkle_registry import nearest

        paths = [path for path, _ in listing.files]
        for pattern in allow:
            if not _matches(pattern, paths):
                near = nearest(pattern, paths) or paths[:8]
                raise HubError(f"{hub_ref}: no file matches {pattern!r}; it has {', '.join(near) or 'no file'}")

    def _listing(self, hub_ref: HubReference, repo_type: str, token: str | None) -> Listing:
        if is_offline():
            reason = f"{hub_ref}: HF_HUB_OFFLINE is set"
            raise Unreachable(f"{reason}, but this call needs the hub; unset it", reason)
        return with_retries(
            lambda: self._request_listing(hub_ref, repo_type, token), self._request_context(hub_ref, token, repo_type)
        )

    def _check_allowed(self) -> None:
        """Raise if the settings forbid this hub."""

    @abstractmethod
    def _request_context(self, hub_ref: HubReference, token: str | None, repo_type: str = "model") -> RequestContext:
        """Describe a request to this hub, for error messages."""

    @abstractmethod
    def _request_listing(self, hub_ref: HubReference, repo_type: str, token: str | None) -> Listing:
        """Request the listing from the hub, without retries."""

    @abstractmethod
    def _cached(
        self, hub_ref: HubReference, repo_type: str, allow: list[str] | None = None, ignored: Sequence[str] = ()
    ) -> Path | None:
        """Return the folder in the client's cache, without the network, or None without a complete copy."""

    @abstractmethod
    def _download_snapshot(
        self, hub_ref: HubReference, repo_type: str, allow: list[str] | None, ignored: list[str], token: str | None
    ) -> Path:
        """Download the files into the client's cache and return their folder."""


def _matches(pattern: str, paths: list[str]) -> bool:
    return any(fnmatch(path, pattern) or path.startswith(pattern.rstrip("/") + "/") for path in paths)


def with_retries(send: Callable[[], T], request: RequestContext) -> T:
    """Return the result of `send`; if the hub does not answer, or with 5xx, retry twice."""
    for attempt in range(_ATTEMPTS - 1):
        try:
            with translated_errors(request):
                return send()
        except Unreachable as error:
            if not error.can_retry:
                raise
            time.sleep(_WAIT * 2**attempt)
    with translated_errors(request):
        return send()


def checked_type(repo_type: str) -> str:
    """Return `model` or `dataset`, or raise `ArgumentError`."""
    if repo_type not in ("model", "dataset"):
        raise ArgumentError(f"repo_type must be 'model' or 'dataset', got {repo_type!r}")
    return repo_type


def is_set(variable: str) -> bool:
    """Return whether an environment variable is set to anything but an empty string, 0, no, false or off."""
    return os.environ.get(variable, "").strip().lower() not in ("", "0", "no", "false", "off")
