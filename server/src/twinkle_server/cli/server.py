"""`twinkle server`: keys and status of a data directory, whether or not a server runs on it; `folder` has the rest."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from twinkle_server.cli import folder

if TYPE_CHECKING:
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


for each in (folder.check, folder.set_aside, folder.trash, folder.orphans):
    main.add_command(each)


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
    from twinkle_server.cli.problems import told
    from twinkle_server.store.inspection import check_database, check_whole
    from twinkle_server.telemetry import presence
    from twinkle_server.telemetry.status import ask

    said = ask(data)
    if said is None:
        here = presence.find(data)
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

    left = await folder.find_orphans(store)
    beside = {"trash": trash_figures(store.data), "orphans": {"entries": len(left), "bytes": sum(e.size for e in left)}}
    return {**await read_figures(store.database), **beside}


def with_store(data: Path, work: "Callable[[Store], Awaitable[T]]") -> T:
    """Open the directory beside whoever serves it, do something, and close it."""
    from twinkle_server.cli.problems import told
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


def echo(data: Any, as_json: bool, lines: list[str]) -> None:
    """Write data as JSON, or its lines for people."""
    if as_json:
        from twinkle.cli import echo_json

        echo_json(data)
        return
    for line in lines:
        click.echo(line)
