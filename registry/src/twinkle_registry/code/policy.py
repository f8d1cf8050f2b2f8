"""Who may run code here: `[trust]` of twinkle.toml, of the project and of the user together.

[trust]
allow = ["hf://acme/*"]          # runs at any commit, though nobody added it
only = ["hf://acme/*", "ms://acme/*"]  # nothing else may even be added
deny = ["hf://acme/old@3f2a*"]   # never, whatever else is said
[trust.signed]
"hf://acme/*" = { ed25519 = "base64 of the public key" }
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ..errors import SettingsError
from ..locked import TRUST_VARIABLE, trusts_all
from ..naming import nearest_or_all
from ..settings import ConfigFile, config_files
from ..untrusted import and_untrusted
from .reference import HubReference, Origin
from .signatures import Signer, signer_from_table

_KEYS = ("allow", "only", "deny", "signed")
GIVE_TRUST = ("allow",)
"""Keys that are obeyed in a trusted file only; the others take away."""


@dataclass(frozen=True)
class Policy:
    """What the files and the environment say.

    Attributes:
        allow: Patterns of code that runs without being locked.
        only: For each file that says so, the patterns outside of which nothing runs.
        deny: Patterns of code that never runs.
        signed: Patterns of code that must be signed, and by whom.
        trusts_all: `TWINKLE_TRUST_REMOTE_CODE=1`: what is neither denied nor outside of `only` runs.
    """

    allow: tuple[str, ...] = ()
    only: tuple[tuple[str, ...], ...] = ()
    deny: tuple[str, ...] = ()
    signed: tuple[tuple[str, Signer], ...] = ()
    trusts_all: bool = False

    @classmethod
    def load(cls) -> Policy:
        """Read the files and the environment of this process.

        A pattern of the user's own file counts beside those of the project's: no project lifts what its user denies.
        `allow` of a `twinkle.toml` in a folder that is not trusted is left out; what takes away counts.

        Raises:
            SettingsError: A table, a key, a type or a pattern is wrong.
        """
        tables = [_read(file) for file in config_files(os.environ)]
        return cls(
            allow=tuple(pattern for table in tables for pattern in table.get("allow", ())),
            only=tuple(tuple(table["only"]) for table in tables if "only" in table),
            deny=tuple(pattern for table in tables for pattern in table.get("deny", ())),
            signed=tuple(pair for table in tables for pair in table["signed"]),
            trusts_all=trusts_all(),
        )

    def denies(self, place: str, commit: str = "") -> str:
        """Return why nothing from `place` may run, or an empty text; upper and lower case are the same here."""
        for pattern in self.deny:
            if matches(pattern.casefold(), place.casefold(), commit.casefold()):
                return f"[trust] deny has {pattern!r}"
        return ""

    def forbids(self, origin: Origin) -> str:
        """Return why code from there may not even be added, or an empty text."""
        for patterns in self.only:
            if not any(matches(pattern, origin.place, origin.commit) for pattern in patterns):
                return f"[trust] only has {', '.join(map(repr, patterns)) or 'nothing'}"
        return self.denies(origin.place, origin.commit)

    def allows(self, origin: Origin) -> bool:
        """Say whether code that is not locked may run."""
        return self.trusts_all or any(matches(pattern, origin.place, origin.commit) for pattern in self.allow)

    def signers(self, origin: Origin) -> list[Signer]:
        """Return all whose signature code from there must bear."""
        return [signer for pattern, signer in self.signed if matches(pattern, origin.place, origin.commit)]


def matches(pattern: str, place: str, commit: str) -> bool:
    """Say whether `scheme://org/*` or `scheme://org/repo@commit*` means this code.

    `*` stands for any part of one segment, `**` at the end for all that follows; a lone `*` is everything.
    """
    if pattern == "*":
        return True
    wanted, at, wanted_commit = pattern.rpartition("@")
    if not at:
        wanted = pattern
    elif not fnmatchcase(commit, wanted_commit):
        return False
    segments, parts = wanted.split("/"), place.split("/")
    if segments[-1] == "**" and len(parts) >= len(segments):
        segments, parts = segments[:-1], parts[: len(segments) - 1]
    return len(segments) == len(parts) and all(map(fnmatchcase, parts, segments))


def trust_table(file: ConfigFile) -> dict[str, Any]:
    """Return `[trust]` of a file, checked, whether the file is trusted or not."""
    path, raw = file.path, file.raw
    table = raw.get("trust", {})
    if not isinstance(table, dict):
        raise SettingsError(f"{path}: trust: expected a table [trust], found {table!r}")
    for key in table:
        if key not in _KEYS:
            raise SettingsError(f"{path}: [trust] {key}: unknown key, {nearest_or_all(key, _KEYS)}")
    for key in ("allow", "only", "deny"):
        _check_patterns(f"{path}: [trust] {key}", table.get(key, []))
    return {**table, "signed": _signed(f"{path}: [trust.signed]", table.get("signed", {}))}


def _read(file: ConfigFile) -> dict[str, Any]:
    """Return what counts of `[trust]` of a file."""
    table = trust_table(file)
    return table if file.is_trusted else {key: value for key, value in table.items() if key not in GIVE_TRUST}


def _check_patterns(where: str, value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(pattern, str) for pattern in value):
        raise SettingsError(f"{where}: expected a list of patterns such as 'hf://org/*', found {value!r}")
    for pattern in value:
        _check_pattern(where, pattern)


def _check_pattern(where: str, pattern: str) -> None:
    if pattern != "*" and ("://" not in pattern or pattern.endswith("/") or "#" in pattern):
        raise SettingsError(
            f"{where}: expected a pattern such as 'hf://org/*' or 'hf://org/repo@commit', not {pattern!r}"
        )


def _signed(where: str, table: Any) -> list[tuple[str, Signer]]:
    if not isinstance(table, dict):
        raise SettingsError(f"{where}: expected a table of patterns and signers, found {table!r}")
    for pattern in table:
        _check_pattern(where, pattern)
    return [(pattern, signer_from_table(f"{where} {pattern!r}", value)) for pattern, value in table.items()]


def why_not_trusted(policy: Policy, reference: HubReference, origin: Origin, *, locked: bool) -> str:
    """Return why this code may not run, with what would change it, or an empty text."""
    moved = f" ({reference.place} has moved there)" if reference.place != origin.place else ""
    if reason := policy.denies(reference.place) or policy.forbids(origin):
        return f"code from {origin.place}{moved} is forbidden: {reason}; ask whoever keeps that file"
    if locked or policy.allows(origin):
        return ""
    return (
        f"nobody has allowed code from {origin.place}{moved} to run here, neither by [trust] allow in twinkle.toml nor "
        f"by {TRUST_VARIABLE}=1; look at it and trust this commit of it with: twinkle plugins add {origin}{and_untrusted()}"
    )
