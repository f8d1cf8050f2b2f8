"""`twinkle plugins info`: description, origin and parameters of a plugin or component."""

import inspect
import re
import textwrap
from dataclasses import replace
from typing import Any, Literal

from twinkle._registry import registry
from twinkle.errors import NotTrusted, PluginBroken, TwinkleError
from twinkle_cli.records import plugin_as_plain, reason_with_lines
from twinkle_cli.source import locate, syntax_errors
from twinkle_cli.text import pairs
from twinkle_registry import ComponentSpec, PluginRecord, missing_requirements

_ARGUMENT = re.compile(r"\*{0,2}(?P<name>\w+)(?: \([^)]*\))?: *(?P<text>.*)")


def parameters_of(spec: ComponentSpec) -> tuple[list[dict[str, Any]] | None, str]:
    """Import a component; return its parameters, and its signature on one line.

    Returns:
        None and the reason, if they cannot be determined. Otherwise, for each parameter `name` (with its stars),
        `type`, `default` (source text, None without one), `required` and `meaning` (from the `Args:` of the docstring);
        and `FocalLoss(gamma: float = 2.0)`.
    """
    try:
        component = registry().load(spec)
        signature = inspect.signature(component)
    except (TwinkleError, TypeError, ValueError) as error:
        return None, f"unknown: {error}"
    meanings = _meanings(component)
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
    """Return the fields of the options model that a manifest names, or None and the reason why they are unknown."""
    if not spec.config:
        return [], ""
    from dataclasses import replace

    from twinkle_cli.configuration import options_of

    try:
        model = registry().load(replace(spec, ref=spec.config))
    except TwinkleError as error:
        return None, f"unknown: {error}"
    if not hasattr(model, "model_fields"):
        return None, f"unknown: {spec.config} is not a pydantic model"
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


def _meanings(component: Any) -> dict[str, str]:
    """Return the description of each argument in the docstrings of a class and of its `__init__`, on one line each."""
    texts = [vars(component).get("__init__")] if isinstance(component, type) else []
    meanings: dict[str, str] = {}
    for source in [component, *texts]:
        meanings |= _arguments(inspect.cleandoc(getattr(source, "__doc__", None) or ""))
    return meanings


def _arguments(doc: str) -> dict[str, str]:
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", doc, re.MULTILINE)
    lines = section[1].splitlines() if section else []
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    meanings: dict[str, str] = {}
    name = ""
    for line in lines:
        match = _ARGUMENT.fullmatch(line[indent:])
        if match and not line[indent:].startswith(" "):
            name = match["name"]
            meanings[name] = match["text"]
        elif name and line.strip():
            meanings[name] += f" {line}"
    return {name: " ".join(text.split()) for name, text in meanings.items()}


_WIDTH = 100


def describe(records: PluginRecord | ComponentSpec) -> tuple[dict[str, Any], str]:
    """Return the same description as plain data and as text."""
    return _describe_component(records) if isinstance(records, ComponentSpec) else _describe_plugin(records)


def published(dist: str) -> dict[str, str]:
    """Return `licence` and `homepage` from the metadata of a distribution; empty strings if missing."""
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        fields = metadata(dist)
    except (PackageNotFoundError, ValueError):
        return {"licence": "", "homepage": ""}
    urls = dict(text.split(", ", 1) for text in fields.get_all("Project-URL") or () if ", " in text)
    by_label = {label.lower().replace("-", "").replace(" ", ""): url for label, url in urls.items()}
    labels = ("homepage", "home", "repository", "source", "sourcecode")
    first = {key: next(iter(fields.get_all(key) or ()), "") for key in ("Home-page", "License-Expression", "License")}
    homepage = first["Home-page"] or next((by_label[label] for label in labels if label in by_label), "")
    # The older field may contain the full text of the licence.
    licence = first["License-Expression"] or first["License"].strip().partition("\n")[0]
    return {"licence": licence, "homepage": homepage}


