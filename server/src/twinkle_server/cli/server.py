"""`twinkle server`: keys, status and content of a data folder, for operators."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from twinkle.errors import ConfigError
from twinkle_server.cli.merge import merge
from twinkle_server.cli.serve import effective, parameter_of, settings_options
from twinkle_server.errors import ServiceError, StoreError

if TYPE_CHECKING:
    from twinkle_server.checkpoints.upkeep import Orphan
    from twinkle_server.store.opening import Store
    from twinkle_server.store.records import Key


T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_NAMES = {"help_option_names": ["-h", "--help"]}
_data = click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    envvar="TWINKLE_SERVE_DATA",
    help="Folder of the service.",
)
_FOLDER = click.Path(file_okay=False, path_type=Path)
_json = click.option("--json", "as_json", is_flag=True, help="Write JSON.")


@click.group("server", context_settings=_NAMES)
def main() -> None:
    """Manage a training service: keys, status, settings, backups, and the content of its folder."""


merge.context_settings = _NAMES
main.add_command(merge)


@main.group(context_settings=_NAMES)
def keys() -> None:
    """Create, change, list and revoke keys; a running server notices changes within seconds."""


class QuotaType(click.ParamType):  # type: ignore[type-arg] # generic only to the type checker
    """The value of a quota: a number, or where a quota is changed, `none`."""

    name = "number"

    def __init__(self, removable: bool) -> None:
        self._removable = removable

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click."""
        if self._removable and value == _NONE:
            return value
        try:
            number = float(value)
        except ValueError:
            self.fail(f"{value!r} must be a number" + " or 'none'" * self._removable, param, ctx)
        return int(number) if number.is_integer() else number


_NONE = "none"
QUOTAS = {
    "tokens_per_second": "Average limit of tokens per second.",
    "operations": "Limit of pending operations.",
    "adapters": "Limit of models.",
    "bytes": "Limit of all checkpoints together.",
    "keep": "Newest checkpoints of a model and kind that are kept.",
    "weight": "Share of the computed tokens when several tenants wait, relative to 1.",
    "rollouts": "Recorded rows of a run that are kept for the dashboard; 0 records none.",
}


def quota_options(removable: bool) -> Callable[[F], F]:
    """Add an option for each quota of a key; the command gets them as keyword arguments.

    Args:
        removable: whether `none` removes a quota.
    """

    def add(command: F) -> F:
        for name, text in reversed(QUOTAS.items()):
            flag = f"--{name.replace('_', '-')}"
            command = click.option(flag, f"quota_{name}", type=QuotaType(removable), help=text)(command)
        return command

    return add


def _quotas(values: dict[str, Any]) -> dict[str, Any]:
    """Return the quotas that were given, by name; None removes one."""
    given = {name: values[f"quota_{name}"] for name in QUOTAS}
    return {name: None if value == _NONE else value for name, value in given.items() if value is not None}


@keys.command(context_settings=_NAMES)
@click.argument("name")
@_data
@click.option("--role", type=click.Choice(["user", "operator"]), default="user", show_default=True, help="What it may.")
@click.option("--tenant", help="Tenant of the key: keys of one tenant see the same runs. By default NAME.")
@quota_options(removable=False)
@_json
def create(name: str, data: Path, role: str, tenant: str | None, as_json: bool, **quotas: Any) -> None:
    """Create a key and print it once."""
    from twinkle_server.tenancy.keys import issue

    kind: Any = role
    key = with_store(data, lambda store: issue(store, name, role=kind, tenant=tenant, quotas=_quotas(quotas)))
    echo({"name": name, "key": key}, as_json, [key])


@keys.command("set", context_settings=_NAMES)
@click.argument("name")
@_data
@quota_options(removable=True)
@_json
def set_quotas(name: str, data: Path, as_json: bool, **quotas: Any) -> None:
    """Change quotas of the key NAME; `none` removes one, and the others stay.

    A running service applies the change within seconds. It is recorded in the audit log.
    """
    from twinkle_server.tenancy.keys import change

    changes = _quotas(quotas)
    if not changes:
        raise click.UsageError(f"specify what to change: {', '.join('--' + word.replace('_', '-') for word in QUOTAS)}")
    key = with_store(data, lambda store: change(store, name, changes))
    echo(_fields(key), as_json, [_line(key)])


@keys.command("list", context_settings=_NAMES)
@_data
@click.option("--all", "revoked", is_flag=True, help="Also list revoked keys.")
@_json
def list_keys(data: Path, revoked: bool, as_json: bool) -> None:
    """List keys by name; the keys themselves are not stored."""
    rows = with_store(data, lambda store: store.keys.all(revoked=revoked))
    echo([_fields(key) for key in rows], as_json, [_line(key) for key in rows] or ["no keys"])


