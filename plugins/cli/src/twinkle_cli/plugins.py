"""`twinkle plugins`: list, explain and check plugins."""

from typing import Any

import click

from twinkle_cli.code import COMMANDS, short
from twinkle_cli.group import PluginsGroup
from twinkle_cli.records import plugin_as_plain, reason_with_lines
from twinkle_cli.revocation import COMMANDS as REVOCATION_COMMANDS
from twinkle_cli.search import search
from twinkle_cli.text import echo_json, table
from twinkle_cli.trust import COMMANDS as TRUST_COMMANDS
from twinkle_cli.types import types

_json = click.option("--json", "as_json", is_flag=True, help="Write JSON.")


@click.group(cls=PluginsGroup)
def plugins() -> None:
    """List, explain and check plugins."""


@plugins.command("list", short_help="List every plugin, usable or not, or all components of one kind.")
@click.argument("kind", required=False)
@_json
def list_plugins(kind: str | None, as_json: bool) -> None:
    """List every plugin, usable or not; with KIND, every component of this kind, such as loss."""
    from twinkle._registry import registry

    if kind is not None:
        _list_components(kind, as_json)
        return
    records = [registry().checked(record) for record in registry().records]
    rows = [plugin_as_plain(record) for record in records]
    if as_json:
        echo_json(rows)
        return
    lines = table(("plugin", "version", "status", "offers"), [_row(plain) for plain in rows]).splitlines()
    click.echo(lines[0])
    for line, plain, record in zip(lines[1:], rows, records, strict=True):
        click.echo(line)
        if plain["reason"]:
            click.echo(f"  {_in_one_line(reason_with_lines(record))}")
        if plain["lacks"]:
            click.echo(
                f"  not installed, but required by some components: {', '.join(plain['lacks'])}; "
                "see: twinkle plugins doctor"
            )
    click.echo("the names of one kind: twinkle plugins list KIND, such as loss")


@plugins.command(short_help="Explain a plugin or a component.")
@click.argument("name")
@_json
def info(name: str, as_json: bool) -> None:
    """Explain a plugin or a component: description, location, arguments and requirements.

    NAME is a plugin, a component, `plugin/component` or `kind:component`.
    """
    from twinkle._registry import find
    from twinkle_cli.info import describe

    records = find(name)
    if as_json:
        echo_json([plain for plain, _ in map(describe, records)])
        return
    click.echo("\n\n".join(text for _, text in map(describe, records)))


@plugins.command(short_help="Check the installation for problems.")
@_json
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check the installation; exit code 1 if a problem is found.

    Missing optional dependencies are reported as warnings; they do not fail the check.
    """
    from dataclasses import asdict

    from twinkle_cli.doctor import examine

    installation_problems = examine()
    problems = [problem for problem in installation_problems if not problem.optional]
    if as_json:
        echo_json([asdict(problem) for problem in installation_problems])
    else:
        for problem in sorted(installation_problems, key=lambda problem: not problem.optional):
            click.echo(f"{problem.kind}: {problem.what}" + (f"\n  -> {problem.remedy}" if problem.remedy else ""))
        click.echo(f"{len(problems)} problem{'' if len(problems) == 1 else 's'} found")
    ctx.exit(1 if problems else 0)


for command in (*COMMANDS, *TRUST_COMMANDS, *REVOCATION_COMMANDS, search, types):
    plugins.add_command(command)


def _list_components(kind: str, as_json: bool) -> None:
    """Show the manifest entries of the components of one kind."""
    from twinkle._registry import registry
    from twinkle_registry.explain import unknown_kind

    if kind not in registry().kinds:
        raise unknown_kind(kind, registry().kinds)
    records = [registry().checked(record) for record in registry().records]
    listed = [(spec, record) for record in records if record.manifest for spec in record.manifest.components]
    rows = [
        {"name": spec.name, "kind": kind, "plugin": spec.dist, "status": record.status, "summary": spec.summary}
        for spec, record in sorted(listed, key=lambda pair: (pair[0].name.lower(), pair[0].dist))
        if spec.kind == kind
    ]
    if as_json:
        echo_json(rows)
        return
    if not rows:
        click.echo(f"no installed plugin offers any {kind}; published ones: twinkle plugins search --kind {kind}")
        return
    plugin = [row["plugin"] + ("" if row["status"] == "ok" else f" ({row['status']})") for row in rows]
    cells = [(row["name"], where, row["summary"]) for row, where in zip(rows, plugin, strict=True)]
    click.echo(table((kind, "plugin", "summary"), cells))


def _in_one_line(reason: str) -> str:
    """Return a text with one problem per line as a single line: `file: 2 problems: this; that`."""
    head, *problems = [" ".join(line.split()) for line in reason.splitlines()]
    return f"{head}: {'; '.join(problems)}" if problems else head


def _row(plain: dict[str, Any]) -> tuple[str, ...]:
    offers = [f"{kind} {len(names)}" for kind, names in plain["kinds"].items()]
    offers += [f"command {len(plain['commands'])}"] if plain["commands"] else []
    return plain["name"], short(plain["version"]), plain["status"], ", ".join(offers) or "-"
