"""User settings: `[plugins]` of twinkle.toml, environment variables, the path of the lock, and the trust switches.

A `twinkle.toml` or `twinkle.lock` in the working directory may have been written by someone else. Until the user trusts
that folder (`trust.folders`), its `twinkle.toml` may restrict (`disable`, `only`, `deny`, `signed`) and choose
(`prefer`), but it cannot let code run or override the user's own file, and its lock is ignored.
"""

# This runs at every start; with pathlib it would take a third longer.
# ruff: noqa: PTH100, PTH109, PTH110, PTH111, PTH113, PTH121, PTH123
from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import SettingsError
from .naming import canonical, nearest, nearest_or_all

CONFIG_VARIABLE = "TWINKLE_CONFIG"
DISABLE_VARIABLE = "TWINKLE_PLUGINS_DISABLE"
ONLY_VARIABLE = "TWINKLE_PLUGINS_ONLY"
PREFER_VARIABLE = "TWINKLE_PLUGINS_PREFER"
CONFIG_FILE = "twinkle.toml"
USER_FILE = "~/.config/twinkle/twinkle.toml"
VARIABLES = (DISABLE_VARIABLE, ONLY_VARIABLE, PREFER_VARIABLE)
ESSENTIAL = ("twinkle-core",)
_KEYS = ("disable", "only", "prefer")
_TABLES = ("plugins", "trust")


