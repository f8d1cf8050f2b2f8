"""What every start asks before the code store is loaded: is there a lock, and which switches are set."""

# This runs at every start, and os.path takes a tenth of pathlib's time.
# ruff: noqa: PTH100, PTH110, PTH111, PTH113, PTH123
from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .errors import SettingsError

if TYPE_CHECKING:
    from .manifest import PluginRecord

LOCK_NAME = "twinkle.lock"
LOCK_VARIABLE = "TWINKLE_LOCK"
FROZEN_VARIABLE = "TWINKLE_FROZEN"
TRUST_VARIABLE = "TWINKLE_TRUST_REMOTE_CODE"
_ON = ("1", "true", "yes", "on")
_OFF = ("", "0", "false", "no", "off")


def lock_path() -> str:
    """Return where the lock of this run is or would be: `$TWINKLE_LOCK`, else `twinkle.lock` in the working directory.

    Raises:
        SettingsError: The variable names something that is not a file in a folder.
    """
    named = os.environ.get(LOCK_VARIABLE, "")
    path = os.path.abspath(os.path.expanduser(named or LOCK_NAME))
    if os.path.exists(path) and not os.path.isfile(path):
        raise SettingsError(f"{path} is not a file; name the lock file by {LOCK_VARIABLE}")
    return path


def lock_is_named() -> bool:
    """Say whether the user named the lock, so that it needs no other trust."""
    return bool(os.environ.get(LOCK_VARIABLE))


def may_obey_lock(path: str, content: bytes) -> bool:
    """Say whether the lock of this run, which has this content, was named or lies in a folder that the user trusts."""
    if lock_is_named():
        return True
    from .folder_trust import is_trusted_file

    return is_trusted_file(path, content)


def is_frozen() -> bool:
    """Say whether only what `twinkle.lock` lists may run (`TWINKLE_FROZEN=1` or `twinkle --frozen`)."""
    return _switch(FROZEN_VARIABLE)


def trusts_all() -> bool:
    """Say whether code from a Hub runs without anybody having looked at it (`TWINKLE_TRUST_REMOTE_CODE=1`)."""
    return _switch(TRUST_VARIABLE)


def locked_plugins() -> list[PluginRecord]:
    """Return a record of every Hub plugin that the lock lists; without a lock, none, and nothing is imported."""
    try:
        with open(lock_path(), "rb") as file:
            content = file.read()
    except OSError:
        # Whoever needs the lock says what is wrong with it; most runs have none.
        return []
    if b"[[hub]]" not in content:
        # To parse a lock of installed plugins costs a fifth of a start, and says nothing here.
        return []
    from .code.plugins import records_of_lock

    return records_of_lock()


def _switch(variable: str) -> bool:
    value = os.environ.get(variable, "").strip().lower()
    if value not in (*_ON, *_OFF):
        raise SettingsError(f"{variable}: expected 1 or 0, found {value!r}")
    return value in _ON
