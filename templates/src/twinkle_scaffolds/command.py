"""`twinkle plugins new KIND NAME`."""

import contextlib
from pathlib import Path

import click

from twinkle.errors import ArgumentError, SettingsError
from twinkle_registry.trust.folders import trust
from twinkle_scaffolds.baking import ask, bake, interactive, scaffolds


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("kind", required=False)
@click.argument("name", required=False)
@click.option(
    "--into", type=click.Path(file_okay=False, path_type=Path), default=Path(), help="Parent of the new folder."
)
@click.option("--author", help="Author for the licence; by default git's user.name.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def new(kind: str | None, name: str | None, into: Path, author: str | None, as_json: bool) -> None:
    """Create the project of a new plugin in the new folder NAME.

    KIND is the kind of component, such as `loss` or `reward`, or `hub-repo` for a repository on a hub. NAME is the name
    of the distribution, such as `acme-focal`. If you leave them out, the command asks for them.
    """
    if kind is None or name is None:
        if not interactive():
            raise ArgumentError(f"give KIND and NAME, as in `twinkle plugins new loss acme-focal`; {_offered()}")
        kind, name = ask(kind, name)
    folder = bake(kind, name, into, author=author)
    with contextlib.suppress(SettingsError):  # if trust cannot be recorded, `plugins test` asks for it
        trust(str(folder))
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    if as_json:
        from twinkle.cli import echo_json

        echo_json({"folder": str(folder), "files": files})
        return
    click.echo(f"created {folder}:")
    for file in files:
        click.echo(f"  {file}")
    if (folder / "pyproject.toml").exists():
        click.echo(f"next: pip install -e {_place(folder)} && twinkle plugins test {name}")


def _offered() -> str:
    return f"KIND is one of {', '.join(scaffolds())}"


def _place(folder: Path) -> str:
    """Return a folder in a form that pip does not take for the name of a package."""
    import shlex

    return shlex.quote(str(folder) if folder.is_absolute() else f"./{folder}")
