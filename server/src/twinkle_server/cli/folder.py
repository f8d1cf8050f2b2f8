"""`twinkle server check | set-aside | trash | orphans`: the content of a data directory, for its operator."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from twinkle_server.checkpoints.sweep import Orphan
    from twinkle_server.store.opening import Store

_NAMES = {"help_option_names": ["-h", "--help"]}
_data = click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="Folder of the service.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Write JSON.")
_hours = click.option(
    "--hours",
    default=24.0,
    show_default=True,
    type=click.FloatRange(0),
    help="How long it is kept in the trash.",
)


@click.command(context_settings=_NAMES)
@_data
@click.option("--files", is_flag=True, help="Also compare the files of checkpoints and snapshots with their digests.")
@_json
def check(data: Path, files: bool, as_json: bool) -> None:
    """Check the database and that all its folders exist; exit code 1 if something is wrong.

    Works while a service runs. Nothing is changed.
    """
    from twinkle_server.cli.problems import told
    from twinkle_server.cli.server import echo, with_store
    from twinkle_server.store.inspection import check_database, check_whole

    with told():
        check_database(data)
        check_whole(data, full=True)
    said = with_store(data, lambda store: _checked(store, files))
    lines = [f"missing: {folder}, which the database names" for folder in said["missing"]]
    lines += [f"damaged: {text}" for text in said["damaged"]]
    lines += [f"orphans: {said['orphans']} that no row ever named; see `twinkle server orphans list`"] * bool(
        said["orphans"]
    )
    wrong = bool(said["missing"] or said["damaged"])
    last = "restore what is wrong from a backup, or from `twinkle server trash`" if wrong else "database: whole"
    echo(said, as_json, [*lines, f"{said['checked']} folders checked; {last}"])
    click.get_current_context().exit(1 if wrong else 0)


@click.command("set-aside", context_settings=_NAMES)
@_data
@_json
def set_aside(data: Path, as_json: bool) -> None:
    """Move everything in the folder aside, so that the next start uses an empty folder; nothing is deleted."""
    from twinkle_server.cli.problems import told
    from twinkle_server.cli.server import echo
    from twinkle_server.store.aside import set_aside as move

    with told():
        target = move(data.absolute())
    lines = [f"moved to {target}", "the next `twinkle serve` makes a new database and prints a new operator's key"]
    echo({"folder": str(target)}, as_json, lines)


@click.group(context_settings=_NAMES)
def trash() -> None:
    """Show, restore and empty what was removed; works while a service runs."""


@trash.command("list", context_settings=_NAMES)
@_data
@_json
def list_trash(data: Path, as_json: bool) -> None:
    """List entries in the order in which they are emptied."""
    from twinkle_server.checkpoints.trash import described
    from twinkle_server.cli.server import echo, with_store

    said: list[dict[str, Any]] = with_store(data, described)
    lines = [
        f"{each['name']}  {each['bytes']} bytes  {each['checkpoint'] or each['folder']}  "
        f"emptied in {_span(each['emptied_in_seconds'])}"
        for each in said
    ]
    echo(said, as_json, lines or ["the trash is empty"])


@trash.command("restore", context_settings=_NAMES)
@click.argument("entry")
@_data
@_json
def restore_entry(entry: str, data: Path, as_json: bool) -> None:
    """Restore ENTRY, a name from `list`.

    A checkpoint that is restored no longer expires by itself; a quota `--keep` still counts it.
    """
    from twinkle_server.checkpoints.trash import restore
    from twinkle_server.cli.server import echo, with_store

    said = with_store(data, lambda store: restore(store, entry))
    echo({"restored": said}, as_json, [f"restored {said}"])


@trash.command("empty", context_settings=_NAMES)
@click.argument("entries", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Every entry.")
@_data
@_json
def empty(entries: tuple[str, ...], everything: bool, data: Path, as_json: bool) -> None:
    """Remove ENTRIES (names from `list`) permanently."""
    from twinkle_server.checkpoints.trash import Trash
    from twinkle_server.cli.server import echo

    bin_ = Trash(data.absolute())
    found = list(bin_.entries())
    names = _chosen([each.name for each in found], entries, everything, "trash")
    bin_.finish()
    removed = [each for each in found if each.name in names and bin_.remove(each)]
    size = sum(each.size for each in removed)
    echo({"removed": len(removed), "bytes": size}, as_json, [f"removed {len(removed)} entries, {size} bytes"])


@click.group(context_settings=_NAMES)
def orphans() -> None:
    """Show and remove folders and files that no row of the database ever named; works while a service runs."""


@orphans.command("list", context_settings=_NAMES)
@_data
@_json
def list_orphans(data: Path, as_json: bool) -> None:
    """List them, oldest first; what was changed within the last hour is left out."""
    from twinkle_server.cli.server import echo, with_store

    found = with_store(data, find_orphans)
    said = [{"folder": each.folder, "changed": each.changed, "bytes": each.size} for each in found]
    lines = [f"{each.folder}  {each.size} bytes  changed {_day(each.changed)}" for each in found]
    echo(said, as_json, lines or ["no orphans"])


@orphans.command("remove", context_settings=_NAMES)
@click.argument("folders", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Every one that `list` shows.")
@_hours
@_data
@_json
def remove_orphans(folders: tuple[str, ...], everything: bool, hours: float, data: Path, as_json: bool) -> None:
    """Move FOLDERS, as `list` names them, to the trash."""
    from twinkle_server.checkpoints.trash import Trash
    from twinkle_server.cli.server import echo, with_store

    found = with_store(data, find_orphans)
    names = _chosen([each.folder for each in found], folders, everything, "orphans")
    bin_, until = Trash(data.absolute()), time.time() + hours * 3600
    sizes = [bin_.put(data.absolute() / name, until) for name in names]
    moved = [size for size in sizes if size is not None]
    said = {"moved": len(moved), "bytes": sum(moved)}
    echo(said, as_json, [f"moved {len(moved)} to the trash, {sum(moved)} bytes; kept there for {hours:g} hours"])


def _chosen(there: list[str], asked: tuple[str, ...], everything: bool, what: str) -> list[str]:
    """Return the names that were asked for, each of which is there."""
    if everything == bool(asked):
        raise click.UsageError(f"specify names from `twinkle server {what} list`, or --all")
    for name in asked:
        if name not in there:
            raise click.UsageError(f"{name!r} does not exist; `twinkle server {what} list` shows the names")
    return there if everything else list(asked)


async def find_orphans(store: "Store") -> "list[Orphan]":
    """Return what no row of a data directory ever named."""
    from twinkle_server.checkpoints.sweep import orphans as find
    from twinkle_server.checkpoints.upkeep import needed
    from twinkle_server.store import folders

    now = time.time()
    referenced, named = await needed(store.retention), await folders.all_named(store.database)
    return await asyncio.to_thread(find, store.data, referenced, named, now=now)


async def _checked(store: "Store", files: bool) -> dict[str, Any]:
    from twinkle_server.checkpoints.upkeep import needed, trash_figures
    from twinkle_server.engine.files import Damaged, verify

    def compare(folders: list[str], test: Callable[[Path], object]) -> list[str]:
        damaged = []
        for folder in folders:
            try:
                test(store.data / folder)
            except Damaged as error:
                damaged.append(str(error))
        return damaged

    named = sorted(await needed(store.retention))
    missing = [folder for folder in named if not (store.data / folder).exists()]
    whole = [name for name in named if name not in missing and name.partition("/")[0] in ("checkpoints", "snapshots")]
    damaged = await asyncio.to_thread(compare, whole, verify) if files else []
    return {
        "database": "whole",
        "checked": len(named),
        "missing": missing,
        "damaged": damaged,
        "orphans": len(await find_orphans(store)),
        "trash": trash_figures(store.data),
    }


def _span(seconds: float) -> str:
    minutes = int(seconds) // 60
    return f"{minutes // 60}h {minutes % 60}m"


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
