"""What a component takes, for `twinkle plugins info`: its parameters, and what its docstring says of each."""

import inspect
import re
from typing import Any

from twinkle._registry import registry
from twinkle.errors import TwinkleError
from twinkle_registry import ComponentSpec

_ARGUMENT = re.compile(r"\*{0,2}(?P<name>\w+)(?: \([^)]*\))?: *(?P<text>.*)")


def parameters_of(spec: ComponentSpec) -> tuple[list[dict[str, Any]] | None, str]:
    """Return the parameters of a component, which is imported for it, and its signature on one line.

    Returns:
        None and the reason, where they cannot be known. Else, of each parameter `name` (with its stars), `type`,
        `default` (source text, None without one), `required` and `meaning` (from the `Args:` of the docstring); and
        `FocalLoss(gamma: float = 2.0)`.
    """
    try:
        found = registry().load(spec)
        signature = inspect.signature(found)
    except (TwinkleError, TypeError, ValueError) as error:
        return None, f"not known: {error}"
    meanings = _meanings(found)
    parameters = [_parameter(p, meanings) for p in signature.parameters.values()]
    texts = [parameter_text(parameter) for parameter in parameters]
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        texts.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    return parameters, f"{spec.name}({', '.join(texts)})"


def parameter_text(parameter: dict[str, Any]) -> str:
    """Return `gamma: float = 2.0`."""
    kind = f": {parameter['type']}" if parameter["type"] else ""
    default = "" if parameter["default"] is None else f" = {parameter['default']}"
    return f"{parameter['name']}{kind}{default}"


def options_of_config(spec: ComponentSpec) -> tuple[list[dict[str, Any]] | None, str]:
    """Return the fields of the options model that a manifest names, or None and the reason why they are not known."""
    if not spec.config:
        return [], ""
    from dataclasses import replace

    from twinkle_cli.options import options_of

    try:
        model = registry().load(replace(spec, ref=spec.config))
    except TwinkleError as error:
        return None, f"not known: {error}"
    if not hasattr(model, "model_fields"):
        return None, f"not known: {spec.config} is no pydantic model"
    return [
        {
            "name": option.name,
            "type": option.type_text,
            "default": None if option.required else repr(option.default),
            "required": option.required,
            "meaning": option.description,
        }
        for option in options_of(model)
        if not option.group
    ], ""


def _parameter(parameter: inspect.Parameter, meanings: dict[str, str]) -> dict[str, Any]:
    empty = inspect.Parameter.empty
    starred: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    stars = starred.get(parameter.kind, "")
    annotation = "" if parameter.annotation is empty else inspect.formatannotation(parameter.annotation)
    return {
        "name": stars + parameter.name,
        "type": annotation.strip("'"),
        "default": None if parameter.default is empty else repr(parameter.default),
        "required": parameter.default is empty and not stars,
        "meaning": meanings.get(parameter.name, ""),
    }


def _meanings(found: Any) -> dict[str, str]:
    """Return what the docstrings of a class and of its `__init__` say of each argument, in one line each."""
    texts = [vars(found).get("__init__")] if isinstance(found, type) else []
    meanings: dict[str, str] = {}
    for source in [found, *texts]:
        meanings |= _arguments(inspect.cleandoc(getattr(source, "__doc__", None) or ""))
    return meanings


def _arguments(doc: str) -> dict[str, str]:
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", doc, re.MULTILINE)
    lines = section[1].splitlines() if section else []
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        match = _ARGUMENT.fullmatch(line[indent:])
        if match and not line[indent:].startswith(" "):
            name = match["name"]
            found[name] = match["text"]
        elif name and line.strip():
            found[name] += f" {line}"
    return {name: " ".join(text.split()) for name, text in found.items()}