@keys.command(context_settings=_NAMES)
@click.argument("name")
@_data
@_json
def revoke(name: str, data: Path, as_json: bool) -> None:
    """Revoke a key; the data of its tenant is kept."""
    from twinkle_server.tenancy.keys import revoke as end

    key = with_store(data, lambda store: end(store, name))
    echo(_fields(key), as_json, [f"revoked {key.name}"])


@main.command(context_settings=_NAMES)
@_data
@_json
def status(data: Path, as_json: bool) -> None:
    """Show the state of the service: from the server if one runs, otherwise from its folder."""
    from twinkle_server.store.inspection import check_database, check_whole
    from twinkle_server.telemetry.status import ask, find

    fields = ask(data)
    if fields is None:
        presence = find(data)
        with user_errors():
            check_database(data)
            check_whole(data)
        starting = presence is not None and not presence.ready
        fields = {"running": False, "silent": presence and presence.pid, "starting": starting}
        fields |= with_store(data, _figures)
    else:
        fields = {"running": True, "starting": fields["engine"] == "starting", **fields}
    echo(fields, as_json, list(_status_lines(fields)))


@main.command(context_settings=_NAMES)
@_data
@_json
@click.pass_context
def ready(context: click.Context, /, data: Path, as_json: bool) -> None:
    """Report whether the running server is ready for requests; exit code 1 if it is not. For health checks."""
    from twinkle_server.telemetry.status import ask_ready

    good, fields = ask_ready(data.absolute())
    reasons = ", ".join(f"{name} {fields[name]}" for name in ("engine", "last_pass", "store") if name in fields)
    text = "ready" if good else f"not ready: {reasons or 'no server responds'}"
    echo({"ready": good, **fields}, as_json, [text])
    context.exit(0 if good else 1)


async def _figures(store: "Store") -> dict[str, Any]:
    """Return the figures of the database, the trash, and orphans."""
    from twinkle_server.checkpoints.upkeep import trash_figures
    from twinkle_server.telemetry.status import read_figures

    orphaned = await find_orphans(store)
    figures = {"entries": len(orphaned), "bytes": sum(orphan.size for orphan in orphaned)}
    return {**await read_figures(store.database), "trash": trash_figures(store.data), "orphans": figures}


def with_store(data: Path, work: "Callable[[Store], Awaitable[T]]") -> T:
    """Open the directory, beside a running server if there is one, run `work`, and close it."""
    from twinkle_server.store.opening import open_store

    async def run() -> T:
        store = open_store(data.absolute(), serve=False)
        try:
            return await work(store)
        finally:
            store.close()

    with user_errors():
        return asyncio.run(run())


def _fields(key: "Key") -> dict[str, Any]:
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


def _status_lines(fields: dict[str, Any]) -> list[str]:
    if fields["running"]:
        up = time.time() - fields["started"]
        verb = "loads" if fields["starting"] else "serves"
        lines = [f"{verb} {fields['model']} at {fields['url']} (pid {fields['pid']}, up {_span(up)})"]
    elif fields["starting"]:
        lines = [f"the server (pid {fields['silent']}) is starting; status from its folder:"]
    elif fields["silent"]:
        lines = [f"the server (pid {fields['silent']}) does not respond; status from its folder:"]
    else:
        lines = ["no server runs on this folder"]
    for name, value in fields.items():
        if name in ("running", "silent", "starting", "pid", "url", "model", "started"):
            continue
        if name == "paths":
            lines += [f"fast path {path['summary']}" for path in value] or ["fast paths: the engine reports none"]
            continue
        if name == "tenants":
            lines += [f"tenant {tenant}: {_usage(used)}" for tenant, used in value.items()]
            continue
        lines.append(f"{name}: {_plain(value)}")
    return lines


def _usage(used: dict[str, Any]) -> str:
    tokens = ", ".join(
        f"{verb} {used[name]:,} tokens ({used[f'{name}_today']:,} today)"
        for verb, name in (("trained", "trained_tokens"), ("sampled", "sampled_tokens"))
    )
    saved = used["checkpoints"]
    weight = "" if used["weight"] in (None, 1.0) else f", weight {used['weight']:g}"
    return (
        f"{tokens}, {used['requests']:,} requests, {used['models']} models, {saved['count']} checkpoints "
        f"({saved['bytes']:,} bytes), {used['waiting']} waiting{weight}"
    )


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(item)}" for name, item in value.items()) or "none"
    return str(value)


def _span(seconds: float) -> str:
    minutes = int(seconds) // 60
    return f"{minutes // 60}h {minutes % 60}m" if minutes >= 60 else f"{minutes}m {int(seconds) % 60}s"


