"""The settings of each source: `.env` file, environment, YAML file and command line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twinkle_cli.arguments.checks import checked
from twinkle_cli.arguments.names import EXTRA, GROUPS, normal, options
from twinkle_cli.arguments.variables import PREFIX, is_other, named
from twinkle_cli.configuration import Option, is_mapping, parse_flags, parse_value
from twinkle_registry import nearest

RESERVED = {"config": True, "help": False}


@dataclass
class Layer:
    """The settings of one source.

    Attributes:
        values: checked values by path.
        sources: the source that set each path, for errors.
        problems: errors, one text each.
    """

    values: dict[tuple[str, ...], Any] = field(default_factory=dict)
    sources: dict[tuple[str, ...], str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def put(self, option: Option, value: Any, source: str) -> None:
        """Set one value; record a problem if its type is wrong, or if another name of the argument has set it."""
        if (before := self.sources.get(option.path)) is not None:
            self.problems.append(f"{option.name} is set twice, by {before} and by {source}")
            return
        try:
            self.values[option.path] = checked(value, option.annotation)
        except ValueError as error:
            self.problems.append(f"{option.name}: {error}, set by {source}; expected {option.type_text}")
        self.sources[option.path] = source

    def unknown(self, name: str, source: str) -> None:
        """Record an unknown argument name."""
        by_name = options()
        close = [full for full in by_name if full.rpartition(".")[2] == name] or nearest(name, by_name)
        hint = f"nearest: {', '.join(close)}" if close else f"groups: {', '.join(GROUPS)}"
        self.problems.append(f"unknown argument {name!r} in {source}; {hint}")


def find(name: str) -> Option | None:
    """Return the argument called `name`; below a mapping (`extra.key`, `ddp_config.key`) that key of it."""
    by_name = options()
    if name in by_name:
        return by_name[name]
    parent, _, key = name.rpartition(".")
    above = by_name.get(parent)
    if above is not None and key and is_mapping(above):
        return Option((*above.path, key), Any)
    return None


def from_variables(variables: Mapping[str, str], *, where: str) -> Layer:
    """Read `TWINKLE_*` variables; `where` is empty for the environment, or names the file."""
    layer = Layer()
    for variable, name, text in named(variables):
        source = f"{variable} in {where}" if where else variable
        option = find(name)
        if option is None:
            layer.unknown(name, f"{source} (an environment variable)" if not where else source)
            continue
        try:
            layer.put(option, parse_value(text, option), source)
        except ValueError as error:
            layer.problems.append(f"{option.name}: {error}, set by {source}; expected {option.type_text}")
    return layer


def from_env_file(path: str | Path, variables: Mapping[str, str], environ: Mapping[str, str]) -> Layer:
    """Read the `TWINKLE_*` variables of a file; variables of other parts of Twinkle must also be in the environment."""
    layer = from_variables(variables, where=str(path))
    for variable in variables:
        if variable.startswith(PREFIX) and is_other(variable) and variable not in environ:
            layer.problems.append(
                f"{variable} in {path} is not an argument and is read from the environment only; export it"
            )
    return layer


def from_mapping(config: Mapping[Any, Any], *, where: str) -> Layer:
    """Read the mapping of a YAML file: arguments by name, at the top level or below the name of their group."""
    layer = Layer()
    for key, value in config.items():
        name = normal(str(key))
        if name in (*GROUPS, EXTRA):
            _group(layer, name, value, where)
        elif (option := find(name)) is not None:
            layer.put(option, value, f"{key} in {where}")
        else:
            layer.unknown(name, where)
    return layer


def _group(layer: Layer, group: str, values: Any, where: str) -> None:
    if values is None:
        return
    if not isinstance(values, Mapping):
        layer.problems.append(f"{group} in {where}: expected a mapping with the group's arguments, got {values!r}")
        return
    for key, value in values.items():
        name = f"{group}.{key}" if group == EXTRA else f"{group}.{normal(str(key))}"
        option = find(name)
        if option is None:
            layer.unknown(name, where)
        else:
            layer.put(option, value, f"{group}.{key} in {where}")


def from_flags(argv: Sequence[str]) -> tuple[Layer, dict[str, str]]:
    """Read a command line; also return the flags that are not arguments (`config`, `help`)."""
    flags = parse_flags([_lowered(token) for token in argv], options(), RESERVED)
    layer = Layer(problems=list(flags.problems))
    by_path = {option.path: option for option in options().values()}
    for path, flag in flags.sources.items():
        option = by_path.get(path) or Option(path, Any)
        layer.put(option, _at(flags.values, path), flag)
    return layer, flags.reserved


def _lowered(token: str) -> str:
    name, equals, value = token.partition("=")
    return name.lower() + equals + value if normal(name.removeprefix("--")) in options() else token


def _at(values: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        values = values[key]
    return values
