"""Which plugins a person switched off or prefers: `[plugins]` of twinkle.toml, then the environment."""

# This runs at every start, and pathlib would be a quarter of what it costs.
# ruff: noqa: PTH100, PTH111, PTH113, PTH123
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
USER_FILE = "~/.config/twinkle/twinkle.toml"
VARIABLES = (DISABLE_VARIABLE, ONLY_VARIABLE, PREFER_VARIABLE)
_KEYS = ("disable", "only", "prefer")
_TABLES = ("plugins", "trust")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the registry leaves out and whom it prefers.

    Attributes:
        disabled: Plugins that are not used, by name or distribution.
        enabled_only: If given, the only plugins that are used.
        prefer: `"kind:Name"` to the plugin that wins where several offer it.
        sources: Where each of `disable`, `only` and `prefer` was set; errors name it.
    """

    disabled: frozenset[str] = frozenset()
    enabled_only: frozenset[str] | None = None
    prefer: Mapping[str, str] = field(default_factory=dict, hash=False)
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Merge the configuration file and the environment, which wins key by key.

        The file is `$TWINKLE_CONFIG`, else `./twinkle.toml`, else `~/.config/twinkle/twinkle.toml`.

        Raises:
            SettingsError: The file is missing though named or is not TOML, or a table, a key or a type is wrong.
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

    def why_disabled(self, names: Iterable[str]) -> str:
        """Return why a plugin known under `names` is not used, or an empty string."""
        known = {canonical(name) for name in names}
        if known & {canonical(name) for name in self.disabled}:
            return f"disabled by {self.source('disable')}"
        if self.enabled_only is not None and not known & {canonical(name) for name in self.enabled_only}:
            return f"not among the only plugins enabled by {self.source('only')}"
        return ""

    def source(self, key: str) -> str:
        """Return where `key` was set, for an error message."""
        return self.sources.get(key, "the settings of this registry")


def _from_file(environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    path = config_file(environ)
    if not path:
        return {}, {}
    import tomllib

    try:
        with open(path, "rb") as file:
            raw = tomllib.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{path}: cannot be read as TOML: {error}") from error
    refuse_unknown_tables(raw, path)
    table = raw.get("plugins", {})
    if not isinstance(table, dict):
        raise SettingsError(f"{path}: plugins: expected a table [plugins], found {table!r}")
    for key, value in table.items():
        if key not in _KEYS:
            raise SettingsError(f"{path}: [plugins] {key}: unknown key, {nearest_or_all(key, _KEYS)}")
        _check_value(f"{path}: [plugins] {key}", key, value)
    return dict(table), {key: f"[plugins] {key} of {path}" for key in table}


def refuse_unknown_tables(raw: Mapping[str, Any], path: str) -> None:
    """Raise `SettingsError` if a configuration file says more than `[plugins]` and `[trust]`.

    A misspelt `[trust]` would otherwise switch the policy off, and nobody would know.
    """
    for key, value in raw.items():
        if key in _TABLES:
            continue
        if isinstance(value, dict):
            close = nearest(key, _TABLES)
            near = f"nearest: [{close[0]}]" if close else "known: [plugins], [trust]"
            raise SettingsError(f"{path}: unknown table [{key}], {near}")
        raise SettingsError(f"{path}: {key}: unknown key; every key stands below [plugins] or [trust]")


def config_file(environ: Mapping[str, str]) -> str:
    """Return the path of the configuration file, or an empty text where there is none."""
    if named := environ.get(CONFIG_VARIABLE):
        path = os.path.expanduser(named)
        if not os.path.isfile(path):
            raise SettingsError(f"{CONFIG_VARIABLE} names {named}, which is not a file")
        return path
    for candidate in ("twinkle.toml", os.path.expanduser(USER_FILE)):
        if os.path.isfile(candidate):
            return os.path.abspath(candidate)
    return ""


def _check_value(where: str, key: str, value: Any) -> None:
    if key == "prefer":
        if not isinstance(value, dict) or not all(isinstance(v, str) and v for v in value.values()):
            raise SettingsError(f'{where}: expected {{ "kind:Name" = "plugin" }}, found {value!r}')
        for name in value:
            _check_preferred(where, name)
    elif not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
        raise SettingsError(f"{where}: expected a list of plugin names, found {value!r}")


def _check_preferred(where: str, name: str) -> None:
    kind, _, component = name.partition(":")
    if not kind or not component:
        raise SettingsError(f"{where}: expected 'kind:Name' such as 'loss:GRPOLoss', found {name!r}")


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    for name in environ:
        if name.startswith("TWINKLE_PLUGINS_") and name not in VARIABLES:
            raise SettingsError(f"{name}: unknown environment variable, {nearest_or_all(name, VARIABLES)}")
    values: dict[str, Any] = {}
    for key, variable in zip(("disable", "only"), VARIABLES, strict=False):
        if variable in environ:
            values[key] = _parts(environ[variable])
    if values.get("only") == []:
        # `TWINKLE_PLUGINS_ONLY=` is how a shell unsets a variable for one command, not a wish for no plugins.
        values["only"] = None
    if PREFER_VARIABLE in environ:
        values["prefer"] = dict(_preference(part) for part in _parts(environ[PREFER_VARIABLE]))
    return values


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _preference(part: str) -> tuple[str, str]:
    name, _, dist = (piece.strip() for piece in part.partition("="))
    if not dist:
        raise SettingsError(f"{PREFER_VARIABLE}: expected kind:Name=plugin, found {part!r}")
    _check_preferred(PREFER_VARIABLE, name)
    return name, dist
