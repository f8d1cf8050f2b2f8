"""The configuration file of `twinkle serve`: its schema, its validation, and where each effective value comes from.

The schema is derived from `settings.Settings`. A field of a plain type belongs to the section that `SECTIONS` names, or
to the top level; a nested dataclass is a section of its own.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from twinkle.errors import ConfigError
from twinkle_server.settings import Settings, bare, build, hints_of, is_secret

if TYPE_CHECKING:
    from pydantic import BaseModel

SECTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "network": {name: name for name in ("host", "port", "root_path", "trusted_proxies", "tls_cert", "tls_key")},
    "access": {"auth": "auth", "local_metrics": "local_metrics"},
    "engine": {
        "backend": "backend",
        "pass_tokens": "pass_tokens",
        "max_pass_seconds": "max_pass_seconds",
        "snapshot_steps": "snapshot_steps",
        "full_parameters": "full_parameters",
        "options": "extra",
    },
    "losses": {
        "allowed": "losses",
        "custom": "custom_losses",
        "strict": "strict_losses",
        "workers": "loss_workers",
        "in_process": "in_process_losses",
    },
    "traces": {"otlp_endpoint": "otlp_endpoint", "share": "trace_share"},
    "start": {"take_over": "take_over", "accept_base": "accept_base"},
}
"""Sections of the file: its keys, and the field of `Settings` that each key sets."""
DEFAULT: Final = "default"
REQUIRED: Final = ("model", "data")
HIDDEN: Final = "(not shown)"
_SECRET_NAME = re.compile(r"TOKEN(?!IZER|S)|KEY|SECRET|PASSW|CREDENTIAL|COOKIE|_AUTH|AUTHORIZATION", re.IGNORECASE)
_PASSWORD = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]*@")


@dataclass(frozen=True, slots=True)
class Entry:
    """A setting.

    Attributes:
        key: its place in the file, such as `network.port`.
        path: its place in `Settings`: one name, or the names of a group and of its field.
        annotation: its type, with constraints.
        default: its default; `dataclasses.MISSING` if it is required.
        meaning: from the docstring.
    """

    key: str
    path: tuple[str, ...]
    annotation: Any
    default: Any
    meaning: str

    @property
    def parts(self) -> tuple[str, ...]:
        """The key as names of sections and of the key in the last one."""
        return tuple(self.key.split("."))

    def value(self, settings: Settings) -> Any:
        """Return the value of the setting."""
        value: Any = settings
        for name in self.path:
            value = getattr(value, name)
        return value


def entries() -> list[Entry]:
    """Return all settings in the order of the file: the top level, the sections, and the nested groups."""
    found = list(_entries(Settings, (), ()))
    return sorted(found, key=lambda entry: _order(entry.parts))


def _order(parts: tuple[str, ...]) -> tuple[int, int]:
    if len(parts) == 1:
        return (0, 0)
    known = list(SECTIONS)
    return (1, known.index(parts[0])) if parts[0] in known else (2, 0)


def _entries(kind: type, path: tuple[str, ...], section: tuple[str, ...]) -> Iterator[Entry]:
    hints, meanings = hints_of(kind), attributes_of(kind)
    places = {name: (group, key) for group, keys in SECTIONS.items() for key, name in keys.items()} if not path else {}
    for item in fields(kind):
        nested = bare(hints[item.name])
        if is_dataclass(nested) and isinstance(nested, type):
            yield from _entries(nested, (*path, item.name), (*section, item.name))
            continue
        key = ".".join(places.get(item.name, (*section, item.name)))
        yield Entry(key, (*path, item.name), hints[item.name], default_of(item), meanings.get(item.name, ""))


def default_of(item: "Field[Any]") -> Any:
    """Return the default of a dataclass's field; `MISSING` if it is required."""
    return item.default if item.default_factory is MISSING else item.default_factory()


def attributes_of(kind: type) -> dict[str, str]:
    """Return what the section `Attributes` of a class's docstring says about each field."""
    section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
    found = re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def schema() -> "type[BaseModel]":
    """Return the pydantic model of the file."""
    tree: dict[str, Any] = {}
    for entry in entries():
        place = tree
        for name in entry.parts[:-1]:
            place = place.setdefault(name, {})
        place[entry.parts[-1]] = entry
    return _model("serve", tree)


def _model(name: str, tree: Mapping[str, Any]) -> "type[BaseModel]":
    from pydantic import BeforeValidator, ConfigDict, Field, create_model

    made: dict[str, Any] = {}
    for key, part in tree.items():
        if isinstance(part, Entry):
            default: Any = ... if part.default is MISSING else part.default
            annotation = Annotated[part.annotation, BeforeValidator(_not_bool)] if _is_number(part) else part.annotation
            made[key] = (annotation, Field(default, description=part.meaning))
        else:
            group = _model(key, part)
            made[key] = (group, Field(default_factory=group, description=f"See the section `{key}`."))
    config = ConfigDict(extra="forbid", protected_namespaces=(), hide_input_in_errors=True)
    return create_model(name, __config__=config, **made)