def _hours_and_minutes(seconds: float) -> str:
    minutes = int(seconds) // 60
    return f"{minutes // 60}h {minutes % 60}m"


def echo(data: Any, as_json: bool, lines: list[str]) -> None:
    """Print data as JSON, or as lines."""
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


@main.command("print", context_settings=_NAMES)
@settings_options
@_json
@click.pass_context
def print_settings(context: click.Context, /, as_json: bool, **_values: Any) -> None:
    """Print the effective settings of `twinkle serve` with these arguments, and where each one comes from.

    The output is a configuration file. Secrets are not shown.
    """
    from twinkle_server.configuration import describe, render

    found = effective(context, partial=True)
    echo(describe(found), as_json, [render(found).removesuffix("\n")])


@main.command(context_settings=_NAMES)
@settings_options
@click.option("--files", is_flag=True, help="Also compare the files of checkpoints and snapshots with their digests.")
@_json
@click.pass_context
def check(context: click.Context, /, files: bool, as_json: bool, **values: Any) -> None:
    """Check a data folder, or with `--config` the settings of `twinkle serve`; exit code 1 after errors.

    `--data DIR` checks the database, and that all its folders exist, also while a service runs. `--config FILE` checks
    the file, the flags beside it, the model, the certificate, and whether the service can listen. Nothing is changed.
    """
    if any(context.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in ("config", "model")):
        _check_settings(context, as_json)
        return
    data = values[parameter_of("data")]
    if data is None or not data.is_dir():
        raise click.UsageError("specify the folder of a service with --data, or a configuration file with --config")
    _check_folder(context, data, files, as_json)


def _check_settings(context: click.Context, as_json: bool) -> None:
    from twinkle_server.configuration import describe
    from twinkle_server.serve import try_settings

    found = effective(context)
    with user_errors():
        notes = try_settings(found.settings)
    changed = [row for row in describe(found) if row["origin"] != "default"]
    lines = [f"{row['key']}: {row['value']} ({row['origin']})" for row in changed]
    echo({"settings": changed, "notes": notes}, as_json, [*lines, *notes, "the settings are valid"])


def _check_folder(context: click.Context, data: Path, files: bool, as_json: bool) -> None:
    from twinkle_server.store.inspection import check_database, check_whole

    with user_errors():
        check_database(data)
        check_whole(data, full=True)
    report = with_store(data, lambda store: _check(store, files))
    lines = [f"missing: {folder}, which the database references" for folder in report["missing"]]
    lines += [f"damaged: {text}" for text in report["damaged"]]
    lines += [f"orphans: {report['orphans']}, which no row ever named; see `twinkle server orphans list`"] * bool(
        report["orphans"]
    )
    failed = bool(report["missing"] or report["damaged"])
    last = "restore them from a backup, or from `twinkle server trash`" if failed else "the database is intact"
    echo(report, as_json, [*lines, f"{report['checked']} folders checked; {last}"])
    context.exit(1 if failed else 0)


@main.command("set-aside", context_settings=_NAMES)
@_data
@_json
def set_aside(data: Path, as_json: bool) -> None:
    """Move everything in the folder aside, so that the next start uses an empty folder; nothing is deleted."""
    from twinkle_server.store.aside import set_aside as move

    with user_errors():
        target = move(data.absolute())
    lines = [f"moved to {target}", "the next `twinkle serve` creates a new database and prints a new operator key"]
    echo({"folder": str(target)}, as_json, lines)


@main.command(context_settings=_NAMES)
@_data
@click.option("--to", type=_FOLDER, required=True, help="Backup folder; created if needed.")
@click.option("--keep", type=click.IntRange(1), help="Number of newest backups that are kept. By default all.")
@click.option("--compare", is_flag=True, help="Read all files again, instead of trusting the previous backup.")
@_json
@click.pass_context
def backup(context: click.Context, /, data: Path, to: Path, keep: int | None, compare: bool, as_json: bool) -> None:
    """Back up the folder, also while a service runs; exit code 1 if files of the service are missing or damaged.

    Files of the previous backup are not copied again. After an interruption, the same command continues.
    """
    from twinkle_server.backup.making import backup as make

    with user_errors():
        made = make(data.absolute(), to.absolute(), keep, compare=compare)
    fields = {
        "backup": str(made.folder),
        "files": len(made.listing.files),
        "bytes": made.listing.size,
        "copied": made.copied,
        "copied_bytes": made.copied_bytes,
        "linked": made.linked,
        "damaged": list(made.listing.damaged),
    }
    lines = [f"damaged in {data}: {text}" for text in made.listing.damaged]
    lines.append(
        f"backed up to {made.folder}: {len(made.listing.files)} files, {made.listing.size} bytes; "
        f"{made.copied} files ({made.copied_bytes} bytes) copied, {made.linked} from before"
    )
    echo(fields, as_json, lines)
    context.exit(1 if made.listing.damaged else 0)


