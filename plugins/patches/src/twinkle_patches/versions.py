"""The versions of a library that a patch supports, and whether the installed one is among them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from twinkle.errors import ArgumentError, PatchError


class Verdict(NamedTuple):
    """What is known of one library: `installed` is its version or None, `known` whether the patch knows it."""

    library: str
    wanted: str
    installed: str | None
    known: bool

    def __str__(self) -> str:
        """Return `transformers <5 (installed: 5.23.0)`."""
        return f"{self.library} {self.wanted} ({f'installed: {self.installed}' if self.installed else 'not installed'})"


def verdicts(patch: Any) -> list[Verdict]:
    """Return one verdict for each library that a patch (an instance or a class) names in `versions`.

    Raises:
        ArgumentError: `versions` is not a mapping from distributions to version specifiers.
    """
    from packaging.specifiers import InvalidSpecifier

    versions = getattr(patch, "versions", {})
    if not isinstance(versions, Mapping) or not all(isinstance(x, str) for pair in versions.items() for x in pair):
        raise ArgumentError(f"{_name(patch)}.versions is {versions!r}; write it as {{'transformers': '>=5,<6'}}")
    try:
        return [_verdict(library, wanted) for library, wanted in versions.items()]
    except InvalidSpecifier as error:
        raise ArgumentError(f"{_name(patch)}.versions: {error}; write it as {{'transformers': '>=5,<6'}}") from error


def check_versions(patch: Any) -> None:
    """Refuse a patch whose author does not know what is installed: it would change code that he has not seen.

    Raises:
        PatchError: an installed version is not among those that it knows, or the library is not there.
    """
    if strange := [verdict for verdict in verdicts(patch) if not verdict.known]:
        otherwise = getattr(patch, "otherwise", "")
        way = otherwise or "leave the patch out, or take a version of it that knows yours"
        raise PatchError(f"{_name(patch)} is for {', '.join(map(str, strange))}; {way}")


def _verdict(library: str, wanted: str) -> Verdict:
    from importlib.metadata import PackageNotFoundError, version

    from packaging.specifiers import SpecifierSet

    allowed = SpecifierSet(wanted)
    try:
        installed = version(library)
    except PackageNotFoundError:
        return Verdict(library, wanted, None, False)
    return Verdict(library, wanted, installed, allowed.contains(installed, prereleases=True))


def _name(patch: Any) -> str:
    return str(getattr(patch, "__name__", type(patch).__name__))
