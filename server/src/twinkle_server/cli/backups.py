"""`twinkle server backup`, `restore`, `verify-backup` and `set-aside`: the folder as a whole."""

from pathlib import Path

import click

from twinkle_server.cli.common import FOLDER, HELP, as_json_option, data_folder, day, echo, user_errors


@click.command("set-aside", context_settings=HELP)
@data_folder
@as_json_option
def set_aside(data: Path, as_json: bool) -> None:
    """Move everything in the folder aside, so that the next start uses an empty folder; nothing is deleted."""
    from twinkle_server.store.aside import set_aside as move

    with user_errors():
        target = move(data.absolute())
    lines = [f"moved to {target}", "the next `twinkle serve` creates a new database and prints a new operator key"]
    echo({"folder": str(target)}, as_json, lines)


@click.command(context_settings=HELP)
@data_folder
@click.option("--to", type=FOLDER, required=True, help="Backup folder; created if needed.")
@click.option("--keep", type=click.IntRange(1), help="Number of newest backups that are kept. By default all.")
@click.option("--compare", is_flag=True, help="Read all files again, instead of trusting the previous backup.")
@as_json_option
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


@click.command(context_settings=HELP)
@click.option("--from", "source", type=FOLDER, required=True, help="Backup folder, or one backup in it.")
@click.option("--data", type=FOLDER, required=True, help="New folder for the service; must be empty or missing.")
@as_json_option
def restore(source: Path, data: Path, as_json: bool) -> None:
    """Verify the newest backup, and make a folder for `twinkle serve --data` of it."""
    from twinkle_server.backup.restoring import restore_backup

    with user_errors():
        made, listing = restore_backup(source.absolute(), data.absolute())
    lines = [f"damaged before the backup: {text}" for text in listing.damaged]
    lines.append(f"restored {made} of {day(listing.created)} to {data}: {len(listing.files)} files")
    fields = {"backup": str(made), "created": listing.created, "files": len(listing.files), "bytes": listing.size}
    echo({**fields, "damaged": list(listing.damaged)}, as_json, lines)


@click.command("verify-backup", context_settings=HELP)
@click.argument("folder", type=FOLDER)
@as_json_option
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
    lines.append(f"{made} of {day(listing.created)}: {len(listing.files)} files, {listing.size} bytes; {last}")
    echo({**fields, "damaged": problems, "damaged_before": list(listing.damaged)}, as_json, lines)
    context.exit(1 if problems else 0)
