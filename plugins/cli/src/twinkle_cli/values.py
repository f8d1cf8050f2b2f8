"""Values as people write them: YAML in configuration files and behind flags, without the traps of YAML 1.1."""

import enum
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import yaml

from twinkle.errors import ConfigError
from twinkle_cli.options import Option, alternatives

_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+(_[0-9]+)*|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}
_SEQUENCES = {list, tuple, set, frozenset, Sequence}


class _Loader(yaml.SafeLoader):
    """Reads YAML as its version 1.2 does: `1e-5` is a number, `on`, `no` and `12:30` are texts, keys are unique."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own way

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {name!r} is given twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep=deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(node.value).replace("_", "")
        return int(text, 16) if "x" in text else int(text)


for _name, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def load_yaml(text: str) -> Any:
    """Return the value of a YAML text; `yaml.YAMLError` where it is none."""
    return yaml.load(text, Loader=_Loader)


def read_config(path: str) -> dict[str, Any]:
    """Return the mapping in a configuration file.

    Raises:
        ConfigError: the file is missing, is not YAML, or holds something else than a mapping.
    """
    try:
        found = load_yaml(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text in UTF-8"
        raise ConfigError(f"--config {path}: cannot be read: {reason}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not YAML: {_problem(error)}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"--config {path}: expected keys and values, found {type(found).__name__} {found!r}")
    return found


def parse_value(text: str, option: Option) -> Any:
    """Return what `text` behind a flag means for a field of this type.

    Text stays text where the field wants text, even if it looks like a number. Behind the flag of a list stands one
    element (the flag may be repeated) or all of them as `[a, b]`.

    Raises:
        ValueError: the text is not YAML where the field wants a structure.
    """
    wanted = set(option.types)
    if types.NoneType in wanted and text in ("null", "~", ""):
        return None
    texts = {t for t in wanted if isinstance(t, type) and issubclass(t, str | PurePath | enum.Enum)}
    if texts and texts == wanted - {types.NoneType}:
        return text
    if is_list(option) and not text.lstrip().startswith("["):
        return [parse_value(text, _element(option))] if text else []
    if texts and not wanted & {bool, int, float} and not text.lstrip().startswith(("[", "{")):
        return text  # `User:` and `#` are texts, whatever they are in YAML
    value = _yaml(text)
    if texts and isinstance(value, bool | int | float) and type(value) not in wanted:
        return text
    return value


def is_list(option: Option) -> bool:
    """Return whether the field is a list and nothing else (but perhaps None), so that its flag may be repeated."""
    wanted = set(option.types)
    return bool(wanted & _SEQUENCES) and wanted <= {*_SEQUENCES, types.NoneType}


def _element(option: Option) -> Option:
    """Return the option that one element of a list would be."""
    annotation = next(a for a in alternatives(option.annotation) if a is not types.NoneType)
    arguments = typing.get_args(annotation)
    return Option(option.path, arguments[0] if arguments else Any)


def is_mapping(option: Option) -> bool:
    """Return whether the field takes a mapping of free keys, so that `--field.key value` sets one of them."""
    return any(isinstance(t, type) and issubclass(t, Mapping) for t in option.types)


def _yaml(text: str) -> Any:
    try:
        return load_yaml(text)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise ValueError(f"{text!r} is not YAML: {problem}") from error


def _problem(error: yaml.YAMLError) -> str:
    """Return where a file is no YAML, and why; the error itself names no file, since it was given a text."""
    problem = getattr(error, "problem", None) or str(error)
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark is not None else problem
