"""`twinkle server trash` and `orphans`: what was removed, and what nothing references."""

import time
from pathlib import Path
from typing import Any

import click

from twinkle_server.cli.common import HELP, as_json_option, data_folder, day, echo, find_orphans, with_store

_hours = click.option(
    "--hours",
    default=24.0,
    show_default=True,
    type=click.FloatRange(0),
    help="How long it is kept in the trash.",
)


@click.group(context_settings=HELP)
def trash() -> None:
    """Show, restore and empty the trash; works while a service runs."""


@trash.command("list", context_settings=HELP)
@data_folder
@as_json_option
def list_trash(data: Path, as_json: bool) -> None:
    """List entries in the order of their expiry."""
    from twinkle_server.checkpoints.trash import describe_entries

    rows: list[dict[str, Any]] = with_store(data, describe_entries)
    lines = [
        f"{row['name']}  {row['bytes']} bytes  {row['checkpoint'] or row['folder']}  "
        f"emptied in {_hours_and_minutes(row['emptied_in_seconds'])}"
        for row in rows
    ]
    echo(rows, as_json, lines or ["the trash is empty"])


@trash.command("restore", context_settings=HELP)
@click.argument("entry")
@data_folder
@as_json_option
def restore_entry(entry: str, data: Path, as_json: bool) -> None:
    """Restore ENTRY, a name from `list`.

    A restored checkpoint no longer expires; it counts for the quota `--keep`.
    """
    from twinkle_server.checkpoints.trash import restore

    path = with_store(data, lambda store: restore(store, entry))
    echo({"restored": path}, as_json, [f"restored {path}"])


@trash.command("empty", context_settings=HELP)
@click.argument("entries", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Every entry.")
@data_folder
@as_json_option
def empty(entries: tuple[str, ...], everything: bool, data: Path, as_json: bool) -> None:
    """Remove ENTRIES (names from `list`) permanently."""
    from twinkle_server.checkpoints.trash import Trash

    trash_folder = Trash(data.absolute())
    rows = list(trash_folder.entries())
    names = _select([row.name for row in rows], entries, everything, "trash")
    trash_folder.finish()
    removed = [row for row in rows if row.name in names and trash_folder.remove(row)]
    size = sum(row.size for row in removed)
    echo({"removed": len(removed), "bytes": size}, as_json, [f"removed {len(removed)} entries, {size} bytes"])


@click.group(context_settings=HELP)
def orphans() -> None:
    """List and remove folders and files that no row of the database ever named; works while a service runs."""


@orphans.command("list", context_settings=HELP)
@data_folder
@as_json_option
def list_orphans(data: Path, as_json: bool) -> None:
    """List orphans, oldest first, except those changed within the last hour."""
    rows = with_store(data, find_orphans)
    fields = [{"folder": row.folder, "changed": row.changed, "bytes": row.size} for row in rows]
    lines = [f"{row.folder}  {row.size} bytes  changed {day(row.changed)}" for row in rows]
    echo(fields, as_json, lines or ["no orphans"])


@orphans.command("remove", context_settings=HELP)
@click.argument("folders", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Remove all that `list` shows.")
@_hours
@data_folder
@as_json_option
def remove_orphans(folders: tuple[str, ...], everything: bool, hours: float, data: Path, as_json: bool) -> None:
    """Move FOLDERS (names from `list`) to the trash."""
    from twinkle_server.checkpoints.trash import Trash

    rows = with_store(data, find_orphans)
    names = _select([row.folder for row in rows], folders, everything, "orphans")
    trash_folder, until = Trash(data.absolute()), time.time() + hours * 3600
    sizes = [trash_folder.put(data.absolute() / name, until) for name in names]
    moved = [size for size in sizes if size is not None]
    report = {"moved": len(moved), "bytes": sum(moved)}
    echo(report, as_json, [f"moved {len(moved)} to the trash, {sum(moved)} bytes; kept there for {hours:g} hours"])


def _select(names: list[str], requested: tuple[str, ...], everything: bool, what: str) -> list[str]:
    """Return the requested names, after checking that they exist."""
    if everything == bool(requested):
        raise click.UsageError(f"specify names from `twinkle server {what} list`, or --all")
    for name in requested:
        if name not in names:
            raise click.UsageError(f"{name!r} does not exist; `twinkle server {what} list` shows the names")
    return names if everything else list(requested)


def _hours_and_minutes(seconds: float) -> str:
    minutes = int(seconds) // 60
    return f"{minutes // 60}h {minutes % 60}m"
