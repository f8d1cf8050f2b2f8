"""The trust policy: `[trust]` of the project's and the user's twinkle.toml combined.

[trust]
allow = ["hf://acme/*"]          # runs at any commit without being added
only = ["hf://acme/*", "ms://acme/*"]  # nothing else may even be added
deny = ["hf://acme/old@3f2a*"]   # never, whatever other keys allow
[trust.signed]
"hf://acme/*" = { ed25519 = "base64 of the public key" }
[[trust.revoked]]                # a signed list of code that must not run any more
list = "https://plugins.acme.example/revoked.json"
ed25519 = "base64 of the public key"
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from typing import Any

from ..errors import NotTrusted, SettingsError
from ..naming import nearest_or_all, safe_repr
from ..settings import NEED_TRUST, TRUST_VARIABLE, ConfigFile, config_files, trusts_all, untrusted_suffix
from .reference import HubReference, Origin, check_pattern, matches
from .revocation import KnownList, known_list, sources_from_table
from .signatures import Signer, check_signature, signer_from_table
from .store import Tree

_KEYS = ("allow", "only", "deny", "signed", "revoked")


@dataclass(frozen=True)
class Policy:
    """The policy of the configuration files and the environment.

    Attributes:
        allow: Patterns of code that runs without being locked.
        only: For each file with this key, the patterns outside of which nothing runs.
        deny: Patterns of code that never runs.
        signed: Patterns of code that must be signed, and by whom.
        revoked: The revocation lists, as far as they are known.
        trusts_all: `TWINKLE_TRUST_REMOTE_CODE=1`: what is neither denied nor outside of `only` runs.
    """

    allow: tuple[str, ...] = ()
    only: tuple[tuple[str, ...], ...] = ()
    deny: tuple[str, ...] = ()
    signed: tuple[tuple[str, Signer], ...] = ()
    revoked: tuple[KnownList, ...] = ()
    trusts_all: bool = False

    @classmethod
    def load(cls, *, fetch: bool = False) -> Policy:
        """Read the files and the environment of this process.

        Patterns of the user's own file and of the project's both apply: a project cannot allow what the user denies.
        `allow` of a `twinkle.toml` in a folder that is not trusted is ignored; its restrictions apply. Revocation
        lists that only such a file names are not read; the last valid ones apply.

        Args:
            fetch: Code is about to be loaded: read the revocation lists again if that was not done within a minute,
                warn about stale ones, and raise an error for invalid ones.

        Raises:
            SettingsError: A table, a key, a type or a pattern is wrong.
            NotTrusted: With `fetch`, a revocation list has no valid signature, or is stale and `stale = "refuse"`.
        """
        tables = [_read(file) for file in config_files(os.environ)]
        sources = dict.fromkeys(source for table in tables for source in table["revoked"])
        lists = [known_list(source, fetch=fetch) for source in sources]
        policy = cls(
            allow=tuple(pattern for table in tables for pattern in table.get("allow", ())),
            only=tuple(tuple(table["only"]) for table in tables if "only" in table),
            deny=tuple(pattern for table in tables for pattern in table.get("deny", ())),
            signed=tuple(pair for table in tables for pair in table["signed"]),
            revoked=tuple(known for known in lists if known.source.is_read or known.revocations is not None),
            trusts_all=trusts_all(),
        )
        if fetch:
            policy._check_lists()
        return policy

    def refreshed(self, max_age: float) -> Policy:
        """Return the policy with each revocation list read again if that was not done within `max_age` seconds."""
        lists = (known_list(known.source, fetch=True, max_age=max_age) for known in self.revoked)
        return replace(self, revoked=tuple(lists))

    def _check_lists(self) -> None:
        for known in self.revoked:
            if known.error:
                raise NotTrusted(f"cannot determine whether code from a hub is revoked: {known.error}")
            if known.problem and known.source.refuses_stale:
                raise NotTrusted(f"cannot determine whether code from a hub is revoked: {known.problem}")
            if known.problem:
                warnings.warn(f"revocation list: {known.problem}", stacklevel=4)

    def denies(self, place: str, commit: str = "") -> str:
        """Return why nothing from `place` may run, or an empty string, ignoring case."""
        for pattern in self.deny:
            if matches(pattern.casefold(), place.casefold(), commit.casefold()):
                return f"[trust] deny has {pattern!r}"
        return ""

    def revokes(self, origin: Origin, digest: str = "") -> str:
        """Return why this code is revoked, or an empty string; `digest` is that of its tree, or a prefix of it."""
        for known in self.revoked:
            if known.revocations is not None and (reason := known.revocations.why(origin, digest)):
                return f"it was revoked: {safe_repr(reason)} (list number {known.revocations.sequence})"
        return ""

    def forbids(self, origin: Origin, digest: str = "") -> str:
        """Return why this code may not even be added, or an empty string."""
        if reason := self.revokes(origin, digest):
            return reason
        for patterns in self.only:
            if not any(matches(pattern, origin.place, origin.commit) for pattern in patterns):
                return f"[trust] only has {', '.join(map(repr, patterns)) or 'nothing'}"
        return self.denies(origin.place, origin.commit)

    def allows(self, origin: Origin) -> bool:
        """Return whether code that is not locked may run."""
        return self.trusts_all or any(matches(pattern, origin.place, origin.commit) for pattern in self.allow)

    def signers(self, origin: Origin) -> list[Signer]:
        """Return the signers whose signatures this code must have."""
        return [signer for pattern, signer in self.signed if matches(pattern, origin.place, origin.commit)]


def trust_table(file: ConfigFile) -> dict[str, Any]:
    """Return `[trust]` of a file, checked, whether the file is trusted or not."""
    path, raw = file.path, file.raw
    table = raw.get("trust", {})
    if not isinstance(table, dict):
        raise SettingsError(f"{path}: trust must be a table, got {table!r}")
    for key in table:
        if key not in _KEYS:
            raise SettingsError(f"{path}: [trust] {key}: unknown key, {nearest_or_all(key, _KEYS)}")
    for key in ("allow", "only", "deny"):
        _check_patterns(f"{path}: [trust] {key}", table.get(key, []))
    where, folder = f"{path}: [[trust.revoked]]", os.path.dirname(path)  # noqa: PTH120
    sources = sources_from_table(where, table.get("revoked", []), folder)
    return {**table, "signed": _signed(f"{path}: [trust.signed]", table.get("signed", {})), "revoked": sources}


def _read(file: ConfigFile) -> dict[str, Any]:
    """Return the part of `[trust]` of a file that applies."""
    table = trust_table(file)
    if file.is_trusted:
        return table
    revoked = tuple(replace(source, is_read=False) for source in table["revoked"])
    return {key: value for key, value in table.items() if key not in NEED_TRUST} | {"revoked": revoked}


def _check_patterns(where: str, value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(pattern, str) for pattern in value):
        raise SettingsError(f"{where} must be a list of patterns such as 'hf://org/*', got {value!r}")
    for pattern in value:
        check_pattern(where, pattern)


def _signed(where: str, table: Any) -> list[tuple[str, Signer]]:
    if not isinstance(table, dict):
        raise SettingsError(f"{where} must be a table of patterns and signers, got {table!r}")
    for pattern in table:
        check_pattern(where, pattern)
    return [(pattern, signer_from_table(f"{where} {pattern!r}", value)) for pattern, value in table.items()]


def why_not_trusted(policy: Policy, reference: HubReference, origin: Origin, *, locked: bool, digest: str = "") -> str:
    """Return why this code may not run, with the remedy, or an empty string; `digest` is that of its tree."""
    moved = f" ({reference.place} has moved there)" if reference.place != origin.place else ""
    requested_origin = Origin(reference.scheme, reference.repo, origin.commit)
    if reason := policy.revokes(requested_origin) or policy.revokes(origin, digest):
        return f"code from {origin}{moved} must not run any more: {reason}"
    if reason := policy.denies(reference.place) or policy.forbids(origin):
        return f"code from {origin.place}{moved} is forbidden: {reason}; ask the owner of that file"
    if locked or policy.allows(origin):
        return ""
    return (
        f"cannot run code from {origin.place}{moved}: it is not trusted, neither by [trust] allow in twinkle.toml nor "
        f"by {TRUST_VARIABLE}=1; to review and trust this commit, run: twinkle plugins add {origin}"
        f"{untrusted_suffix()}"
    )


def require_trust(
    policy: Policy, ways: list[tuple[HubReference, Origin]], tree: Tree, *, locked: bool, context: str
) -> None:
    """Require that one origin of a tree is trusted, and that it has the signatures that the policy requires.

    A tree with any revoked origin is refused.

    Raises:
        NotTrusted: The tree may not run.
    """
    reasons = []
    for _, origin in ways:
        if reason := policy.revokes(origin, tree.digest):
            raise NotTrusted(f"{context}: code from {origin} must not run any more: {reason}")
    for reference, origin in ways:
        reason = why_not_trusted(policy, reference, origin, locked=locked, digest=tree.digest)
        if not reason:
            for signer in policy.signers(origin):
                check_signature(tree, signer, context=context)
            return
        reasons.append(reason)
    raise NotTrusted(f"{context}: {reasons[0] if reasons else 'the origin of this code is unknown'}")
