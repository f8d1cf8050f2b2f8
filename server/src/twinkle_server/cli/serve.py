"""`twinkle serve MODEL`."""

from pathlib import Path

import click

_NAMES = {"help_option_names": ["-h", "--help"]}


@click.command("serve", context_settings=_NAMES)
@click.argument("model")
@click.option("--data", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder for all state.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 uses a free port.")
@click.option("--name", help="Name of the model for clients; by default MODEL.")
@click.option("--template", default="Template", show_default=True, help="The chat template of `/v1`, a component.")
@click.option("--no-auth", is_flag=True, help="Serve without keys; only on the loopback interface.")
@click.option(
    "--max-pass-ms",
    default=500.0,
    show_default=True,
    type=click.FloatRange(1),
    help="Approximate time that a sampling step may wait for training; a running pass is not interrupted.",
)
@click.option(
    "--pass-tokens",
    type=click.IntRange(1),
    help="Tokens per pass; rows are never split. The default depends on the size of the model.",
)
@click.option(
    "--loss",
    "losses",
    multiple=True,
    metavar="NAME",
    help="A loss plugin that requests may use; repeatable. By default every tenant-safe one.",
)
@click.option("--custom-losses", is_flag=True, help="Allow clients to register loss graphs.")
@click.option(
    "--strict-losses",
    is_flag=True,
    help="Refuse `stable_reinforce`, which has Twinkle's own formula because Tinker's is not public.",
)
@click.option(
    "--loss-workers/--no-loss-workers",
    default=True,
    show_default=True,
    help="Compute the losses of plugins in separate processes. Without them, a loss that hangs or crashes stops all.",
)
@click.option(
    "--loss-in-process",
    "in_process",
    multiple=True,
    metavar="PLUGIN",
    help="A plugin whose losses run in the engine process; repeatable.",
)
@click.option(
    "--loss-seconds",
    default=10.0,
    show_default=True,
    type=click.FloatRange(0.1),
    help="Time limit for the loss of a plugin per operation.",
)
@click.option(
    "--loss-memory-mb",
    default=1024,
    show_default=True,
    type=click.IntRange(16),
    help="Memory limit for the loss of a plugin.",
)
@click.option(
    "--local-metrics",
    is_flag=True,
    help="Answer /metrics and status to programs on this machine without a key; not behind a proxy on this machine.",
)
@click.option(
    "--take-over",
    is_flag=True,
    help="Take the folder from a service on another machine that you know to be dead.",
)
@click.option(
    "--accept-base",
    is_flag=True,
    help="Serve MODEL although the adapters of that name in the folder were trained on another model or other files.",
)
@click.option(
    "--trash-hours",
    default=24.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Time that deleted and expired checkpoints are kept in the trash.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Log level on standard error; `debug` logs every operation.",
)
@click.option(
    "--backend",
    metavar="NAME",
    help="The engine that trains and samples (`twinkle plugins list engine`). By default the only installed one.",
)
def main(
    model: str,
    data: Path,
    host: str,
    port: int,
    name: str | None,
    template: str,
    no_auth: bool,
    max_pass_ms: float,
    pass_tokens: int | None,
    losses: tuple[str, ...],
    custom_losses: bool,
    strict_losses: bool,
    loss_workers: bool,
    in_process: tuple[str, ...],
    loss_seconds: float,
    loss_memory_mb: int,
    local_metrics: bool,
    take_over: bool,
    accept_base: bool,
    trash_hours: float,
    log_level: str,
    backend: str | None,
) -> None:
    """Serve MODEL, a local folder or the id of a model on a hub, to clients of the Tinker protocol.

    The first start on an empty folder creates an operator key and prints it once; `twinkle server keys create` creates
    more keys. On SIGTERM, the service finishes running operations, saves its state, and exits.
    """
    from twinkle_server.cli.server import user_errors
    from twinkle_server.serve import serve
    from twinkle_server.settings import Limits, Settings, Times

    settings = Settings(
        model=model,
        data=data.expanduser().absolute(),
        name=name,
        template=template,
        host=host,
        port=port,
        auth=not no_auth,
        max_pass_seconds=max_pass_ms / 1000,
        pass_tokens=pass_tokens,
        backend=backend,
        losses=losses or None,
        custom_losses=custom_losses,
        strict_losses=strict_losses,
        loss_workers=loss_workers,
        in_process_losses=in_process,
        limits=Limits(loss_bytes=loss_memory_mb * 2**20),
        local_metrics=local_metrics,
        take_over=take_over,
        accept_base=accept_base,
        times=Times(loss=loss_seconds, trash=trash_hours * 3600),
    )
    with user_errors():
        code = serve(settings, log_level.upper())
    click.get_current_context().exit(code)
