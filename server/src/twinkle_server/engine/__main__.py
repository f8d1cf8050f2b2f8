"""`python -m twinkle_server.engine DESCRIPTOR JSON`: the engine, with an inherited socket to the service."""

import logging
import signal
import sys

from twinkle import registry
from twinkle.engine import Engine
from twinkle.errors import TwinkleError
from twinkle_server.engine.executor import Executor
from twinkle_server.engine.host import Host
from twinkle_server.engine.losses.catalog import Losses
from twinkle_server.engine.losses.workers import WorkerLimits
from twinkle_server.engine.messages import BlockingLink
from twinkle_server.engine.provider import engine_name, engine_options
from twinkle_server.engine.recording import Recorder
from twinkle_server.engine.revocations import RevocationWatch
from twinkle_server.environment import die_with_parent
from twinkle_server.settings import Settings

_ROLLOUTS = 4
"""Maximum number of rollouts that are recorded of one operation."""


def main(arguments: list[str]) -> None:
    """Serve until the service closes the socket."""
    if len(arguments) != 2 or not arguments[0].isdigit():
        sys.exit("usage: python -m twinkle_server.engine DESCRIPTOR JSON; `twinkle serve` starts it")
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # terminals send these to all processes; the service stops this one
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    settings = Settings.parse(arguments[1])
    link = BlockingLink.from_descriptor(int(arguments[0]))
    try:
        executor = make_executor(settings)
    except TwinkleError as error:
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")  # shown by the service as it is
    host = Host(executor, link, settings)
    RevocationWatch(settings.times.revocations, lambda: host.soon(executor.drop_plugins)).start()
    host.serve()


def make_executor(settings: Settings) -> Executor:
    """Build the engine named in the settings, and its executor.

    Raises:
        TwinkleError: the engine does not exist, or cannot load the model.
    """
    losses = Losses(  # their worker processes start while the model is loaded
        settings.losses, _worker_limits(settings), settings.in_process_losses, strict=settings.strict_losses
    )
    engine: Engine = registry().build(engine_name(settings.backend), "engine", **engine_options(settings))
    return Executor(
        engine, settings.served_name, losses,
        custom_losses=settings.custom_losses, custom_seconds=settings.limits.graph_seconds,
        in_process=settings.in_process_losses,
        recorder=Recorder(min(_ROLLOUTS, settings.rollouts.rows), settings.rollouts.tokens),
    )  # fmt: skip


def _worker_limits(settings: Settings) -> WorkerLimits | None:
    """Return the limits of loss workers; a loss must fail before the whole pass counts as hung."""
    if not settings.loss_workers:
        return None
    times, half = settings.times, settings.times.deadline / 2
    seconds, start = min(times.loss, half), min(times.loss_start, half)
    return WorkerLimits(seconds=seconds, start=start, memory=settings.limits.loss_bytes)


if __name__ == "__main__":
    main(sys.argv[1:])
