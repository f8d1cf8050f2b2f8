"""`twinkle plugins add|lock|verify|remove`: maintain twinkle.lock, the list of code that may run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from twinkle_cli.text import echo_json, table

if TYPE_CHECKING:
    from twinkle_registry.trust.editor import LockEditor
    from twinkle_registry.trust.review import Proposal

_json = click.option("--json", "as_json", is_flag=True, help="Write JSON.")
_yes = click.option("--yes", is_flag=True, help="Accept without confirmation.")


@click.command(short_help="Look at code and trust it: a hub repository, a file or an installed plugin.")
@click.argument("references", nargs=-1, required=True, metavar="REFERENCE...")
@_yes
@_json
@click.pass_context
def add(ctx: click.Context, references: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Show what the code contains and uses, ask for confirmation, and record it in twinkle.lock.

    REFERENCE is `hf://org/repo`, `hf://org/repo@revision`, `./folder` (the same as `file:///path/to/folder`),
    `./file.py` or the name of an installed plugin. With --json and without --yes nothing is asked and nothing changes;
    exit code 1 if something was not accepted.
    """
    shown: list[Proposal] = []
    editor = _editor(shown, yes=yes, as_json=as_json)
    accepted = [editor.add(reference) for reference in references]
    _finish(ctx, shown, accepted, as_json=as_json)


@click.command(short_help="Bring twinkle.lock up to date with what is installed, and with branches that moved.")
@_yes
@_json
@click.pass_context
def lock(ctx: click.Context, yes: bool, as_json: bool) -> None:
    """Lock every installed plugin, and renew the entries of hub repositories and local files.

    Changes in a repository or a file are shown for confirmation, as in `add`; declined entries stay unchanged.
    Exit code 1 if something was declined or could not be confirmed.
    """
    shown: list[Proposal] = []
    # Plugins installed with pip run without confirmation; locking them only records their versions and files.
    renewed = _editor(shown, yes=yes, as_json=as_json, asks_for=("hub", "file")).renew()
    shown += [proposal for proposal in renewed if proposal.problem]
    _finish(ctx, shown, [None if proposal.problem else proposal for proposal in renewed], as_json=as_json)


@click.command(short_help="Check that everything in twinkle.lock is here, whole and allowed.")
@click.option("--fetch", is_flag=True, help="Download hub code that is missing or incomplete; it must match the lock.")
@click.option("--online", is_flag=True, help="Ask each hub whether its references still resolve to the locked commits.")
@_json
@click.pass_context
def verify(ctx: click.Context, fetch: bool, online: bool, as_json: bool) -> None:
    """Compare every file of every entry of twinkle.lock with the installed code; exit code 1 if something differs."""
    from twinkle._registry import registry
    from twinkle_registry.trust.editor import verify as check

    problems = check(registry().records, _open_hub, fetch=fetch, online=online)
    wrong = [entry for entry in problems if entry.problem]
    if as_json:
        echo_json([{"sort": e.sort, "name": e.name, "version": e.version, "problem": e.problem} for e in problems])
    else:
        for entry in wrong:
            click.echo(f"{entry.sort} {entry.name} {short(entry.version)}".rstrip() + f"\n  {entry.problem}")
        click.echo(f"{len(problems)} checked, {len(wrong)} wrong")
    ctx.exit(1 if wrong else 0)


@click.command(short_help="Forget what was trusted.")
@click.argument("references", nargs=-1, required=True, metavar="REFERENCE...")
@_json
def remove(references: tuple[str, ...], as_json: bool) -> None:
    """Remove entries from twinkle.lock.

    REFERENCE is as in `add`; `hf://org/repo` without a revision removes all revisions.
    """
    from twinkle_registry.trust.editor import remove as forget
    from twinkle_registry.trust.editor import still_trusted

    removed = [name for reference in references for name in forget(reference)]
    if as_json:
        echo_json(removed)
    else:
        click.echo(f"no longer trusted: {', '.join(removed)}")
        for notice in still_trusted(removed, _open_hub):
            click.echo(notice)


