"""Patterns of code: `scheme://org/*` or `scheme://org/repo@commit*`, as policies and revocation lists write them."""

from __future__ import annotations

from fnmatch import fnmatchcase

from ..errors import SettingsError


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


def check_pattern(where: str, pattern: str) -> None:
    """Raise `SettingsError` if a text is not a pattern."""
    if pattern != "*" and ("://" not in pattern or pattern.endswith("/") or "#" in pattern):
        raise SettingsError(
            f"{where}: expected a pattern such as 'hf://org/*' or 'hf://org/repo@commit', not {pattern!r}"
        )
