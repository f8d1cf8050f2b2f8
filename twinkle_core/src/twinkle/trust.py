"""The published guard of remote code: whether everything is trusted, and a check of values that could be code."""

from collections.abc import Iterable, Mapping
from typing import Any

from twinkle.errors import NotTrusted


def trust_remote_code() -> bool:
    """Return whether code from a hub runs without review: `TWINKLE_TRUST_REMOTE_CODE=1`.

    False by default; the published default is True. Code that you added with `twinkle plugins add` runs in any case.
    """
    from twinkle_registry.settings import trusts_all

    return trusts_all()


def check_unsafe(*args: Any, **kwargs: Any) -> None:
    """Refuse functions and classes among the arguments, and inside of their lists and mappings, unless all is trusted.

    For values that came from somebody else, such as the arguments of a request.

    Raises:
        NotTrusted: an argument is callable; the message names it.
    """
    if trust_remote_code():
        return
    for name, value in [*enumerate(args), *kwargs.items()]:
        if (path := _callable_in(value)) is not None:
            raise NotTrusted(
                f"argument {name!r}{path} is a function or a class, and code from elsewhere is not trusted; give the "
                "name of a component, or set TWINKLE_TRUST_REMOTE_CODE=1"
            )


def _callable_in(value: Any) -> str | None:
    """Return the path to the first callable inside of a value, "" for the value itself; None if there is none."""
    if callable(value):
        return ""
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        entries = value.items()
    elif isinstance(value, list | tuple | set | frozenset):
        entries = enumerate(value)
    for key, entry in entries:
        if (path := _callable_in(entry)) is not None:
            return f"[{key!r}]{path}"
    return None