COMMANDS = (add, lock, verify, remove)


def _editor(
    shown: "list[Proposal]", *, yes: bool, as_json: bool, asks_for: Sequence[str] = ("hub", "file", "pypi")
) -> "LockEditor":
    from twinkle._registry import registry
    from twinkle_registry.trust.editor import LockEditor

    def decide(proposal: "Proposal") -> bool:
        shown.append(proposal)
        if proposal.sort not in asks_for:
            return True
        if as_json:
            return yes
        click.echo(_described(proposal))
        return yes or _is_confirmed(proposal)

    return LockEditor(registry(), _open_hub, decide)


def _open_hub(scheme: str) -> Any:
    from twinkle._registry import registry
    from twinkle_registry.resolving import open_hub

    return open_hub(scheme, registry(), context=f"{scheme}://")


def _is_confirmed(proposal: "Proposal") -> bool:
    from twinkle.errors import NotTrusted

    try:
        return click.confirm(f"Trust {proposal.name}? It will run with all your rights", default=False)
    except click.Abort:
        click.echo()  # end the line of the prompt
        raise NotTrusted(f"add {proposal.name}: no answer; review the text above, then add --yes") from None


def _finish(ctx: click.Context, shown: "list[Proposal]", accepted: "list[Proposal | None]", *, as_json: bool) -> None:
    from twinkle_registry.settings import lock_path

    proposals = [proposal for proposal in accepted if proposal is not None]
    declined = [proposal for proposal in shown if proposal not in proposals]
    if as_json:
        echo_json([_plain(p, accepted=True) for p in proposals] + [_plain(p, accepted=False) for p in declined])
    else:
        for proposal in declined:
            click.echo(f"not trusted: {proposal.name}" + (f": {proposal.problem}" if proposal.problem else ""))
        same = [proposal for proposal in proposals if proposal.state == "same"]
        click.echo(
            f"{lock_path()}: {len(proposals) - len(same)} written, {len(same)} unchanged, {len(declined)} declined"
        )
    ctx.exit(1 if len(proposals) < len(accepted) else 0)


def _described(proposal: "Proposal") -> str:
    from twinkle_cli.text import pairs
    from twinkle_registry.trust.review import printable

    review = proposal.review
    moved = proposal.origin if proposal.origin and not proposal.name.startswith(proposal.origin) else ""
    head = pairs(
        [
            (proposal.sort, proposal.name),
            ("now at", moved),
            ("version", proposal.version),
            ("trusted", proposal.trusted if proposal.trusted != proposal.version else ""),
            ("offers", printable(", ".join(proposal.offers))),
            ("missing", printable(", ".join(proposal.missing))),
        ]
    )
    files = [
        (printable(f.path), f.size, ", ".join(f.imports) or "-", f.problem or ", ".join(f.reaches) or "-")
        for f in review.files
    ]
    lines = [head, *([table(("file", "bytes", "imports", "uses"), files)] if files else [])]
    if files:
        count = "1 file" if len(files) == 1 else f"{len(files)} files"
        tests = f"; its tests need {', '.join(review.imports_of_tests)} too" if review.imports_of_tests else ""
        lines.append(f"{count}, {review.size} bytes; needs {', '.join(review.imports) or 'nothing'}{tests}")
    news = [f"{change}: {printable(', '.join(paths))}" for change, paths in _news(proposal) if paths]
    return "\n".join([*lines, *news, *review.diff])


def _news(proposal: "Proposal") -> list[tuple[str, tuple[str, ...]]]:
    review = proposal.review
    return [("added", review.added), ("removed", review.removed), ("changed", review.changed)]


def _plain(proposal: "Proposal", *, accepted: bool) -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(proposal), "accepted": accepted}


def short(version: str) -> str:
    """Return a version as shown in tables: commits are abbreviated."""
    return version[:12] if len(version) >= 40 else version
