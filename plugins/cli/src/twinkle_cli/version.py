"""`twinkle version`: installed versions, for people and for bug reports."""

import platform
from typing import Any

import click

from twinkle_cli.text import echo_json, table

PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets", "safetensors", "numpy", "pydantic", "pluggy")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def version(as_json: bool) -> None:
    """Show the versions of Twinkle, its plugins and their dependencies."""
    shown = versions()
    if as_json:
        echo_json(shown)
        return
    plugins = [(f"plugin {name}", number) for name, number in shown.pop("plugins").items()]
    click.echo(table(("what", "version"), [*shown.items(), *plugins]))


def versions() -> dict[str, Any]:
    """Return versions by name; `plugins` has those of all plugins, usable or not."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    from twinkle import __version__
    from twinkle._registry import registry

    shown: dict[str, Any] = {
        "twinkle": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    for package in PACKAGES:
        try:
            shown[package] = version_of(package)
        except PackageNotFoundError:
            shown[package] = "not installed"
    shown["twinkle-registry"] = version_of("twinkle-registry")
    shown["plugins"] = {record.name: record.version for record in registry().records}
    return shown
