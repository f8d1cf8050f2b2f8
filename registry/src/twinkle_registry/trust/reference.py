"""References to code on a hub (`scheme://repo@revision#Name`) and the patterns of policies and revocation lists."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..errors import ComponentNotFound, SettingsError
from ..naming import safe_repr

_REFERENCE = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_REPO_ON_HUB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_REPO_WITHOUT_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/+-]{0,199}")
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_COMMIT = re.compile(r"[0-9a-zA-Z][0-9a-zA-Z._-]{6,127}")
_FULL_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
FORM = "write 'hf://org/repo', 'hf://org/repo@revision' or 'hf://org/repo@revision#Name'"


@dataclass(frozen=True, slots=True)
class HubReference:
    """A parsed reference: `repo` is `org/repo` (for `file`, a path), `revision` and `name` may be empty.

    Models and data sets of a hub may have a `repo` without an organisation, such as `gpt2`; code may not.
    """

    scheme: str
    repo: str
    revision: str = ""
    name: str = ""

    @classmethod
    def parse(cls, text: str, *, context: str, owner_required: bool = True) -> HubReference:
        """Parse a reference.

        Args:
            text: the reference.
            context: the beginning of error messages.
            owner_required: refuse a repository without an organisation.

        Raises:
            ComponentNotFound: A part is missing, or has characters that no repository, revision or class has.
        """
        match = _REFERENCE.fullmatch(text)
        if match is None:
            raise ComponentNotFound(f"{context}: {safe_repr(text)} is not a reference to a hub; {FORM}")
        place, hashmark, name = match["rest"].partition("#")
        head, at, revision = place.rpartition("@")
        if not at or ("/" in revision and match["scheme"] == "file"):
            head, at, revision = place, "", ""
        repo = _checked_repo(match["scheme"], head, context, owner_required)
        if at and (not _REVISION.fullmatch(revision) or ".." in revision):
            raise ComponentNotFound(
                f"{context}: the revision {safe_repr(revision)} is not a branch, tag or commit; {FORM}"
            )
        if hashmark and not _NAME.fullmatch(name):
            raise ComponentNotFound(f"{context}: {safe_repr(name)} is not the name of a component; {FORM}")
        return cls(match["scheme"], repo, revision, name)

    @property
    def place(self) -> str:
        """The repository with its scheme, as in policy and lock."""
        return f"{self.scheme}://{self.repo}"

    @property
    def is_commit(self) -> bool:
        """Whether the revision is a full commit, which cannot move."""
        return bool(_FULL_COMMIT.fullmatch(self.revision))

    def __str__(self) -> str:
        """Return the reference without the name of a component."""
        return self.place + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of code, after redirects: a repository with its scheme, and one commit of it."""

    scheme: str
    repo: str
    commit: str

    @classmethod
    def checked(cls, scheme: str, repo: str, commit: str, *, context: str) -> Origin:
        """Check the answer of a hub, which is untrusted input."""
        if not _COMMIT.fullmatch(commit):
            raise ComponentNotFound(f"{context}: the hub returned an invalid commit, {safe_repr(commit)}")
        return cls(scheme, _checked_repo(scheme, repo, context), commit)

    @property
    def place(self) -> str:
        """The repository with its scheme."""
        return f"{self.scheme}://{self.repo}"

    def __str__(self) -> str:
        """Return `hf://org/repo@commit`, the form that `twinkle plugins add` accepts."""
        return f"{self.place}@{self.commit}"


def _checked_repo(scheme: str, repo: str, context: str, owner_required: bool = True) -> str:
    parts = repo.split("/")
    if scheme == "file":
        fine = bool(repo) and repo.isprintable() and "\\" not in repo and ".." not in parts
        repo = repo.rstrip("/") or repo
    else:
        named = _REPO_ON_HUB.fullmatch(repo) or (not owner_required and _REPO_WITHOUT_OWNER.fullmatch(repo))
        fine = bool(named) and not any(".." in part for part in parts)
    if not fine:
        raise ComponentNotFound(f"{context}: {safe_repr(repo)} is not a repository; {FORM}")
    return repo


def matches(pattern: str, place: str, commit: str) -> bool:
    """Return whether a pattern such as `scheme://org/*` or `scheme://org/repo@commit*` matches this code.

    `*` matches any part of one segment, a final `**` matches all remaining segments, and `*` alone matches everything.
    """
    if pattern == "*":
        return True
    place_pattern, at, commit_pattern = pattern.rpartition("@")
    if not at:
        place_pattern = pattern
    elif not fnmatchcase(commit, commit_pattern):
        return False
    segments, parts = place_pattern.split("/"), place.split("/")
    if segments[-1] == "**" and len(parts) >= len(segments):
        segments, parts = segments[:-1], parts[: len(segments) - 1]
    return len(segments) == len(parts) and all(map(fnmatchcase, parts, segments))


def check_pattern(where: str, pattern: str) -> None:
    """Raise `SettingsError` if a text is not a pattern."""
    if pattern != "*" and ("://" not in pattern or pattern.endswith("/") or "#" in pattern):
        raise SettingsError(
            f"{where} must be a pattern such as 'hf://org/*' or 'hf://org/repo@commit', got {pattern!r}"
        )