@main.command(context_settings=_NAMES)
@click.option("--from", "source", type=_FOLDER, required=True, help="Backup folder, or one backup in it.")
@click.option("--data", type=_FOLDER, required=True, help="New folder for the service; must be empty or missing.")
@_json
def restore(source: Path, data: Path, as_json: bool) -> None:
    """Verify the newest backup, and make a folder for `twinkle serve --data` of it."""
    from twinkle_server.backup.restoring import restore_backup

    with user_errors():
        made, listing = restore_backup(source.absolute(), data.absolute())
    lines = [f"damaged before the backup: {text}" for text in listing.damaged]
    lines.append(f"restored {made} of {_day(listing.created)} to {data}: {len(listing.files)} files")
    fields = {"backup": str(made), "created": listing.created, "files": len(listing.files), "bytes": listing.size}
    echo({**fields, "damaged": list(listing.damaged)}, as_json, lines)


@main.command("verify-backup", context_settings=_NAMES)
@click.argument("folder", type=_FOLDER)
@_json
@click.pass_context
def verify_backup(context: click.Context, /, folder: Path, as_json: bool) -> None:
    """Compare the newest backup in FOLDER, or the backup FOLDER, with its list; exit code 1 after errors."""
    from twinkle_server.backup.restoring import verify_backup as verify

    with user_errors():
        made, listing, problems = verify(folder.absolute())
    last = "replace the damaged files, or use another backup" if problems else "the backup is intact"
    fields = {"backup": str(made), "created": listing.created, "files": len(listing.files), "bytes": listing.size}
    lines = [f"damaged: {text}" for text in problems]
    lines += [f"damaged before the backup: {text}" for text in listing.damaged]
    lines.append(f"{made} of {_day(listing.created)}: {len(listing.files)} files, {listing.size} bytes; {last}")
    echo({**fields, "damaged": problems, "damaged_before": list(listing.damaged)}, as_json, lines)
    context.exit(1 if problems else 0)


@main.group(context_settings=_NAMES)
def trash() -> None:
    """Show, restore and empty the trash; works while a service runs."""


@trash.command("list", context_settings=_NAMES)
@_data
@_json
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


@trash.command("restore", context_settings=_NAMES)
@click.argument("entry")
@_data
@_json
def restore_entry(entry: str, data: Path, as_json: bool) -> None:
    """Restore ENTRY, a name from `list`.

    A restored checkpoint no longer expires; it counts for the quota `--keep`.
    """
    from twinkle_server.checkpoints.trash import restore

    path = with_store(data, lambda store: restore(store, entry))
    echo({"restored": path}, as_json, [f"restored {path}"])


@trash.command("empty", context_settings=_NAMES)
@click.argument("entries", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Every entry.")
@_data
@_json
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


@main.group(context_settings=_NAMES)
def orphans() -> None:
    """List and remove folders and files that no row of the database ever named; works while a service runs."""


@orphans.command("list", context_settings=_NAMES)
@_data
@_json
def list_orphans(data: Path, as_json: bool) -> None:
    """List orphans, oldest first, except those changed within the last hour."""
    rows = with_store(data, find_orphans)
    fields = [{"folder": row.folder, "changed": row.changed, "bytes": row.size} for row in rows]
    lines = [f"{row.folder}  {row.size} bytes  changed {_day(row.changed)}" for row in rows]
    echo(fields, as_json, lines or ["no orphans"])


@orphans.command("remove", context_settings=_NAMES)
@click.argument("folders", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Remove all that `list` shows.")
@_hours
@_data
@_json
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


async def find_orphans(store: "Store") -> "list[Orphan]":
    """Return the folders and files that no row of a data folder ever named."""
    from twinkle_server.checkpoints.upkeep import needed
    from twinkle_server.checkpoints.upkeep import orphans as find
    from twinkle_server.store import folders

    now = time.time()
    referenced, named = await needed(store.retention), await folders.all_named(store.database)
    return await asyncio.to_thread(find, store.data, referenced, named, now=now)


async def _check(store: "Store", files: bool) -> dict[str, Any]:
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
    published = [name for name in named if name not in missing and name.startswith(("checkpoints/", "snapshots/"))]
    damaged = await asyncio.to_thread(compare, published, verify) if files else []
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
def user_errors() -> Iterator[None]:
    """Convert errors of the service to errors that the command line prints as a message."""
    try:
        yield
    except (ServiceError, StoreError) as error:
        raise ConfigError(str(error)) from error