def _describe_plugin(record: PluginRecord) -> tuple[dict[str, Any], str]:
    plain = plugin_as_plain(record) | {"core": record.manifest.core if record.manifest else ""} | published(record.dist)
    wrong = syntax_errors(record)
    plain["broken"] = [": ".join(filter(None, (", ".join(names), error))) for error, names in wrong.items()]
    kinds = "\n".join(f"{kind}: {', '.join(names)}" for kind, names in plain["kinds"].items())
    shown = [
        ("plugin", f"{record.name} {record.version}"),
        ("status", f"{record.status}, but parts of it are broken" if wrong else record.status),
        ("reason", reason_with_lines(record)),
        ("broken", "\n".join(plain["broken"])),
        ("lacks", ", ".join(plain["lacks"])),
        ("package", record.package),
        ("manifest", record.location),
        ("core", plain["core"]),
        ("components", kinds),
        ("commands", ", ".join(plain["commands"])),
        ("hooks", ", ".join(plain["hooks"])),
        ("licence", plain["licence"]),
        ("homepage", plain["homepage"]),
    ]
    return plain, pairs(shown)


def _describe_component(spec: ComponentSpec) -> tuple[dict[str, Any], str]:
    location = locate(spec)
    missing = {m.requirement: str(m) for m in missing_requirements(spec)}
    plugin = registry().checked(_record_of(spec))
    record = _as_used(plugin, spec)
    usable = record.status == "ok"  # other plugins are not imported
    why = record.reason if plugin.status == "ok" else f"its plugin is {plugin.status}"
    parameters, text = parameters_of(spec) if usable else (None, f"unknown: {why}")
    signature, trouble = ("", text) if parameters is None else (text, "")
    options, trouble_with_options = options_of_config(spec) if usable or not spec.config else (None, text)
    plain = {
        "name": spec.name,
        "kind": spec.kind,
        "plugin": spec.dist,
        "version": spec.version,
        "status": record.status,
        "reason": record.reason,
        "summary": spec.summary,
        "ref": spec.ref,
        "file": location[0] if location else None,
        "line": location[1] if location else None,
        "signature": signature or None,
        "parameters": parameters,
        "parameters_unknown_because": trouble,
        "requires": list(spec.requires),
        "missing": list(missing.values()),
        "runtimes": list(spec.runtimes),
        "tenant_safe": spec.tenant_safe,
        "inputs": dict(spec.inputs),
        "config": spec.config,
        "options": options,
        "options_unknown_because": trouble_with_options,
        **published(record.dist),
    }
    shown = [
        (spec.kind, f"{spec.name}, of {spec.dist} {spec.version}"),
        ("status", "" if record.status == "ok" else f"{record.status}: {record.reason}"),
        ("summary", spec.summary),
        ("ref", spec.ref),
        ("file", f"{location[0]}:{location[1]}" if location else ""),
        ("signature", textwrap.fill(signature, _WIDTH, subsequent_indent="  ", break_long_words=False)),
        ("takes", trouble if parameters is None else _listed(parameters) or "no arguments"),
        ("inputs", "\n".join(f"{name}: {dtype}" for name, dtype in spec.inputs.items())),
        ("config", spec.config),
        ("options", trouble_with_options if options is None else _listed(options)),
        ("needs", _needs_text(spec, missing)),
        ("runtimes", ", ".join(spec.runtimes)),
        ("tenants", "safe to share (no global state)" if spec.tenant_safe else "not declared safe to share"),
        ("licence", plain["licence"]),
        ("homepage", plain["homepage"]),
    ]
    return plain, pairs(shown)


def _as_used(record: PluginRecord, spec: ComponentSpec) -> PluginRecord:
    """Return the record with the status of one component after its import: ok, broken or refused."""
    if record.status != "ok":
        return record
    try:
        registry().load(spec)
    except (PluginBroken, NotTrusted) as error:
        status: Literal["broken", "disabled"] = "broken" if isinstance(error, PluginBroken) else "disabled"
        return replace(record, status=status, reason=str(error), cause=error)
    except TwinkleError:
        return record  # a missing package is reported with the requirements
    return record


def _record_of(spec: ComponentSpec) -> PluginRecord:
    """Return the plugin that lists this component; two plugins may have the same name."""
    records = [record for record in registry().records if record.manifest]
    return next(r for r in records if r.manifest and any(c is spec for c in r.manifest.components))


def _needs_text(spec: ComponentSpec, missing: dict[str, str]) -> str:
    if not spec.requires:
        return "nothing except twinkle-core"
    met = [f"{requirement} (met)" for requirement in spec.requires if requirement not in missing]
    return "\n".join([*met, *missing.values()])


def _listed(parameters: list[dict[str, Any]]) -> str:
    """Return a line for each parameter, with its description indented below if known."""
    lines = []
    for parameter in parameters:
        lines.append(parameter_text(parameter))
        lines += [f"  {parameter['meaning']}"] if parameter["meaning"] else []
    return "\n".join(lines)