NEED_TRUST = ("allow", "revoked")
"""Keys that only a trusted file may set: one lets code run, one has addresses to download from."""
LOCK_NAME = "twinkle.lock"
LOCK_VARIABLE = "TWINKLE_LOCK"
CACHE_VARIABLE = "TWINKLE_CACHE_DIR"
HOME_VARIABLE = "XDG_CACHE_HOME"
FROZEN_VARIABLE = "TWINKLE_FROZEN"
TRUST_VARIABLE = "TWINKLE_TRUST_REMOTE_CODE"
_ON = ("1", "true", "yes", "on")
_OFF = ("", "0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Settings:
    """Which plugins the registry disables and which it prefers.

    Attributes:
        disabled: Plugins that are not used, by name or distribution.
        enabled_only: If given, the only plugins that are used.
        prefer: Map from `"kind:Name"` to the plugin that is used if several offer it.
        sources: Where each of `disable`, `only` and `prefer` was set; errors name it.
    """

    disabled: frozenset[str] = frozenset()
    enabled_only: frozenset[str] | None = None
    prefer: Mapping[str, str] = field(default_factory=dict, hash=False)
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Merge the configuration file and the environment; for each key, the environment overrides the file.

        The file is `$TWINKLE_CONFIG`, else `./twinkle.toml`, else `~/.config/twinkle/twinkle.toml`. With a
        `./twinkle.toml` in a folder that is not trusted, the user's own file applies too.

        Raises:
            SettingsError: The named file is missing or not TOML, or a table, a key or a type is wrong.
        """
        environ = os.environ if environ is None else environ
        values, sources = _from_file(environ)
        for key, value in _from_environment(environ).items():
            values[key] = value
            sources[key] = f"TWINKLE_PLUGINS_{key.upper()}"
        only = values.get("only")
        return cls(
            disabled=frozenset(values.get("disable", ())),
            enabled_only=None if only is None else frozenset(only),
            prefer=dict(values.get("prefer", {})),
            sources=sources,
        )

    def why_disabled(self, name: str, dist: str, essential: Iterable[str] = ESSENTIAL) -> str:
        """Return why a plugin is not used, or an empty string.

        Args:
            name: The name of the plugin, which its manifest gives.
            dist: The distribution, repository or folder that it came from.
            essential: Distributions that `only` does not disable, nor the distributions that parts of them moved to.
        """
        known = {canonical(name), canonical(dist)}
        if known & {canonical(disabled) for disabled in self.disabled}:
            return f"disabled by {self.source('disable')}"
        if self.enabled_only is None or known & {canonical(enabled) for enabled in self.enabled_only}:
            return ""
        from .index import successors_of

        # The manifest's own `formerly` does not count: any plugin may write it.
        if canonical(dist) in {*map(canonical, essential), *successors_of(essential)}:
            return ""
        return f"not among the only plugins enabled by {self.source('only')}"

    def source(self, key: str) -> str:
        """Return where `key` was set, for an error message."""
        return self.sources.get(key, "the settings of this registry")


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A configuration file that was read.

    Attributes:
        path: Its path.
        raw: Its content; every table in it is a known one.
        is_trusted: It was named, is the user's own, or is in a folder that the user trusts.
    """

    path: str
    raw: Mapping[str, Any]
    is_trusted: bool

    @property
    def plugins(self) -> dict[str, Any]:
        """The table `[plugins]`, checked."""
        table = self.raw.get("plugins", {})
        if not isinstance(table, dict):
            raise SettingsError(f"{self.path}: plugins must be a table, got {table!r}")
        for key, value in table.items():
            if key not in _KEYS:
                raise SettingsError(f"{self.path}: [plugins] {key}: unknown key, {nearest_or_all(key, _KEYS)}")
            _check_value(f"{self.path}: [plugins] {key}", key, value)
        return table


def read_config(path: str, environ: Mapping[str, str] | None = None) -> ConfigFile:
    """Read a configuration file and determine whether it may let code run.

    Raises:
        SettingsError: It is not TOML, or has an unknown table.
    """
    import tomllib

    try:
        with open(path, "rb") as file:
            content = file.read()
        raw = tomllib.loads(content.decode())
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{path}: cannot be read as TOML: {error}") from error
    refuse_unknown_tables(raw, path)
    is_own = bool((os.environ if environ is None else environ).get(CONFIG_VARIABLE)) or _is_users(path)
    if not is_own:
        from .trust.folders import is_trusted_file

        is_own = is_trusted_file(path, content)
    return ConfigFile(path, raw, is_own)


def config_files(environ: Mapping[str, str]) -> list[ConfigFile]:
    """Return the configuration file, if there is one, and the user's own, if that is another."""
    user = os.path.expanduser(USER_FILE)
    paths = [path for path in (config_file(environ), user) if path and os.path.isfile(path)]
    if len(paths) > 1 and os.path.samefile(*paths):
        paths.pop()
    return [read_config(path, environ) for path in paths]


def _is_users(path: str) -> bool:
    user = os.path.expanduser(USER_FILE)
    return os.path.isfile(user) and os.path.samefile(path, user)


def _from_file(environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    path = config_file(environ)
    if not path:
        return {}, {}
    file = read_config(path, environ)
    files = [file] if file.is_trusted else config_files(environ)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for own in reversed(files):  # the user's file first: the other one can only add restrictions
        for key, value in own.plugins.items():
            values[key] = _added(key, values[key], value) if key in values else value
            place = f"[plugins] {key} of {own.path}"
            sources[key] = f"{sources[key]} and {place}" if key in sources else place
    return values, sources


def _added(key: str, users: Any, folders: Any) -> Any:
    """Merge a value of the user's file with that of a folder's file, which must not remove a restriction."""
    if key == "disable":
        return [*users, *folders]
    return {**folders, **users} if key == "prefer" else users


def refuse_unknown_tables(raw: Mapping[str, Any], path: str) -> None:
    """Raise `SettingsError` if a configuration file has other tables than `[plugins]` and `[trust]`.

    A misspelt `[trust]` would otherwise disable the policy silently.
    """
    for key, value in raw.items():
        if key in _TABLES:
            continue
        if isinstance(value, dict):
            close = nearest(key, _TABLES)
            near = f"nearest: [{close[0]}]" if close else "known: [plugins], [trust]"
            raise SettingsError(f"{path}: unknown table [{key}], {near}")
        raise SettingsError(f"{path}: {key}: unknown key; every key must be in [plugins] or [trust]")


def config_file(environ: Mapping[str, str]) -> str:
    """Return the path of the configuration file, or an empty string if there is none."""
    if named := environ.get(CONFIG_VARIABLE):
        path = os.path.expanduser(named)
        if not os.path.isfile(path):
            raise SettingsError(f"{CONFIG_VARIABLE} must be the path of a file, got {named!r}")
        return path
    for candidate in (CONFIG_FILE, os.path.expanduser(USER_FILE)):
        if os.path.isfile(candidate):
            return os.path.abspath(candidate)
    return ""


def _check_value(where: str, key: str, value: Any) -> None:
    if key == "prefer":
        if not isinstance(value, dict) or not all(isinstance(v, str) and v for v in value.values()):
            raise SettingsError(f'{where} must be a table {{ "kind:Name" = "plugin" }}, got {value!r}')
        for name in value:
            _check_preferred(where, name)
    elif not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
        raise SettingsError(f"{where} must be a list of plugin names, got {value!r}")


def _check_preferred(where: str, name: str) -> None:
    kind, _, component = name.partition(":")
    if not kind or not component:
        raise SettingsError(f"{where} must have keys such as 'loss:GRPOLoss', got {name!r}")


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    for name in environ:
        if name.startswith("TWINKLE_PLUGINS_") and name not in VARIABLES:
            raise SettingsError(f"{name}: unknown environment variable, {nearest_or_all(name, VARIABLES)}")
    values: dict[str, Any] = {}
    for key, variable in zip(("disable", "only"), VARIABLES, strict=False):
        if variable in environ:
            values[key] = _parts(environ[variable])
    if values.get("only") == []:
        # `TWINKLE_PLUGINS_ONLY=` is how a shell unsets a variable for one command; it does not mean "no plugins".
        values["only"] = None
    if PREFER_VARIABLE in environ:
        values["prefer"] = dict(_preference(part) for part in _parts(environ[PREFER_VARIABLE]))
    return values


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _preference(part: str) -> tuple[str, str]:
    name, _, dist = (piece.strip() for piece in part.partition("="))
    if not dist:
        raise SettingsError(f"{PREFER_VARIABLE} must be kind:Name=plugin, got {part!r}")
    _check_preferred(PREFER_VARIABLE, name)
    return name, dist


def lock_path() -> str:
    """Return the path of the lock, existing or not: `$TWINKLE_LOCK`, else `twinkle.lock` in the working directory.

    Raises:
        SettingsError: The variable names something that is not a file in a folder.
    """
    named = os.environ.get(LOCK_VARIABLE, "")
    path = os.path.abspath(os.path.expanduser(named or LOCK_NAME))
    if os.path.exists(path) and not os.path.isfile(path):
        raise SettingsError(f"the lock must be a file, got {path}; set {LOCK_VARIABLE} to the path of a file")
    return path


def lock_is_named() -> bool:
    """Return whether the user named the lock, so that it is trusted without a record."""
    return bool(os.environ.get(LOCK_VARIABLE))


def is_trusted_lock(path: str, content: bytes) -> bool:
    """Return whether the lock of this run, which has this content, was named or is in a folder that the user trusts."""
    if lock_is_named():
        return True
    from .trust.folders import is_trusted_file

    return is_trusted_file(path, content)


def is_frozen() -> bool:
    """Return whether only what `twinkle.lock` lists may run (`TWINKLE_FROZEN=1` or `twinkle --frozen`)."""
    return _switch(FROZEN_VARIABLE)


def trusts_all() -> bool:
    """Return whether code from a hub runs without a review (`TWINKLE_TRUST_REMOTE_CODE=1`)."""
    return _switch(TRUST_VARIABLE)


def _switch(variable: str) -> bool:
    value = os.environ.get(variable, "").strip().lower()
    if value not in (*_ON, *_OFF):
        raise SettingsError(f"{variable} must be 1 or 0, got {value!r}")
    return value in _ON


def untrusted_notice() -> str:
    """Return which settings of the working directory are ignored and how to change that, or an empty string."""
    ignored = [*_of_config(), *_of_lock()]
    if not ignored:
        return ""
    import shlex

    folder = os.getcwd()
    verb = "is" if len(ignored) == 1 else "are"
    return (
        f"{' and '.join(ignored)} in {folder} {verb} ignored, because this folder is not trusted or was changed "
        f"since; review it, then trust it: twinkle plugins trust {shlex.quote(folder)}"
    )


def untrusted_suffix() -> str:
    """Return the notice as the end of an error's text."""
    notice = untrusted_notice()
    return f"; {notice}" if notice else ""


def _of_config() -> list[str]:
    if os.environ.get(CONFIG_VARIABLE) or not os.path.isfile(CONFIG_FILE):
        return []
    file = read_config(config_file(os.environ))
    if file.is_trusted:
        return []
    table = file.raw.get("trust", {})
    keys = [f"[trust] {key}" for key in NEED_TRUST if isinstance(table, dict) and table.get(key)]
    return [f"{', '.join([*keys, *_hidden(file)])} of {CONFIG_FILE}"] if keys or _hidden(file) else []


def _hidden(file: ConfigFile) -> list[str]:
    """Return which settings of the user's own file this file would replace if it were trusted."""
    user = os.path.expanduser(USER_FILE)
    users = read_config(user).plugins if os.path.isfile(user) else {}
    replaced = [key for key, value in users.items() if file.plugins.get(key) != value]
    return [f"[plugins] in place of {USER_FILE}"] if replaced else []


def _of_lock() -> list[str]:
    if lock_is_named() or not os.path.isfile(LOCK_NAME):
        return []
    path = lock_path()
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError:
        return []  # an invalid lock is reported by the code that needs it
    return [] if is_trusted_lock(path, content) else [LOCK_NAME]
