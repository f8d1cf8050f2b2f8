"""The command `twinkle-server` with the published configuration file."""

from pathlib import Path
from typing import Any

import click
import yaml

from twinkle_server.cli.common import HELP, user_errors

_config = click.option(
    "-c", "--config", "path", type=click.Path(dir_okay=False, path_type=Path), required=True,
    envvar="TWINKLE_SERVER_CONFIG", help="The published configuration file (`applications:`).",
)  # fmt: skip


@click.group(context_settings=HELP)
def main() -> None:
    """Serve a base model from a published configuration file; `twinkle serve` has all options of this service."""


@main.command()
@_config
@click.option("--namespace", envvar="TWINKLE_RAY_NAMESPACE", help="Accepted as published; the service has no Ray.")
def launch(path: Path, namespace: str | None) -> None:
    """Serve until SIGTERM."""
    from twinkle_server.launch.launcher import launch_server

    with user_errors():
        code = launch_server(config_path=path, ray_namespace=namespace)
    click.get_current_context().exit(code)


@main.command("check-config")
@_config
def check_config(path: Path) -> None:
    """Check a file, and print what the service does in another way than it says."""
    from twinkle_server.launch.launcher import ServerLauncher, read_config

    with user_errors():
        mapped = ServerLauncher(read_config(path)).mapped()
    for note in mapped.notes:
        click.echo(f"note: {note}")
    settings = mapped.settings
    click.echo(f"ok: {settings.name} ({settings.model}) at {settings.host}:{settings.port}, state in {settings.data}")


@main.command("print-config")
@_config
@click.option("--format", "form", type=click.Choice(["yaml", "json"]), default="yaml", envvar="TWINKLE_PRINT_FORMAT")
def print_config(path: Path, form: str) -> None:
    """Print a file with all defaults."""
    from twinkle_server.launch.launcher import read_config

    with user_errors():
        config = read_config(path)
    fields: dict[str, Any] = config.model_dump(mode="json")
    click.echo(config.model_dump_json(indent=2) if form == "json" else yaml.safe_dump(fields, sort_keys=False).rstrip())


@main.group()
def clear() -> None:
    """Refuse to delete state."""


@clear.command()
@_config
def persistence(path: Path) -> None:
    """Name the folder with the state, which the service never deletes by itself."""
    from twinkle_server.launch.launcher import ServerLauncher, read_config

    with user_errors():
        data = ServerLauncher(read_config(path)).mapped().settings.data
    raise click.ClickException(
        f"{data} also holds the checkpoints of all tenants; stop the service, and move or delete the folder yourself"
    )


if __name__ == "__main__":
    main()
