"""`twinkle plugins test`: runs the contract kit on installed components, or those of a folder or file."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from twinkle.testing import Report


@click.command("test", short_help="Check components against the contracts of their kinds.")
@click.argument("what")
@click.option(
    "-k", "words", metavar="TEXT", default="", help="Run only checks (or components) whose name contains TEXT."
)
@click.option("--kind", default="", help="Test only components of this kind; required for a function in a file.")
@click.option("--example", default="", metavar="REF", help="package.module:name or ./file.py:name of an example.")
@click.option("-v", "--verbose", is_flag=True, help="Also show the checks that passed.")
@click.option("--yes", is_flag=True, help="Run the code of a folder without asking.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
@click.pass_context
def test(
    ctx: click.Context, what: str, words: str, kind: str, example: str, verbose: bool, yes: bool, as_json: bool
) -> None:
    """Run the contract checks of components; exit code 1 if one fails.

    WHAT is a plugin, a component (`Name`, `plugin/Name`, `kind:Name`), a folder with a plugin, `./file.py:Name`, or
    trusted code on a hub (`hf://org/repo#Name`). The command asks before it runs the code of a folder that is neither
    installed nor trusted (`twinkle plugins trust`).
    """
    from twinkle.errors import ArgumentError
    from twinkle_testing.contracts.subjects import subjects_of

    if not yes:
        _ask(what)
    reports = []
    for thing, of in subjects_of(what, kind):
        report = _report(thing, of, words, example)
        if not len(report):
            continue
        reports.append(report)
        if not as_json:
            click.echo(report.text(everything=verbose))
    if not reports:
        raise ArgumentError(f"no check of {what} has {words!r} in its name")
    if as_json:
        from twinkle.cli import echo_json

        echo_json([report.as_plain() for report in reports])
    else:
        click.echo(_total(reports))
    ctx.exit(0 if all(report.ok for report in reports) else 1)


def _ask(what: str) -> None:
    """Ask before code of a folder runs, unless it is installed from there or the folder is trusted.

    Raises:
        NotTrusted: the answer is no, or there is no terminal to ask.
    """
    import shlex

    from twinkle.cli import confirmed
    from twinkle.errors import NotTrusted
    from twinkle_registry.trust.folders import is_trusted_folder
    from twinkle_testing.contracts.subjects import uninstalled_folder

    folder = uninstalled_folder(what)
    if folder is None or is_trusted_folder(str(folder)):
        return
    place = shlex.quote(str(folder))
    if not confirmed(
        f"Run the code in {folder}? It runs with all your rights",
        action=f"test {folder}: its code would run with all your rights, and the folder is not trusted",
        remedy=f"look at it, then add --yes, or trust it once: twinkle plugins trust {place}",
    ):
        raise NotTrusted(f"nothing of {folder} was run; to trust it: twinkle plugins trust {place}")


def _report(thing: object, kind: str, words: str, example: str) -> "Report":
    from twinkle_testing.contracts.running import examine

    name = getattr(thing, "name", str(thing))
    only: Callable[[str], bool] | None = None if not words or words in name else (lambda check: words in check)
    return examine(thing, kind, only=only, **(_example(example) if example else {}))


def _example(reference: str) -> dict[str, object]:
    from twinkle._registry import registry
    from twinkle_registry import ComponentSpec
    from twinkle_testing.contracts.subjects import file_module, read_example

    place, _, name = reference.rpartition(":")
    if (frozen := registry().frozen) and not place.endswith(".py"):
        frozen.check_module(place, registry().records, context=f"the example {reference!r}")
    if place.endswith(".py"):
        module = file_module(place, context=f"the example {reference!r}")
        reference = f"{module.__name__}:{name}"
    return read_example(ComponentSpec("example", name, reference))


def _total(reports: "list[Report]") -> str:
    components = "1 component" if len(reports) == 1 else f"{len(reports)} components"
    counts = {
        outcome: sum(len(getattr(report, outcome)) for report in reports) for outcome in ("passed", "failed", "skipped")
    }
    return f"{components}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
