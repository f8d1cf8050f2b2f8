"""Reads `--name value` pairs into a nested configuration, and notes everything that is wrong with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from twinkle_cli.options import Option, Path
from twinkle_cli.values import is_list, is_mapping, parse_value
from twinkle_registry import nearest


@dataclass
class Flags:
    """What the command line said.

    Attributes:
        values: the configuration, nested.
        reserved: flags of the command itself, by name.
        sources: the flag that set each path.
        problems: what could not be understood, one text each.
    """

    values: dict[str, Any] = field(default_factory=dict)
    reserved: dict[str, str] = field(default_factory=dict)
    sources: dict[Path, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def parse_flags(args: Sequence[str], options: Mapping[str, Option], reserved: Mapping[str, bool]) -> Flags:
    """Read a command line.

    Args:
        args: what follows the recipe's name.
        options: the fields of its configuration by dotted name; `-` and `_` are equal in flags.
        reserved: flags of the command itself, and whether each takes a value.
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
            _reserved(flags, name, text, rest, reserved[name])
        elif option := _find(name, options):
            _option(flags, name, option, text, rest)
        elif name.startswith("no_") and (option := options.get(name[3:])) and bool in option.types and text is None:
            _set(flags, option.path, False, f"--{name}")
        else:
            flags.problems.append(_unknown(name, options, reserved))
            _skip_value(rest, text)
    return flags


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `over`, mapping by mapping."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def _find(name: str, options: Mapping[str, Option]) -> Option | None:
    """Return the option of a flag; below a mapping field, an option for the key that the flag names."""
    if name in options:
        return options[name]
    parent, _, key = name.rpartition(".")
    above = options.get(parent)
    if above is not None and key and is_mapping(above) and not above.group:
        return Option((*above.path, key), Any)
    return None


def _reserved(flags: Flags, name: str, text: str | None, rest: list[str], takes_value: bool) -> None:
    if not takes_value:
        flags.reserved[name] = ""
        if text is not None:
            flags.problems.append(f"--{name} takes no value, {text!r} was given")
    elif (value := _value(text, rest)) is None:
        flags.problems.append(f"--{name} needs a value")
    elif name in flags.reserved:
        flags.problems.append(f"--{name} is given twice")
    else:
        flags.reserved[name] = value


def _option(flags: Flags, name: str, option: Option, text: str | None, rest: list[str]) -> None:
    if text is None and bool in option.types and (not rest or rest[0].startswith("--")):
        _set(flags, option.path, True, f"--{name}")
        return
    value = _value(text, rest)
    if value is None:
        flags.problems.append(f"--{name} needs a value: {option.type_text}")
        return
    try:
        parsed = parse_value(value, option)
    except ValueError as error:
        flags.problems.append(f"--{name}: {error}; wanted {option.type_text}")
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
        flags.problems.append(
            f"{flag} is given twice{also} ({_get(flags.values, path)!r}, then {value!r}); give it once"
        )
        return
    for length in range(1, len(path)):
        if path[:length] in flags.sources:
            flags.problems.append(f"{flag}: {flags.sources[path[:length]]} already sets the whole of it")
            return
    if any(known[: len(path)] == path for known in flags.sources):
        flags.problems.append(f"{flag} sets the whole of what another flag sets a part of")
        return
    target = flags.values
    for key in path[:-1]:
        target = target.setdefault(key, {})
    target[path[-1]] = value
    flags.sources[path] = flag


def _unknown(name: str, options: Mapping[str, Option], reserved: Mapping[str, bool]) -> str:
    # `--rank` for `--lora.rank`: the last part alone is the likeliest slip.
    inner = [known for known in options if known.rpartition(".")[2] == name]
    close = inner or _in_group(name, options) or nearest(name, [*options, *reserved], 1)
    return f"unknown flag --{name}" + (f"; nearest: --{close[0]}" if close else "")


def _in_group(name: str, options: Mapping[str, Option]) -> list[str]:
    """Return the nearest option of the group that a flag names, so that its group is not what makes them alike."""
    group, dot, last = name.rpartition(".")
    siblings = [known.rpartition(".")[2] for known in options if known.rpartition(".")[0] == group]
    return [f"{group}.{close}" for close in nearest(last, siblings, 1)] if dot else []


def _unexpected(token: str) -> str:
    text = f"unexpected {token!r}: every value stands behind a flag, as in --name value"
    if FilePath(token).exists():
        text += "; it is a file or folder here, so perhaps a pattern with * fits more than one: give one of them"
    return text
