"""What `twinkle plugins info` says of one plugin or component."""

import textwrap
from dataclasses import replace
from typing import Any, Literal

from twinkle._registry import registry
from twinkle.errors import NotTrusted, PluginBroken, TwinkleError
from twinkle_cli.signature import options_of_config, parameter_text, parameters_of
from twinkle_cli.source import locate
from twinkle_cli.syntax import syntax_errors
from twinkle_cli.text import pairs
from twinkle_registry import ComponentSpec, PluginRecord, missing_requirements

_WIDTH = 100


def describe(found: PluginRecord | ComponentSpec) -> tuple[dict[str, Any], str]:
    """Return the same description as plain data and as text."""
    return _describe_component(found) if isinstance(found, ComponentSpec) else _describe_plugin(found)


def published(dist: str) -> dict[str, str]:
    """Return `licence` and `homepage` of a distribution as its metadata have them; empty texts where they have none."""
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        found = metadata(dist)
    except (PackageNotFoundError, ValueError):
        return {"licence": "", "homepage": ""}
    urls = dict(text.split(", ", 1) for text in found.get_all("Project-URL") or () if ", " in text)
    by_label = {label.lower().replace("-", "").replace(" ", ""): url for label, url in urls.items()}
    labels = ("homepage", "home", "repository", "source", "sourcecode")
    first = {key: next(iter(found.get_all(key) or ()), "") for key in ("Home-page", "License-Expression", "License")}
    homepage = first["Home-page"] or next((by_label[label] for label in labels if label in by_label), "")
    # The older field may hold the whole text of the licence.
    licence = first["License-Expression"] or first["License"].strip().partition("\n")[0]
    return {"licence": licence, "homepage": homepage}


def _describe_plugin(record: PluginRecord) -> tuple[dict[str, Any], str]:
    from twinkle_cli.plugins import plugin_as_plain, reason_with_lines

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
    usable = record.status == "ok"  # of any other plugin nothing is imported
    why = record.reason if plugin.status == "ok" else f"its plugin is {plugin.status}"
    parameters, told = parameters_of(spec) if usable else (None, f"not known: {why}")
    signature, trouble = ("", told) if parameters is None else (told, "")
    options, trouble_with_options = options_of_config(spec) if usable or not spec.config else (None, told)
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
        ("tenants", "may share it (no global state)" if spec.tenant_safe else "may not share it"),
        ("licence", plain["licence"]),
        ("homepage", plain["homepage"]),
    ]
    return plain, pairs(shown)


def _as_used(record: PluginRecord, spec: ComponentSpec) -> PluginRecord:
    """Return the record as it stands for one component, which is imported: if it cannot be, it is broken or refused."""
    if record.status != "ok":
        return record
    try:
        registry().load(spec)
    except (PluginBroken, NotTrusted) as error:
        status: Literal["broken", "disabled"] = "broken" if isinstance(error, PluginBroken) else "disabled"
        return replace(record, status=status, reason=str(error), cause=error)
    except TwinkleError:
        return record  # a package that it needs is not here, which is said of its needs
    return record


def _record_of(spec: ComponentSpec) -> PluginRecord:
    """Return the plugin that lists this very component; two plugins may bear one name."""
    records = [record for record in registry().records if record.manifest]
    return next(r for r in records if r.manifest and any(c is spec for c in r.manifest.components))


def _needs_text(spec: ComponentSpec, missing: dict[str, str]) -> str:
    if not spec.requires:
        return "nothing beside twinkle-core"
    met = [f"{requirement} (met)" for requirement in spec.requires if requirement not in missing]
    return "\n".join([*met, *missing.values()])


def _listed(parameters: list[dict[str, Any]]) -> str:
    """Return a line for each, and what it means indented below where that is known."""
    lines = []
    for parameter in parameters:
        lines.append(parameter_text(parameter))
        lines += [f"  {parameter['meaning']}"] if parameter["meaning"] else []
    return "\n".join(lines)
