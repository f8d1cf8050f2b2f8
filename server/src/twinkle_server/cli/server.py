"""`twinkle server`: keys, status and content of a data directory, for its operator."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from twinkle.errors import ConfigError
from twinkle_server.errors import ServiceError, StoreError

if TYPE_CHECKING:
    from twinkle_server.checkpoints.upkeep import Orphan
    from twinkle_server.store.opening import Store
    from twinkle_server.store.records import Key


T = TypeVar("T")
_NAMES = {"help_option_names": ["-h", "--help"]}
_data = click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="Folder of the service.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Write JSON.")


@click.group("server", context_settings=_NAMES)
def main() -> None:
    """Manage a training service: its keys, what it does, and what its folder holds."""


@main.group(context_settings=_NAMES)
def keys() -> None:
    """Make, list and revoke keys; a running server notices within a second."""


@keys.command(context_settings=_NAMES)
@click.argument("name")
@_data
@click.option("--role", type=click.Choice(["user", "operator"]), default="user", show_default=True, help="What it may.")
@click.option("--tenant", help="Tenant of the key: keys of one tenant see the same runs. By default NAME.")
@click.option("--tokens-per-second", type=float, help="Average limit of tokens per second.")
@click.option("--operations", type=int, help="Limit of pending operations.")
@click.option("--adapters", type=int, help="Limit of models.")
@click.option("--bytes", "stored", type=int, help="Limit of all checkpoints together.")
@click.option("--keep", type=int, help="Newest checkpoints of a model and kind that are kept.")
@_json
def create(
    name: str,
    data: Path,
    role: str,
    tenant: str | None,
    as_json: bool,
    tokens_per_second: float | None,
    operations: int | None,
    adapters: int | None,
    stored: int | None,
    keep: int | None,
) -> None:
    """Create a key and print it once."""
    from twinkle_server.tenancy.keys import issue

    asked = {
        "tokens_per_second": tokens_per_second,
        "operations": operations,
        "adapters": adapters,
        "bytes": stored,
        "keep": keep,
    }
    quotas = {quota: value for quota, value in asked.items() if value is not None}
    kind: Any = role
    key = with_store(data, lambda store: issue(store, name, role=kind, tenant=tenant, quotas=quotas))
    echo({"name": name, "key": key}, as_json, [key])


@keys.command("list", context_settings=_NAMES)
@_data
@click.option("--all", "revoked", is_flag=True, help="Revoked ones too.")
@_json
def list_keys(data: Path, revoked: bool, as_json: bool) -> None:
    """List keys by name; the keys themselves are not stored."""
    found = with_store(data, lambda store: store.keys.all(revoked=revoked))
    echo([_shown(key) for key in found], as_json, [_line(key) for key in found] or ["no keys"])


@keys.command(context_settings=_NAMES)
@click.argument("name")
@_data
@_json
def revoke(name: str, data: Path, as_json: bool) -> None:
    """Revoke a key; the data of its tenant is kept."""
    from twinkle_server.tenancy.keys import revoke as end

    found = with_store(data, lambda store: end(store, name))
    echo(_shown(found), as_json, [f"revoked {found.name}"])


@main.command(context_settings=_NAMES)
@_data
@_json
def status(data: Path, as_json: bool) -> None:
    """Show the state of the service: from the server if one runs, otherwise from its folder."""
    from twinkle_server.store.inspection import check_database, check_whole
    from twinkle_server.telemetry.status import ask, find

    said = ask(data)
    if said is None:
        here = find(data)
        with told():
            check_database(data)
            check_whole(data)
        said = {"running": False, "silent": here and here.pid, **with_store(data, _figures)}
    else:
        said = {"running": True, **said}
    echo(said, as_json, list(_status_lines(said)))


async def _figures(store: "Store") -> dict[str, Any]:
    """Return what the database knows, and what lies beside it."""
    from twinkle_server.checkpoints.upkeep import trash_figures
    from twinkle_server.telemetry.status import read_figures

    left = await find_orphans(store)
    beside = {"trash": trash_figures(store.data), "orphans": {"entries": len(left), "bytes": sum(e.size for e in left)}}
    return {**await read_figures(store.database), **beside}


def with_store(data: Path, work: "Callable[[Store], Awaitable[T]]") -> T:
    """Open the directory beside whoever serves it, do something, and close it."""
    from twinkle_server.store.opening import open_store

    async def run() -> T:
        store = open_store(data.absolute(), serve=False)
        try:
            return await work(store)
        finally:
            store.close()

    with told():
        return asyncio.run(run())


def _shown(key: "Key") -> dict[str, Any]:
    return {
        "name": key.name,
        "tenant": key.tenant,
        "role": key.role,
        "created": key.created,
        "revoked": key.revoked,
        "quotas": key.quotas,
    }


def _line(key: "Key") -> str:
    day = datetime.fromtimestamp(key.created, UTC).strftime("%Y-%m-%d")
    quotas = "".join(f"  {name}={value:g}" for name, value in key.quotas.items())
    ended = "  revoked" if key.revoked else ""
    return f"{key.name}  {key.role}  tenant {key.tenant}  since {day}{quotas}{ended}"


def _status_lines(said: dict[str, Any]) -> list[str]:
    if said["running"]:
        up = time.time() - said["started"]
        lines = [f"serves {said['model']} at {said['url']} (pid {said['pid']}, up {_span(up)})"]
    elif said["silent"]:
        lines = [f"a server runs (pid {said['silent']}) and does not answer; its folder says:"]
    else:
        lines = ["no server runs here"]
    for name, value in said.items():
        if name in ("running", "silent", "pid", "url", "model", "started"):
            continue
        if name == "paths":
            lines += [f"fast path {path['summary']}" for path in value]
            continue
        lines.append(f"{name}: {_plain(value)}")
    return lines


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(each)}" for name, each in value.items()) or "none"
    return str(value)


def _span(seconds: float) -> str:
    minutes = int(seconds) // 60
    return f"{minutes // 60}h {minutes % 60}m" if minutes >= 60 else f"{minutes}m {int(seconds) % 60}s"


def _hours_and_minutes(seconds: float) -> str:
    minutes = int(seconds) // 60
    return f"{minutes // 60}h {minutes % 60}m"


def echo(data: Any, as_json: bool, lines: list[str]) -> None:
    """Write data as JSON, or its lines for people."""
    if as_json:
        from twinkle.cli import echo_json

        echo_json(data)
        return
    for line in lines:
        click.echo(line)


_hours = click.option(
    "--hours",
    default=24.0,
    show_default=True,
    type=click.FloatRange(0),
    help="How long it is kept in the trash.",
)


@main.command(context_settings=_NAMES)
@_data
@click.option("--files", is_flag=True, help="Also compare the files of checkpoints and snapshots with their digests.")
@_json
def check(data: Path, files: bool, as_json: bool) -> None:
    """Check the database and that all its folders exist; exit code 1 if something is wrong.

    Works while a service runs. Nothing is changed.
    """
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


@main.command("set-aside", context_settings=_NAMES)
@_data
@_json
def set_aside(data: Path, as_json: bool) -> None:
    """Move everything in the folder aside, so that the next start uses an empty folder; nothing is deleted."""
    from twinkle_server.store.aside import set_aside as move

    with told():
        target = move(data.absolute())
    lines = [f"moved to {target}", "the next `twinkle serve` makes a new database and prints a new operator's key"]
    echo({"folder": str(target)}, as_json, lines)


@main.group(context_settings=_NAMES)
def trash() -> None:
    """Show, restore and empty what was removed; works while a service runs."""


@trash.command("list", context_settings=_NAMES)
@_data
@_json
def list_trash(data: Path, as_json: bool) -> None:
    """List entries in the order in which they are emptied."""
    from twinkle_server.checkpoints.trash import described

    said: list[dict[str, Any]] = with_store(data, described)
    lines = [
        f"{each['name']}  {each['bytes']} bytes  {each['checkpoint'] or each['folder']}  "
        f"emptied in {_hours_and_minutes(each['emptied_in_seconds'])}"
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

    bin_ = Trash(data.absolute())
    found = list(bin_.entries())
    names = _chosen([each.name for each in found], entries, everything, "trash")
    bin_.finish()
    removed = [each for each in found if each.name in names and bin_.remove(each)]
    size = sum(each.size for each in removed)
    echo({"removed": len(removed), "bytes": size}, as_json, [f"removed {len(removed)} entries, {size} bytes"])


@main.group(context_settings=_NAMES)
def orphans() -> None:
    """Show and remove folders and files that no row of the database ever named; works while a service runs."""


@orphans.command("list", context_settings=_NAMES)
@_data
@_json
def list_orphans(data: Path, as_json: bool) -> None:
    """List them, oldest first; what was changed within the last hour is left out."""
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
    from twinkle_server.checkpoints.upkeep import needed
    from twinkle_server.checkpoints.upkeep import orphans as find
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


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


@contextmanager
def told() -> Iterator[None]:
    """Turn an error of the service into one that the command line shows as a message."""
    try:
        yield
    except (ServiceError, StoreError) as error:
        raise ConfigError(str(error)) from error
