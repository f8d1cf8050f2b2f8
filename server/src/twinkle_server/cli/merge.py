"""`twinkle server merge`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from twinkle.errors import ConfigError, OutputError
from twinkle_server.cli.common import ENVIRONMENT, HELP, as_json_option, data_folder, echo, user_errors, with_store


@click.command("merge", context_settings=HELP)
@click.argument("checkpoint")
@data_folder
@click.option("--model", required=True, envvar=f"{ENVIRONMENT}_MODEL", help="The base model, as for `twinkle serve`.")
@click.option("--to", type=click.Path(path_type=Path), required=True, help="New folder for the merged model.")
@as_json_option
def merge(checkpoint: str, data: Path, model: str, to: Path, as_json: bool) -> None:
    """Merge CHECKPOINT, a `tinker://` path of any tenant, into the base model; works while a service runs.

    The result is a model folder for transformers, in the dtype of the base model.
    """
    from twinkle.hub import local_model
    from twinkle_server.checkpoints.merging import CannotMerge, publish_merged
    from twinkle_server.ids import CheckpointPath

    with user_errors():
        path = CheckpointPath.parse(checkpoint)
    row = with_store(data, lambda store: store.checkpoints.any_tenant(path))
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"{to} is not empty; choose another folder for --to")
    base, facts = local_model(model), {"kind": "merged", "source": row.digest}
    try:
        with disk_errors(to):
            published = publish_merged(base, data / row.folder, to.absolute(), facts, lambda done, total: None)
    except CannotMerge as error:
        raise ConfigError(f"cannot merge {path}: {error}") from error
    echo({"folder": str(to), "bytes": published.size}, as_json, [f"wrote {to} ({published.size:,} bytes)"])


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Convert errors of a disk to errors that the command line prints as a message."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}") from error