def _is_number(entry: Entry) -> bool:
    return bare(entry.annotation) in (int, float)


def _not_bool(value: Any) -> Any:
    """Refuse `true` as a number, which Python reads as 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


@dataclass(frozen=True, slots=True)
class Effective:
    """Settings with their origins.

    Attributes:
        settings: the checked settings.
        origins: where each value comes from, by key of the file: "default", a file, a flag, or a variable.
        missing: keys of required settings that are not set.
    """

    settings: Settings
    origins: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


def load(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    sources: Mapping[str, str] | None = None,
    *,
    partial: bool = False,
) -> Effective:
    """Return the effective settings of a file and of flags, which override the file.

    Args:
        file: of YAML; None uses defaults.
        flags: values by key of the file, such as `{"network.port": 0}`.
        sources: the name of the flag or variable that set each key.
        partial: accept that required settings are missing; they are empty then.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, a value is invalid, or a required setting is missing;
            all problems are in one message.
    """
    from twinkle_cli.configuration import merge, options_of, read_config, validate

    flags, sources, label = flags or {}, sources or {}, str(file or "")
    of_file = _without_nulls(read_config(str(file))) if file is not None else {}
    values = merge(of_file, _nested(flags))
    missing = tuple(name for name in REQUIRED if values.get(name) in (None, ""))
    _check_secrets(values)
    model = schema()
    checked = validate(
        model,
        {**values, **dict.fromkeys(missing, "")},
        {option.name: option for option in options_of(model)},
        what=label or "the service",
        sources={tuple(key.split(".")): source for key, source in sources.items()},
        source=label,
        problems=[f"{_list(missing)} must be set: {_REMEDIES}"] if missing and not partial else [],
    )
    plain = _collect(checked)
    origins = {
        entry.key: sources.get(entry.key) or (label if _has(of_file, entry.parts) else DEFAULT) for entry in entries()
    }
    return Effective(build(Settings, plain), origins, missing)


def _check_secrets(values: Mapping[str, Any]) -> None:
    """Check secrets before all other values, because messages about those contain the value."""
    for entry in entries():
        if not is_secret(entry.annotation) or not _has(values, entry.parts):
            continue
        value: Any = values
        for part in entry.parts:
            value = value[part]
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{entry.key}: must be a text (its value is not shown); quote it in the file")


_REMEDIES: Final = "`twinkle serve MODEL --data DIR`, or `model:` and `data:` in the file of --config"


def _list(names: tuple[str, ...]) -> str:
    return " and ".join(names)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *groups, last = key.split(".")
        place = nested
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = value
    return nested


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a file without empty sections (`network:` without keys)."""
    return {key: {} if value is None and key not in _TOP else value for key, value in values.items()}


_TOP: Final = frozenset(entry.key for entry in entries() if "." not in entry.key)


def _has(values: Any, parts: tuple[str, ...]) -> bool:
    for part in parts:
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True


def _collect(checked: "BaseModel") -> dict[str, Any]:
    """Return the values of a checked file by field of `Settings`."""
    plain: dict[str, Any] = {}
    for entry in entries():
        value: Any = checked
        for part in entry.parts:
            value = getattr(value, part)
        place = plain
        for name in entry.path[:-1]:
            place = place.setdefault(name, {})
        place[entry.path[-1]] = value
    return plain


def shown(entry: Entry, settings: Settings) -> Any:
    """Return a value as it may be printed: secrets are replaced by a note."""
    value = entry.value(settings)
    if is_secret(entry.annotation) and value:
        return HIDDEN
    return _masked(value)


def _masked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            name: HIDDEN if _SECRET_NAME.search(str(name)) and isinstance(item, str) else _masked(item)
            for name, item in value.items()
        }
    if isinstance(value, tuple | list):
        return [_masked(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return _PASSWORD.sub(f"{HIDDEN}@", value) if isinstance(value, str) else value


def describe(effective: Effective) -> list[dict[str, Any]]:
    """Return each setting with its value, its origin and its meaning, without secrets."""
    return [
        {
            "key": entry.key,
            "value": None if entry.key in effective.missing else shown(entry, effective.settings),
            "origin": effective.origins[entry.key],
            "meaning": entry.meaning,
        }
        for entry in entries()
    ]


def render(effective: Effective) -> str:
    """Return the effective settings as YAML, which `load` accepts, with the origin of each value in a comment."""
    lines: list[str] = []
    group: tuple[str, ...] = ()
    for row in describe(effective):
        *sections, key = row["key"].split(".")
        for depth, name in enumerate(sections):
            if group[: depth + 1] != tuple(sections[: depth + 1]):
                lines.append(f"{'  ' * depth}{name}:")
        group = tuple(sections)
        origin = "required" if row["key"] in effective.missing else row["origin"]
        lines.append(f"{'  ' * len(sections)}{key}: {_scalar(row['value'])}  # {origin}")
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
