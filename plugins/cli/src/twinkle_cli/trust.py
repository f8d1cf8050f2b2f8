"""`twinkle plugins trust|untrust`: whether the settings and the lock of a folder take effect."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from twinkle_cli.text import echo_json

if TYPE_CHECKING:
    from twinkle_registry.trust.folders import TrustedPath


def confirmed(question: str, *, action: str, remedy: str) -> bool:
    """Ask on the terminal and return the answer.

    Args:
        question: text of the question.
        action: action that requires the answer, for the error.
        remedy: how to do it without the question.

    Raises:
        NotTrusted: standard input is not a terminal, or ends without an answer.
    """
    from twinkle.errors import NotTrusted

    refused = NotTrusted(f"cannot {action}: there is no terminal to ask on; {remedy}")
    if not sys.stdin.isatty():
        raise refused
    try:
        return click.confirm(question, default=False)
    except click.Abort:
        click.echo()  # end the line of the question
        raise refused from None


_json = click.option("--json", "as_json", is_flag=True, help="Write JSON.")
_folder = click.argument("folder", default=".", type=click.Path(exists=True, file_okay=False, path_type=Path))


@click.command(short_help="Apply twinkle.toml and twinkle.lock of a folder, and allow testing its code.")
@_folder
@click.option("--yes", is_flag=True, help="Trust it without confirmation.")
@click.option("--list", "listing", is_flag=True, help="List what is trusted instead.")
@_json
def trust(folder: Path, yes: bool, listing: bool, as_json: bool) -> None:
    """Show the requests of FOLDER (by default the current one), ask, and trust it.

    `twinkle.toml` and `twinkle.lock` of the folder take effect then, until anything but Twinkle edits them, and
    `twinkle plugins test` runs code of the folder without asking. With --json and without --yes nothing is asked and
    nothing changes. In CI, set TWINKLE_TRUST_FOLDER to the absolute path instead.
    """
    if listing:
        _list(as_json)
        return
    from twinkle_registry.trust.folders import trust as record

    folder = folder.resolve()
    files = {name: content for name in _names() if (content := _content(folder / name)) is not None}
    asks = {name: _asks(folder / name, content) for name, content in files.items()}
    accepted = yes
    if not as_json:
        click.echo("\n".join(_described(folder, asks)))
        accepted = yes or _is_confirmed(folder)
    if accepted:
        for name, content in files.items():
            record(str(folder / name), [content])
        record(str(folder))
    if as_json:
        echo_json({"folder": str(folder), "asks": asks, "trusted": accepted})
    else:
        click.echo(f"{'trusted' if accepted else 'not trusted'}: {folder}")
    click.get_current_context().exit(0 if accepted else 1)


@click.command(short_help="Trust a folder no longer.")
@click.argument("folder", default=".", type=click.Path(path_type=Path))
@_json
def untrust(folder: Path, as_json: bool) -> None:
    """Stop trusting FOLDER (by default the current one), which need not exist any more."""
    from twinkle.errors import ComponentNotFound
    from twinkle_registry.trust.folders import is_trusted_folder, untrust

    removed = untrust(str(folder))
    if not removed:
        around = " itself, but a parent folder or one named by a variable is" * is_trusted_folder(str(folder))
        raise ComponentNotFound(f"{folder.resolve()} is not trusted{around}; see: twinkle plugins trust --list")
    if as_json:
        echo_json(removed)
    else:
        click.echo(f"no longer trusted: {', '.join(removed)}")


def _names() -> tuple[str, ...]:
    from twinkle_registry.settings import CONFIG_FILE, LOCK_NAME

    return CONFIG_FILE, LOCK_NAME


def _content(file: Path) -> bytes | None:
    """Return the content of a file, or None if it does not exist."""
    from twinkle.errors import SettingsError

    if not file.exists():
        return None
    if not file.is_file():
        raise SettingsError(f"cannot trust {file}: it is not a regular file")
    try:
        return file.read_bytes()
    except OSError as error:
        raise SettingsError(f"cannot trust {file}: it cannot be read ({error.strerror})") from error


def _asks(file: Path, content: bytes) -> list[str]:
    """Return the requests of a file in printable form, one line each.

    Raises:
        SettingsError: the file is damaged, so it cannot be trusted.
    """
    import tomllib

    from twinkle_registry.settings import LOCK_NAME, NEED_TRUST, ConfigFile, refuse_unknown_tables
    from twinkle_registry.trust.lock import parse_lock
    from twinkle_registry.trust.policy import trust_table
    from twinkle_registry.trust.review import printable

    if file.name == LOCK_NAME:
        lock = parse_lock(content, file)
        lines = [f"run {entry.reference} at {entry.commit}, {len(entry.files)} files" for entry in lock.hub]
        lines += [f"in a frozen run, use {entry.name} {entry.version}" for entry in lock.pypi]
        lines += [f"in a frozen run, use the file {entry.path}" for entry in lock.file]
        return [printable(line) for line in lines]
    try:
        raw: dict[str, Any] = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        from twinkle.errors import SettingsError

        raise SettingsError(f"{file}: cannot be read as TOML: {error}") from error
    refuse_unknown_tables(raw, str(file))
    config = ConfigFile(str(file), raw, is_trusted=False)
    table = trust_table(config)
    lines = [f"[trust] {key} = {table[key]!r}" for key in NEED_TRUST if table.get(key)]
    lines += [f"[plugins] {key} = {value!r}, overriding your own file" for key, value in config.plugins.items()]
    return [printable(line) for line in lines]


def _described(folder: Path, asks: dict[str, list[str]]) -> list[str]:
    lines = [str(folder)]
    for name, wishes in asks.items():
        lines.append(f"  {name}" + ("" if wishes else ": nothing that needs trust"))
        lines += [f"    {wish}" for wish in wishes]
    if not asks:
        lines.append(f"  it has neither {' nor '.join(_names())}")
    return [*lines, "  `twinkle plugins test` will run its code without asking"]


def _is_confirmed(folder: Path) -> bool:
    return confirmed(
        "Trust this folder? Code that it names runs with all your rights",
        action=f"trust {folder}",
        remedy=f"review the text above, then run: twinkle plugins trust {shlex.quote(str(folder))} --yes",
    )


def _list(as_json: bool) -> None:
    from twinkle_registry.trust.folders import FOLDER_VARIABLE, named_folders, trusted_paths

    rows = [{"path": record.path, "state": _state(record)} for record in trusted_paths()]
    rows += [{"path": folder, "state": f"for this process, by {FOLDER_VARIABLE}"} for folder in named_folders()]
    if as_json:
        echo_json(rows)
        return
    for row in rows:
        click.echo(f"{row['path']}  {row['state']}")
    if not rows:
        click.echo("no folder is trusted")


def _state(record: "TrustedPath") -> str:
    """Return whether the recorded content is the present one."""
    import hashlib

    path = Path(record.path)
    if not record.digests:
        return "trusted" if path.is_dir() else "gone"
    if not path.is_file():
        return "gone"
    return "trusted" if hashlib.sha256(path.read_bytes()).hexdigest() in record.digests else "changed: ignored"


COMMANDS = (trust, untrust)
