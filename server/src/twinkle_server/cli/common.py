"""What the commands of operators share: options, output, and the store of a data folder."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from twinkle.errors import ConfigError
from twinkle_server.errors import ServiceError, StoreError

if TYPE_CHECKING:
    from twinkle_server.checkpoints.upkeep import Orphan
    from twinkle_server.store.opening import Store

T = TypeVar("T")
ENVIRONMENT: Final = "TWINKLE_SERVE"
"""Prefix of environment variables: `TWINKLE_SERVE_PORT` sets what `--port` sets."""
HELP = {"help_option_names": ["-h", "--help"]}
FOLDER: Final = click.Path(file_okay=False, path_type=Path)
data_folder = click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    envvar=f"{ENVIRONMENT}_DATA",
    help="Folder of the service.",
)
as_json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON.")


def echo(data: Any, as_json: bool, lines: list[str]) -> None:
    """Print data as JSON, or as lines."""
    if as_json:
        from twinkle.cli import echo_json

        echo_json(data)
        return
    for line in lines:
        click.echo(line)


@contextmanager
def user_errors() -> Iterator[None]:
    """Convert errors of the service to errors that the command line prints as a message."""
    try:
        yield
    except (ServiceError, StoreError) as error:
        raise ConfigError(str(error)) from error


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


async def find_orphans(store: "Store") -> "list[Orphan]":
    """Return the folders and files that no row of a data folder ever named."""
    from twinkle_server.checkpoints.upkeep import needed
    from twinkle_server.checkpoints.upkeep import orphans as find
    from twinkle_server.store import folders

    now = time.time()
    referenced, named = await needed(store.retention), await folders.all_named(store.database)
    return await asyncio.to_thread(find, store.data, referenced, named, now=now)


def day(seconds: float) -> str:
    """Return a time, in seconds since 1970, as readable text."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
