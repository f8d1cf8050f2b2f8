"""What `twinkle plugins info` says of one plugin or component."""

import inspect
from typing import Any

from twinkle._registry import registry
from twinkle.cli.source import locate
from twinkle.cli.text import pairs
from twinkle.errors import ComponentNotFound, TwinkleError
from twinkle_registry import ComponentSpec, PluginRecord, missing_requirements, nearest
from twinkle_registry.naming import canonical


def find(name: str) -> list[PluginRecord | ComponentSpec]:
    """Return the plugin called `name`, or else every component that bears the name.

    Raises:
        ComponentNotFound: nothing has the name; the text names the nearest.
    """
    records = registry().records
    if plugins := [r for r in records if canonical(name) in (canonical(r.name), canonical(r.dist))]:
        return list(plugins)
    specs = [spec for record in records if record.manifest for spec in record.manifest.components]
    if found := [spec for spec in specs if name in _names_of(spec)]:
        return list(found)
    known = {*(record.name for record in records), *(spec.name for spec in specs)}
    close = nearest(name, known)
    hint = f"nearest: {', '.join(close)}" if close else "`twinkle plugins list` shows what there is"
    if unreadable := [record.name for record in records if record.manifest is None]:
        hint += f"; {', '.join(unreadable)} may offer it but cannot be read, see: twinkle plugins doctor"
    raise ComponentNotFound(f"no plugin or component is called {name!r}; {hint}")


def describe(found: PluginRecord | ComponentSpec) -> tuple[dict[str, Any], str]:
    """Return the same description as plain data and as text."""
    return _describe_component(found) if isinstance(found, ComponentSpec) else _describe_plugin(found)


def _names_of(spec: ComponentSpec) -> tuple[str, ...]:
    return spec.name, f"{spec.dist}/{spec.name}", f"{spec.kind}:{spec.name}"


def _describe_plugin(record: PluginRecord) -> tuple[dict[str, Any], str]:
    from twinkle.cli.plugins import plugin_as_plain

    plain = plugin_as_plain(record) | {"core": record.manifest.core if record.manifest else ""}
    kinds = "\n".join(f"{kind}: {', '.join(names)}" for kind, names in plain["kinds"].items())
    shown = [
        ("plugin", f"{record.name} {record.version}"),
        ("status", record.status),
        ("reason", record.reason),
        ("package", record.package),
        ("manifest", record.location),
        ("core", plain["core"]),
        ("components", kinds),
        ("commands", ", ".join(plain["commands"])),
        ("hooks", ", ".join(plain["hooks"])),
    ]
    return plain, pairs(shown)


def _describe_component(spec: ComponentSpec) -> tuple[dict[str, Any], str]:
    location = locate(spec)
    missing = {m.requirement: str(m) for m in missing_requirements(spec)}
    parameters, trouble = _parameters(spec)
    record = next(r for r in registry().records if r.name == spec.dist)
    plain = {
        "name": spec.name,
        "kind": spec.kind,
        "plugin": spec.dist,
        "version": spec.version,
        "status": record.status,
        "summary": spec.summary,
        "ref": spec.ref,
        "file": location[0] if location else None,
        "line": location[1] if location else None,
        "parameters": parameters,
        "parameters_unknown_because": trouble,
        "requires": list(spec.requires),
        "missing": list(missing.values()),
        "runtimes": list(spec.runtimes),
        "tenant_safe": spec.tenant_safe,
        "inputs": dict(spec.inputs),
        "config": spec.config,
    }
    shown = [
        (spec.kind, f"{spec.name}, of {spec.dist} {spec.version}"),
        ("status", "" if record.status == "ok" else f"{record.status}: {record.reason}"),
        ("summary", spec.summary),
        ("ref", spec.ref),
        ("file", f"{location[0]}:{location[1]}" if location else ""),
        ("takes", trouble if parameters is None else _signature_text(parameters)),
        ("inputs", "\n".join(f"{name}: {dtype}" for name, dtype in spec.inputs.items())),
        ("config", spec.config),
        ("needs", _needs_text(spec, missing)),
        ("runtimes", ", ".join(spec.runtimes)),
        ("tenants", "may share it (no global state)" if spec.tenant_safe else "may not share it"),
    ]
    return plain, pairs(shown)


def _needs_text(spec: ComponentSpec, missing: dict[str, str]) -> str:
    if not spec.requires:
        return "nothing beside twinkle-core"
    met = [f"{requirement} (met)" for requirement in spec.requires if requirement not in missing]
    return "\n".join([*met, *missing.values()])


def _parameters(spec: ComponentSpec) -> tuple[list[dict[str, Any]] | None, str]:
    """Return the parameters of the component, or None and the reason why they cannot be known."""
    try:
        found = registry().load(spec)
        signature = inspect.signature(found)
    except (TwinkleError, TypeError, ValueError) as error:
        return None, f"not known: {error}"
    return [_parameter(p) for p in signature.parameters.values()], ""


def _parameter(parameter: inspect.Parameter) -> dict[str, Any]:
    empty = inspect.Parameter.empty
    starred: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    stars = starred.get(parameter.kind, "")
    annotation = "" if parameter.annotation is empty else inspect.formatannotation(parameter.annotation)
    return {
        "name": stars + parameter.name,
        "type": annotation.strip("'"),
        "default": None if parameter.default is empty else repr(parameter.default),
        "required": parameter.default is empty and not stars,
    }


def _signature_text(parameters: list[dict[str, Any]]) -> str:
    lines = []
    for parameter in parameters:
        kind = f": {parameter['type']}" if parameter["type"] else ""
        default = "" if parameter["default"] is None else f" = {parameter['default']}"
        lines.append(f"{parameter['name']}{kind}{default}")
    return "\n".join(lines) or "no arguments"
