"""The configuration of a command: options from a pydantic model, values from flags and YAML, and their validation.

All problems are reported at once.
"""

import enum
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import yaml

from twinkle.errors import ConfigError
from twinkle_registry import nearest

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic.fields import FieldInfo


Path = tuple[str, ...]


@dataclass(frozen=True)
class Option:
    """One field of a configuration model.

    Attributes:
        path: names from the root: `("lora", "rank")` is `--lora.rank`.
        annotation: its type annotation.
        description: its description.
        default: its default; None if it is required or a group.
        required: it has no default.
        group: it is a nested model, whose fields are separate options.
    """

    path: Path
    annotation: Any
    description: str = ""
    default: Any = None
    required: bool = False
    group: bool = False

    @property
    def name(self) -> str:
        """Return `lora.rank`."""
        return ".".join(self.path)

    @property
    def types(self) -> tuple[Any, ...]:
        """The plain types of valid values; `str | None` has two."""
        return tuple(_leaves(self.annotation))

    @property
    def type_text(self) -> str:
        """The type in words: `int`, `str | None`, `list[str]`, `'a' | 'b'`."""
        return type_text(self.annotation)


def options_of(model: "type[BaseModel]", prefix: Path = ()) -> Iterator[Option]:
    """Yield the options of a model, groups before their fields; recursive models are not expanded."""
    yield from _options(model, prefix, (model,))


def _options(model: "type[BaseModel]", prefix: Path, parents: tuple[type, ...]) -> Iterator[Option]:
    for name, info in model.model_fields.items():
        nested = nested_model(info.annotation)
        yield _option((*prefix, name), info, group=nested is not None)
        if nested is not None and nested not in parents:
            yield from _options(nested, (*prefix, name), (*parents, nested))


def _option(path: Path, info: "FieldInfo", group: bool) -> Option:
    default = None if info.is_required() else info.get_default(call_default_factory=True, validated_data={})
    return Option(path, info.annotation, info.description or "", default, info.is_required(), group)


def nested_model(annotation: Any) -> "type[BaseModel] | None":
    """Return the model if `annotation` is one (or `Model | None`), else None."""
    from pydantic import BaseModel

    leaves = [leaf for leaf in _leaves(annotation) if leaf is not types.NoneType]
    only = leaves[0] if len(leaves) == 1 else None
    return only if isinstance(only, type) and issubclass(only, BaseModel) else None


def type_text(annotation: Any) -> str:
    """Return a type as shown in the help."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_text(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(type_text(argument) for argument in arguments))
    if origin is typing.Literal:
        return " | ".join(repr(argument) for argument in arguments)
    if arguments and isinstance(origin, type):
        return f"{origin.__name__}[{', '.join(type_text(argument) for argument in arguments)}]"
    if annotation in (None, types.NoneType):
        return "null"
    return getattr(annotation, "__name__", str(annotation).removeprefix("typing."))


def alternatives(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union, without `Annotated`; for any other type, the type itself."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        yield from alternatives(arguments[0])
    elif origin in (typing.Union, types.UnionType):
        for argument in arguments:
            yield from alternatives(argument)
    else:
        yield types.NoneType if annotation is None else annotation


def _leaves(annotation: Any) -> Iterator[Any]:
    """Yield the types in a union, without their parameters; for a literal, the types of its values."""
    for member in alternatives(annotation):
        if typing.get_origin(member) is typing.Literal:
            yield from dict.fromkeys(type(value) for value in typing.get_args(member))
        else:
            yield typing.get_origin(member) or member


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
    """Reads YAML 1.2: `1e-5` is a number, `on`, `no` and `12:30` are strings, and keys are unique."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own way

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {name!r}", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep=deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(node.value).replace("_", "")
        return int(text, 16) if "x" in text else int(text)


for _name, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def load_yaml(text: str) -> Any:
    """Return the value of a YAML text; raise `yaml.YAMLError` if it is not valid."""
    return yaml.load(text, Loader=_Loader)


