"""Functions on names: nearest names for error messages, and normalized names of distributions."""

from __future__ import annotations

from collections.abc import Iterable

PROJECT = "twinkle"
CODE_PACKAGE = "twinkle_registry.code"
"""Parent package of the modules that code from a hub is imported as; the name is part of pickles."""


def nearest(name: str, names: Iterable[str], n: int = 3) -> list[str]:
    """Return up to `n` of `names` that are similar to `name`, ignoring case, the closest first."""
    import difflib

    by_lower: dict[str, list[str]] = {}
    for candidate in dict.fromkeys(names):
        by_lower.setdefault(candidate.lower(), []).append(candidate)
    lowered = name.lower()
    short = [c for c in by_lower if _initials(lowered) == c or _initials(c) == lowered]
    close = short + [c for c in difflib.get_close_matches(lowered, by_lower, n, 0.6) if c not in short]
    # "GRPO" must match "GRPOLoss", whose similarity ratio is too low.
    parts = [c for c in sorted(by_lower) if len(lowered) > 2 and lowered in c and c not in close]
    return [candidate for key in close + parts for candidate in by_lower[key]][:n]


def _initials(name: str) -> str:
    """Return `lr` for `learning_rate`, and `r` for `rank`."""
    return "".join(word[:1] for word in name.replace("-", "_").split("_"))


def nearest_or_all(name: str, names: Iterable[str]) -> str:
    """Return a hint that lists the names near `name`, or all names if none is near."""
    known = sorted(set(names))
    if close := nearest(name, known):
        return f"nearest: {quoted(close)}"
    if not known:
        return "there are none"
    shown = quoted(known[:12])
    return f"known: {shown}" + (f" and {len(known) - 12} more" if len(known) > 12 else "")


def quoted(names: Iterable[str]) -> str:
    """Join names as `'a', 'b'`."""
    return ", ".join(repr(name) for name in names)


def safe_repr(text: str) -> str:
    """Return an untrusted string quoted for a terminal, with control and direction characters escaped."""
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text[:200])
    return f"'{escaped}'" + ("..." if len(text) > 200 else "")


def canonical(dist: str) -> str:
    """Return the normalized form of a distribution name, so that `Acme_Losses` is `acme-losses`."""
    text = dist.lower().replace("_", "-").replace(".", "-")
    while "--" in text:
        text = text.replace("--", "-")
    return text
