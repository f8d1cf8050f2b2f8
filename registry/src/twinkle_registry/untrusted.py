"""What a folder that is not trusted asks for in vain, in one line with the command that trusts it."""

# This runs at every start, and os.path takes a tenth of pathlib's time.
# ruff: noqa: PTH109, PTH113, PTH123
from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .locked import LOCK_NAME, lock_is_named, lock_path, may_obey_lock
from .settings import CONFIG_FILE, CONFIG_VARIABLE, USER_FILE, config_file, read_config

if TYPE_CHECKING:
    from .settings import ConfigFile


def untrusted_notice() -> str:
    """Return which settings of the working directory are not obeyed and how to change that, or an empty text."""
    ignored = [*_of_config(), *_of_lock()]
    if not ignored:
        return ""
    import shlex

    folder = os.getcwd()
    verb = "is" if len(ignored) == 1 else "are"
    return (
        f"{' and '.join(ignored)} in {folder} {verb} not obeyed, because this folder is not trusted or was changed "
        f"since; look at what it asks for, and trust it: twinkle plugins trust {shlex.quote(folder)}"
    )


def and_untrusted() -> str:
    """Return the same as the end of an error's text."""
    notice = untrusted_notice()
    return f"; {notice}" if notice else ""


def _of_config() -> list[str]:
    if os.environ.get(CONFIG_VARIABLE) or not os.path.isfile(CONFIG_FILE):
        return []
    file = read_config(config_file(os.environ))
    if file.is_trusted:
        return []
    from .code.policy import NEED_TRUST

    asked = file.raw.get("trust", {})
    keys = [f"[trust] {key}" for key in NEED_TRUST if isinstance(asked, dict) and asked.get(key)]
    return [f"{', '.join([*keys, *_hidden(file)])} of {CONFIG_FILE}"] if keys or _hidden(file) else []


def _hidden(file: ConfigFile) -> list[str]:
    """Return what a trusted file would hide of the user's own."""
    user = os.path.expanduser(USER_FILE)  # noqa: PTH111
    users = read_config(user).plugins if os.path.isfile(user) else {}
    kept = [key for key, value in users.items() if file.plugins.get(key) != value]
    return [f"[plugins] in place of {USER_FILE}"] if kept else []


def _of_lock() -> list[str]:
    if lock_is_named() or not os.path.isfile(LOCK_NAME):
        return []
    path = lock_path()
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError:
        return []  # whoever needs the lock says what is wrong with it
    return [] if may_obey_lock(path, content) else [LOCK_NAME]
