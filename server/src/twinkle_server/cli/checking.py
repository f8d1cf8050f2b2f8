"""`twinkle server print` and `check`: settings, and the data folder."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from twinkle_server.cli.common import HELP, as_json_option, echo, find_orphans, user_errors, with_store
from twinkle_server.cli.serve import effective, parameter_of, settings_options

if TYPE_CHECKING:
    from twinkle_server.store.opening import Store


@click.command("print", context_settings=HELP)
@settings_options
@as_json_option
@click.pass_context
def print_settings(context: click.Context, /, as_json: bool, **_values: Any) -> None:
    """Print the effective settings of `twinkle serve` with these arguments, and where each one comes from.

    The output is a configuration file. Secrets are not shown.
    """
    from twinkle_server.configuration import describe, render

    found = effective(context, partial=True)
    echo(describe(found), as_json, [render(found).removesuffix("\n")])


@click.command(context_settings=HELP)
@settings_options
@click.option("--files", is_flag=True, help="Also compare the files of checkpoints and snapshots with their digests.")
@as_json_option
@click.pass_context
def check(context: click.Context, /, files: bool, as_json: bool, **values: Any) -> None:
    """Check a data folder, or with `--config` the settings of `twinkle serve`; exit code 1 after errors.

    `--data DIR` checks the database, and that all its folders exist, also while a service runs. `--config FILE` checks
    the file, the flags beside it, and what they name: the model, the engine and its options, losses, the chat template,
    data sets, the certificate, the collector of traces, the data folder, and whether the service can listen. Nothing is
    changed.
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
