"""`twinkle plugins search`: published components, installed here or not."""

from typing import TYPE_CHECKING, Any

import click

from twinkle_cli.text import echo_json, table

if TYPE_CHECKING:
    from twinkle_registry.index import IndexEntry


@click.command(short_help="Search the index of published components.")
@click.argument("words", nargs=-1)
@click.option("--kind", default="", help="Only components of this kind.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
@click.pass_context
def search(ctx: click.Context, words: tuple[str, ...], kind: str, as_json: bool) -> None:
    """Search the index of published components, without a network; exit code 1 if nothing is found.

    All WORDS must occur, ignoring case, in name, kind, summary, author or place; without WORDS, all entries are shown.
    """
    from twinkle._registry import registry
    from twinkle_registry.explain import unknown_kind
    from twinkle_registry.index import search as look
    from twinkle_registry.naming import canonical

    if kind and kind not in registry().kinds:
        raise unknown_kind(kind, registry().kinds)
    here = {canonical(record.dist) for record in registry().records}
    entries = [_plain(entry, installed=canonical(entry.place) in here) for entry in look(words, kind)]
    if as_json:
        echo_json(entries)
    elif entries:
        head = ("kind", "name", "get it by", "summary")
        click.echo(table(head, [(row["kind"], row["name"], _way(row), row["summary"]) for row in entries]))
    else:
        click.echo(_nothing(words, kind))
    ctx.exit(0 if entries else 1)


def _plain(entry: "IndexEntry", *, installed: bool) -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(entry), "installed": installed, "command": entry.command}


def _way(row: dict[str, Any]) -> str:
    return f"{row['package'] or row['repository']} (installed)" if row["installed"] else str(row["command"])


def _nothing(words: tuple[str, ...], kind: str) -> str:
    from twinkle_registry import nearest
    from twinkle_registry.index import index_entries

    names = dict.fromkeys(entry.name for entry in index_entries() if kind in ("", entry.kind))
    close = dict.fromkeys(name for word in words for name in nearest(word, names))
    of_kind = f" of kind {kind}" if kind else ""
    hint = f"nearest: {', '.join(close)}" if close else "`twinkle plugins search` shows everything"
    own = "; what is installed here only: twinkle plugins list KIND"
    return f"the index of published plugins has nothing{of_kind} with {' '.join(words)!r}; {hint}{own}"
