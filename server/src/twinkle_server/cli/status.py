"""`twinkle server status` and `ready`."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from twinkle_server.cli.common import HELP, as_json_option, data_folder, echo, find_orphans, user_errors, with_store

if TYPE_CHECKING:
    from twinkle_server.store.opening import Store


@click.command(context_settings=HELP)
@data_folder
@as_json_option
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


@click.command(context_settings=HELP)
@data_folder
@as_json_option
@click.pass_context
def ready(context: click.Context, /, data: Path, as_json: bool) -> None:
    """Report whether the running server is ready for requests; exit code 1 if it is not. For health checks."""
    from twinkle_server.telemetry.status import ask_ready

    good, fields = ask_ready(data.absolute())
    text = "ready" if good else f"not ready: {', '.join(_reasons(fields)) or 'no server responds'}"
    echo({"ready": good, **fields}, as_json, [text])
    context.exit(0 if good else 1)


def _reasons(fields: dict[str, Any]) -> list[str]:
    """Return why a server is not ready, and the rest of its answer; a drain comes first, because it explains itself."""
    drains = ["draining (operations that run finish, and new ones are refused)"] if fields.get("draining") else []
    return drains + [f"{name} {fields[name]}" for name in ("engine", "last_pass", "store") if name in fields]


async def _figures(store: "Store") -> dict[str, Any]:
    """Return the figures of the database, the trash, and orphans."""
    from twinkle_server.checkpoints.upkeep import trash_figures
    from twinkle_server.telemetry.status import read_figures

    orphaned = await find_orphans(store)
    figures = {"entries": len(orphaned), "bytes": sum(orphan.size for orphan in orphaned)}
    return {**await read_figures(store.database), "trash": trash_figures(store.data), "orphans": figures}


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
