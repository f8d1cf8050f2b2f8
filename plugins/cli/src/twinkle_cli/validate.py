"""Checks a configuration against its pydantic model and reports all problems at once, in words of the house."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twinkle.errors import ConfigError
from twinkle_cli.options import Option, Path, nested_model
from twinkle_registry import nearest

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


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
        model: what it must be.
        values: the configuration, nested.
        options: the fields of the model by dotted name.
        what: how the error names it, such as `recipe 'sft'`.
        sources: who set a path.
        source: who set everything else.
        problems: what is known to be wrong already; reported together with what is found here.

    Raises:
        ConfigError: there is any problem; one line for each, with field, value given and type wanted.
    """
    from pydantic import ValidationError

    found = list(problems)
    known = _known_only(model, values, (), found, source)
    try:
        config = model.model_validate(known)
    except ValidationError as error:
        found += _readable(error, options, sources, source)
    if found:
        count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
        raise ConfigError("\n  ".join([f"{what}: {count} in its configuration", *found]))
    return config


def _known_only(
    model: "type[BaseModel]", values: Mapping[str, Any], prefix: Path, problems: list[str], source: str
) -> dict[str, Any]:
    """Return the values without unknown keys, which become problems: pydantic would stop at them, or ignore them."""
    kept: dict[str, Any] = {}
    for key, value in values.items():
        field = model.model_fields.get(key)
        if field is None and model.model_config.get("extra") != "allow":
            problems.append(_unknown(key, model, prefix, source))
            continue
        nested = nested_model(field.annotation) if field is not None else None
        inside = nested is not None and isinstance(value, Mapping)
        kept[key] = _known_only(nested, value, (*prefix, key), problems, source) if nested and inside else value
    return kept


def _unknown(key: str, model: "type[BaseModel]", prefix: Path, source: str) -> str:
    close = nearest(str(key), model.model_fields, 1)
    hint = f"nearest: {'.'.join((*prefix, close[0]))}" if close else f"known: {', '.join(model.model_fields)}"
    return f"{'.'.join((*prefix, str(key)))}: unknown key{_from(source)}; {hint}"


def _readable(
    error: "ValidationError", options: Mapping[str, Option], sources: Mapping[Path, str], source: str
) -> list[str]:
    """Return one line for each field; the several errors of a union are one."""
    by_field: dict[str, list[Any]] = {}
    for detail in error.errors(include_url=False):
        by_field.setdefault(_field_of(detail["loc"], options), []).append(detail)
    return [_line(name, details, options, sources, source) for name, details in by_field.items()]


def _field_of(location: tuple[int | str, ...], options: Mapping[str, Option]) -> str:
    for length in range(len(location), 0, -1):
        name = ".".join(str(part) for part in location[:length])
        if name in options:
            return name
    return ""


def _line(
    name: str, details: list[Any], options: Mapping[str, Option], sources: Mapping[Path, str], source: str
) -> str:
    reasons = " or ".join(dict.fromkeys(_reason(detail) for detail in details))
    if not name:
        return reasons
    option, first = options[name], details[0]
    if first["type"] == "missing":
        return f"{name}: not given, wanted {option.type_text}; pass --{name} or set it in the file of --config"
    given = first["input"]
    setter = next((s for path, s in sources.items() if option.path[: len(path)] == path), source)
    return f"{name}: given {given!r} ({type(given).__name__}){_from(setter)}, wanted {option.type_text}: {reasons}"


def _reason(detail: Mapping[str, Any]) -> str:
    message = str(detail["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    return message[:1].lower() + message[1:]


def _from(source: str) -> str:
    return f" by {source}" if source else ""