def read_config(path: str) -> dict[str, Any]:
    """Return the mapping in a configuration file.

    Raises:
        ConfigError: the file is missing, is not YAML, or is not a mapping.
    """
    try:
        values = load_yaml(FilePath(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"--config {path}: cannot be read: {reason}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not YAML: {_yaml_problem(error)}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: expected keys and values, got {type(values).__name__} {values!r}")
    return values


def parse_value(text: str, option: Option) -> Any:
    """Parse the text after a flag, for a field of this type.

    For a string field the text is used unchanged, even if it looks like a number. The flag of a list takes one element
    (the flag may be repeated) or all elements as `[a, b]`.

    Raises:
        ValueError: the field has a structured type, and the text is not YAML.
    """
    accepted = set(option.types)
    if types.NoneType in accepted and text in ("null", "~", ""):
        return None
    texts = {t for t in accepted if isinstance(t, type) and issubclass(t, str | PurePath | enum.Enum)}
    if texts and texts == accepted - {types.NoneType}:
        return text
    if is_list(option) and not text.lstrip().startswith("["):
        return [parse_value(text, _element(option))] if text else []
    if texts and not accepted & {bool, int, float} and not text.lstrip().startswith(("[", "{")):
        return text  # `User:` and `#` are plain strings here, despite their meaning in YAML
    value = _yaml(text)
    if texts and isinstance(value, bool | int | float) and type(value) not in accepted:
        return text
    return value


def is_list(option: Option) -> bool:
    """Return whether the field is a list (or None), so that its flag may be repeated."""
    accepted = set(option.types)
    return bool(accepted & _SEQUENCES) and accepted <= {*_SEQUENCES, types.NoneType}


def _element(option: Option) -> Option:
    """Return an option for one element of a list."""
    annotation = next(a for a in alternatives(option.annotation) if a is not types.NoneType)
    arguments = typing.get_args(annotation)
    return Option(option.path, arguments[0] if arguments else Any)


def is_mapping(option: Option) -> bool:
    """Return whether the field is a mapping with arbitrary keys, so that `--field.key value` sets one of them."""
    return any(isinstance(t, type) and issubclass(t, Mapping) for t in option.types)


def _yaml(text: str) -> Any:
    try:
        return load_yaml(text)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise ValueError(f"{text!r} is not YAML: {problem}") from error


def _yaml_problem(error: yaml.YAMLError) -> str:
    """Return line, column and description of a YAML error; the error itself does not name the file."""
    problem = getattr(error, "problem", None) or str(error)
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark is not None else problem


@dataclass
class Flags:
    """The parsed command line.

    Attributes:
        values: the configuration, nested.
        reserved: flags of the command itself, by name.
        sources: the flag that set each path.
        problems: errors, one text each.
    """

    values: dict[str, Any] = field(default_factory=dict)
    reserved: dict[str, str] = field(default_factory=dict)
    sources: dict[Path, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def parse_flags(args: Sequence[str], options: Mapping[str, Option], reserved: Mapping[str, bool]) -> Flags:
    """Read a command line.

    Args:
        args: the arguments after the recipe's name.
        options: the fields of its configuration by dotted name; `-` and `_` are equal in flags.
        reserved: flags of the command itself, and whether each one has a value.
    """
    flags = Flags()
    rest = list(args)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--") or token == "--":
            flags.problems.append(_unexpected(token))
            continue
        name, equals, value = token[2:].partition("=")
        name = name.replace("-", "_")
        text = value if equals else None
        if name in reserved:
            _take_reserved(flags, name, text, rest, reserved[name])
        elif option := _find_option(name, options):
            _take_option(flags, name, option, text, rest)
        elif name.startswith("no_") and (option := options.get(name[3:])) and bool in option.types and text is None:
            _set(flags, option.path, False, f"--{name}")
        else:
            flags.problems.append(_unknown_flag(name, options, reserved))
            _skip_value(rest, text)
    return flags


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated with `over`; mappings are merged recursively."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def _find_option(name: str, options: Mapping[str, Option]) -> Option | None:
    """Return the option of a flag; below a mapping field, an option for the key that the flag names."""
    if name in options:
        return options[name]
    parent, _, key = name.rpartition(".")
    above = options.get(parent)
    if above is not None and key and is_mapping(above) and not above.group:
        return Option((*above.path, key), Any)
    return None


def _take_reserved(flags: Flags, name: str, text: str | None, rest: list[str], takes_value: bool) -> None:
    if not takes_value:
        flags.reserved[name] = ""
        if text is not None:
            flags.problems.append(f"--{name} takes no value, got {text!r}")
    elif (value := _value(text, rest)) is None:
        flags.problems.append(f"--{name} requires a value")
    elif name in flags.reserved:
        flags.problems.append(f"--{name} is set twice")
    else:
        flags.reserved[name] = value


def _take_option(flags: Flags, name: str, option: Option, text: str | None, rest: list[str]) -> None:
    if text is None and bool in option.types and (not rest or rest[0].startswith("--")):
        _set(flags, option.path, True, f"--{name}")
        return
    value = _value(text, rest)
    if value is None:
        flags.problems.append(f"--{name} requires a value: {option.type_text}")
        return
    try:
        parsed = parse_value(value, option)
    except ValueError as error:
        flags.problems.append(f"--{name}: {error}; expected {option.type_text}")
        return
    before = _get(flags.values, option.path)
    if is_list(option) and isinstance(before, list) and isinstance(parsed, list):
        before.extend(parsed)
        return
    _set(flags, option.path, parsed, f"--{name}")


def _value(text: str | None, rest: list[str]) -> str | None:
    if text is not None:
        return text
    return rest.pop(0) if rest and not rest[0].startswith("--") else None


def _skip_value(rest: list[str], text: str | None) -> None:
    """Drop the value of an unknown flag, so that it is not reported as a second problem."""
    if text is None and rest and not rest[0].startswith("--"):
        rest.pop(0)


def _get(values: Any, path: Path) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _set(flags: Flags, path: Path, value: Any, flag: str) -> None:
    if (first := flags.sources.get(path)) is not None:
        also = f", first as {first}" if first != flag else ""
        flags.problems.append(f"{flag} is set twice{also} ({_get(flags.values, path)!r}, then {value!r}); set it once")
        return
    for length in range(1, len(path)):
        if path[:length] in flags.sources:
            flags.problems.append(f"{flag}: {flags.sources[path[:length]]} already sets all of it")
            return
    if any(known[: len(path)] == path for known in flags.sources):
        flags.problems.append(f"{flag} sets all of a value that another flag sets a part of")
        return
    target = flags.values
    for key in path[:-1]:
        target = target.setdefault(key, {})
    target[path[-1]] = value
    flags.sources[path] = flag


def _unknown_flag(name: str, options: Mapping[str, Option], reserved: Mapping[str, bool]) -> str:
    # `--rank` for `--lora.rank`: the last part alone is the most likely mistake.
    inner = [known for known in options if known.rpartition(".")[2] == name]
    close = inner or _in_group(name, options) or nearest(name, [*options, *reserved], 1)
    return f"unknown flag --{name}" + (f"; nearest: --{close[0]}" if close else "")


def _in_group(name: str, options: Mapping[str, Option]) -> list[str]:
    """Return the nearest option within the group of a flag, comparing only the names after the group."""
    group, dot, last = name.rpartition(".")
    siblings = [known.rpartition(".")[2] for known in options if known.rpartition(".")[0] == group]
    return [f"{group}.{close}" for close in nearest(last, siblings, 1)] if dot else []


def _unexpected(token: str) -> str:
    text = f"unexpected {token!r}: every value must follow a flag, as in --name value"
    if FilePath(token).exists():
        text += "; it is a file or folder here, so a pattern with * may have matched several: pass one of them"
    return text


def validate(
    model: "type[BaseModel]",
    values: Mapping[str, Any],
    options: Mapping[str, Option],
    *,
    what: str,
    sources: Mapping[Path, str],
    source: str = "",
    problems: Sequence[str] = (),
) -> "BaseModel":
    """Return the checked configuration.

    Args:
        model: model of the configuration.
        values: the configuration, nested.
        options: the fields of the model by dotted name.
        what: name for the error, such as `recipe 'sft'`.
        sources: the source of each path.
        source: the source of all other values.
        problems: problems that were found earlier; reported together with those found here.

    Raises:
        ConfigError: there are problems; one line for each, with field, value and expected type.
    """
    from pydantic import ValidationError

    all_problems = list(problems)
    known_values = _known_only(model, values, (), all_problems, source)
    try:
        config = model.model_validate(known_values)
    except ValidationError as error:
        all_problems += _readable(error, options, sources, source)
    if all_problems:
        count = "1 problem" if len(all_problems) == 1 else f"{len(all_problems)} problems"
        raise ConfigError("\n  ".join([f"{what}: {count} in its configuration", *all_problems]))
    return config


def _known_only(
    model: "type[BaseModel]", values: Mapping[str, Any], prefix: Path, problems: list[str], source: str
) -> dict[str, Any]:
    """Return the values without unknown keys, which are recorded: pydantic would stop at them, or ignore them."""
    known_values: dict[str, Any] = {}
    for key, value in values.items():
        field = model.model_fields.get(key)
        if field is None and model.model_config.get("extra") != "allow":
            problems.append(_unknown_key(key, model, prefix, source))
            continue
        nested = nested_model(field.annotation) if field is not None else None
        inside = nested is not None and isinstance(value, Mapping)
        known_values[key] = _known_only(nested, value, (*prefix, key), problems, source) if nested and inside else value
    return known_values


def _unknown_key(key: str, model: "type[BaseModel]", prefix: Path, source: str) -> str:
    close = nearest(str(key), model.model_fields, 1)
    hint = f"nearest: {'.'.join((*prefix, close[0]))}" if close else f"known: {', '.join(model.model_fields)}"
    place = f" in {source}" if source else ""
    return f"{'.'.join((*prefix, str(key)))}: unknown key{place}; {hint}"


def _readable(
    error: "ValidationError", options: Mapping[str, Option], sources: Mapping[Path, str], source: str
) -> list[str]:
    """Return one line per field; the errors for members of a union are combined."""
    by_field: dict[str, list[Any]] = {}
    for detail in error.errors(include_url=False):
        by_field.setdefault(_field_of(detail["loc"], options), []).append(detail)
    return [_problem_line(name, details, options, sources, source) for name, details in by_field.items()]


def _field_of(location: tuple[int | str, ...], options: Mapping[str, Option]) -> str:
    for length in range(len(location), 0, -1):
        name = ".".join(str(part) for part in location[:length])
        if name in options:
            return name
    return ""


def _problem_line(
    name: str, details: list[Any], options: Mapping[str, Option], sources: Mapping[Path, str], source: str
) -> str:
    reasons = " or ".join(dict.fromkeys(_reason(detail) for detail in details))
    if not name:
        return reasons
    option, first = options[name], details[0]
    if first["type"] == "missing":
        return f"{name}: required, expected {option.type_text}; pass --{name} or set it in the file of --config"
    value = first["input"]
    setter = next((s for path, s in sources.items() if option.path[: len(path)] == path), source)
    return f"{name}: given {value!r} ({type(value).__name__}){_from(setter)}, expected {option.type_text}: {reasons}"


def _reason(detail: Mapping[str, Any]) -> str:
    message = str(detail["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    return message[:1].lower() + message[1:]


def _from(source: str) -> str:
    return f" by {source}" if source else ""
