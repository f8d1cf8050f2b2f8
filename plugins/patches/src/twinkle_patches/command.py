"""`twinkle plugins patches`: what patches there are, what they change, and whether they fit what is installed."""

from collections.abc import Iterator
from typing import Any

import click

from twinkle._registry import registry
from twinkle.errors import NotTrusted, TwinkleError
from twinkle_registry import ComponentSpec, PluginRecord, missing_requirements


@click.command(short_help="List patches, what they change, and whether they fit the installed packages.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def patches(as_json: bool) -> None:
    """List every installed patch: changed symbols, supported versions, when it is needed, whether it applies."""
    from twinkle.cli import echo_json

    specs = [spec for found in registry().specs("patch").values() for spec in found]
    rows = [describe(spec) for spec in specs]
    rows += [_undescribed(spec, record) for spec, record in _refused()]
    if as_json:
        echo_json(rows)
    else:
        click.echo("\n\n".join(_text(row) for row in rows))


def describe(spec: ComponentSpec) -> dict[str, Any]:
    """Return what is said of one patch; `applies` is whether it would be accepted here, `here` why, or why not."""
    plain = _plain(spec)
    if missing := missing_requirements(spec):
        return plain | {"here": f"needs {', '.join(map(str, missing))}"}
    try:
        return plain | _inspected(registry().load(spec))
    except TwinkleError as error:
        return plain | {"here": str(error)}


def _inspected(patch: Any) -> dict[str, Any]:
    from twinkle_patches.versions import verdicts

    found = verdicts(patch)
    strange = [verdict for verdict in found if not verdict.known]
    known = ", ".join(f"{verdict.library} {verdict.installed}" for verdict in found)
    here = f"applies ({known})" if known else "applies"
    if strange:
        reasons = (f"refused: it is for {', '.join(map(str, strange))}", getattr(patch, "otherwise", ""))
        here = "; ".join(filter(None, reasons))
    return {
        "changes": list(getattr(patch, "changes", ())),
        "versions": dict(getattr(patch, "versions", {})),
        "needed": getattr(patch, "needed", ""),
        "applies": not strange,
        "here": here,
    }


def _plain(spec: ComponentSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "plugin": spec.dist,
        "version": spec.version,
        "summary": spec.summary,
        "changes": [],
        "versions": {},
        "needed": "",
        "applies": False,
        "here": "",
    }


def _refused() -> Iterator[tuple[ComponentSpec, PluginRecord]]:
    """Yield each patch of an enabled plugin that must not run: in a frozen run, or revoked."""
    for record in registry().records:
        refused = isinstance(record.cause, NotTrusted)
        for spec in record.manifest.components if record.manifest and refused else ():
            if spec.kind == "patch":
                yield spec, record


def _undescribed(spec: ComponentSpec, record: PluginRecord) -> dict[str, Any]:
    return _plain(spec) | {"here": f"does not apply: its plugin is {record.status}: {record.reason}"}


def _text(row: dict[str, Any]) -> str:
    from twinkle.cli import pairs

    text: str = pairs(
        [
            ("patch", f"{row['name']}, of {row['plugin']} {row['version']}"),
            ("summary", row["summary"]),
            ("changes", "\n".join(row["changes"])),
            ("knows", ", ".join(f"{library} {wanted}" for library, wanted in row["versions"].items())),
            ("needed", row["needed"]),
            ("here", row["here"]),
        ]
    )
    return text
