"""What the hubs on the network share: the cache first or last, retries, and files that no training needs."""

import os
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from twinkle.errors import ArgumentError, HubError
from twinkle.hub import Hub
from twinkle_hub.fetching import Unfinished, is_offline, shown
from twinkle_hub.problems import Talk, Unreachable, told
from twinkle_hub.references import parsed
from twinkle_registry.trust.reference import HubReference

T = TypeVar("T")

KINDS = {"model": "repository", "dataset": "data set"}
"""What people call a repository of a type."""

_ATTEMPTS, _WAIT = 3, 0.5  # seconds, doubled each time
# Weights in formats that transformers does not read, and copies of what it reads.
_OTHER_FORMATS = ("*.h5", "*.msgpack", "*.ot", "*.onnx", "*.onnx_data", "*.tflite", "onnx/*", "original/*")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_WEIGHTS = ("*.safetensors", *_PICKLED, "*.gguf", *_OTHER_FORMATS)


class Listing(NamedTuple):
    """What a hub tells of a repository at a revision; ModelScope's listing has no commit."""

    repo: str
    commit: str
    files: list[tuple[str, int]]


class _Look(NamedTuple):
    """What is looked for in a cache: a repository, which files of it, and the note of a download that was cut off."""

    wanted: HubReference
    repo_type: str
    allow: list[str] | None
    ignored: list[str]
    unfinished: Unfinished


class RemoteHub(Hub):
    """A hub on the network, spoken to through a client library that is imported when it is used."""

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
        """Return a folder with the model's files, fetched unless they are there; cut off, the next call resumes.

        Pickled weights are left out where there are safetensors, and formats that transformers does not read always.

        Args:
            reference: `hf://owner/name`, with `@revision` if wanted.
            revision: a branch, tag or commit.
            weights: with False, configuration and tokenizer alone.
            ignore_patterns: more files to leave out.
            token: for a private repository.
        """
        extra = [ignore_patterns] if isinstance(ignore_patterns, str) else list(ignore_patterns)
        wanted = parsed(reference, revision)

        def ignored(listing: Listing | None) -> list[str]:
            if not weights:
                return [*_WEIGHTS, *extra]
            safe = listing is None or any(path.endswith(".safetensors") for path, _ in listing.files)
            return [*_OTHER_FORMATS, *(_PICKLED if safe else ()), *extra]

        return self._fetched(wanted, "model", None, ignored, token)

    def download_file(
        self,
        reference: str,
        allow_patterns: str | Sequence[str] | None = None,
        *,
        repo_type: Any = "model",
        revision: str | None = None,
        token: str | None = None,
    ) -> Path:
        """Return the folder of a repository with those of its files that match; see `Hub.download_file`."""
        allow = [allow_patterns] if isinstance(allow_patterns, str) else list(allow_patterns or ())
        return self._fetched(parsed(reference, revision), checked_type(repo_type), allow or None, lambda _: [], token)

    def _fetched(
        self,
        wanted: HubReference,
        repo_type: str,
        allow: list[str] | None,
        ignored: Callable[[Listing | None], list[str]],
        token: str | None,
    ) -> Path:
        self._check_allowed()
        unfinished = Unfinished(str(wanted), repo_type, repr(allow))
        look = _Look(wanted, repo_type, allow, ignored(None), unfinished)
        if is_offline():
            return self._from_cache(look, f"{wanted}: HF_HUB_OFFLINE is set")
        try:
            listing = self._listing(wanted, repo_type, token)
        except Unreachable as error:
            folder = self._from_cache(look, error.reason)
            from twinkle.logging import get_logger

            get_logger().warning("%s; using the copy in the cache, %s", error.reason, folder)
            return folder
        if not listing.files:
            raise HubError(f"{wanted}: {self.title} has this repository, and there is no file in it")
        if listing.repo != wanted.repo:
            from twinkle.logging import get_logger

            get_logger().warning("%s has moved to %s://%s; write that", wanted, wanted.scheme, listing.repo)
        if allow:
            self._check_patterns(wanted, allow, listing)
        leave = ignored(listing)
        new = bool(unfinished) or self._cached(wanted, repo_type, allow, leave) is None
        with told(self._talk(wanted, token)), shown(str(wanted), new=new), unfinished.begun():
            return self._snapshot(wanted, repo_type, allow, leave, token)

    def _from_cache(self, look: "_Look", why: str) -> Path:
        folder = None if look.unfinished else self._cached(look.wanted, look.repo_type, look.allow, look.ignored)
        if folder is None:
            state = "only a part of it" if look.unfinished else "nothing of it, or not all"
            raise Unreachable(f"{why}, and the cache holds {state}; fetch it once with a network")
        held = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        if absent := [pattern for pattern in look.allow or () if not _matches(pattern, held)]:
            raise Unreachable(f"{why}, and the cache holds nothing that matches {absent[0]!r}; fetch it with a network")
        return folder

    def _check_patterns(self, wanted: HubReference, allow: list[str], listing: Listing) -> None:
        from twinkle_registry import nearest

        paths = [path for path, _ in listing.files]
        for pattern in allow:
            if not _matches(pattern, paths):
                near = nearest(pattern, paths) or paths[:8]
                raise HubError(f"{wanted}: no file matches {pattern!r}; it has {', '.join(near) or 'no file'}")

    def _listing(self, wanted: HubReference, repo_type: str, token: str | None) -> Listing:
        if is_offline():
            reason = f"{wanted}: HF_HUB_OFFLINE is set"
            raise Unreachable(f"{reason}, and only the hub can tell; unset it once", reason)
        return patiently(lambda: self._listed(wanted, repo_type, token), self._talk(wanted, token, repo_type))

    def _check_allowed(self) -> None:
        """Raise where the settings forbid this hub."""

    @abstractmethod
    def _talk(self, wanted: HubReference, token: str | None, repo_type: str = "model") -> Talk:
        """Return whom we speak to."""

    @abstractmethod
    def _listed(self, wanted: HubReference, repo_type: str, token: str | None) -> Listing:
        """Ask the hub, once."""

    @abstractmethod
    def _cached(
        self, wanted: HubReference, repo_type: str, allow: list[str] | None = None, ignored: Sequence[str] = ()
    ) -> Path | None:
        """Return the folder in the client's cache, without the network, as far as the client can tell whole."""

    @abstractmethod
    def _snapshot(
        self, wanted: HubReference, repo_type: str, allow: list[str] | None, ignored: list[str], token: str | None
    ) -> Path:
        """Download."""


def _matches(pattern: str, paths: list[str]) -> bool:
    return any(fnmatch(path, pattern) or path.startswith(pattern.rstrip("/") + "/") for path in paths)


def patiently(ask: Callable[[], T], talk: Talk) -> T:
    """Return what `ask` returns; a hub that does not answer, or answers 5xx, is asked again twice."""
    for attempt in range(_ATTEMPTS - 1):
        try:
            with told(talk):
                return ask()
        except Unreachable as error:
            if not error.is_worth_repeating:
                raise
            time.sleep(_WAIT * 2**attempt)
    with told(talk):
        return ask()


def checked_type(repo_type: str) -> str:
    """Return `model` or `dataset`, or raise `ArgumentError`."""
    if repo_type not in ("model", "dataset"):
        raise ArgumentError(f"repo_type is {repo_type!r}; it is 'model' or 'dataset'")
    return repo_type


def is_set(variable: str) -> bool:
    """Return whether a switch in the environment is on: anything but empty, 0, no, false and off."""
    return os.environ.get(variable, "").strip().lower() not in ("", "0", "no", "false", "off")
