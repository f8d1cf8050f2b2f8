"""`python -m twinkle_server.engine DESCRIPTOR JSON`: the engine over a socket that this process was started with."""

import ctypes
import logging
import signal
import sys
from dataclasses import replace

from twinkle.errors import TwinkleError
from twinkle_server.engine.backend import Backend, BackendOptions
from twinkle_server.engine.host import Host
from twinkle_server.link import BlockingLink
from twinkle_server.settings import Settings

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Serve until the other end of the socket is closed."""
    if len(arguments) != 2 or not arguments[0].isdigit():
        sys.exit("usage: python -m twinkle_server.engine DESCRIPTOR JSON; `twinkle serve` starts it")
    _die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # a terminal sends them to us too, and the service decides when we end
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    settings = Settings.parse(arguments[1])
    link = BlockingLink.from_descriptor(int(arguments[0]))
    try:
        backend = make_backend(settings)
    except TwinkleError as error:
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")  # the service tells it, and nothing else
    host = Host(backend, link, settings)
    if settings.backend == "pool":
        _watch_revocations(backend, host, settings.times.revocations)
    host.serve()


def _watch_revocations(backend: Backend, host: Host, every: float) -> None:
    """Have revoked plugins dropped, and their worker processes ended on the engine's own thread."""
    from twinkle_server.engine.pool.backend import PoolBackend
    from twinkle_server.engine.revocations import RevocationWatch

    if isinstance(backend, PoolBackend):
        RevocationWatch(every, lambda: host.soon(backend.end_dropped_plugins)).start()


def make_backend(settings: Settings) -> Backend:
    """Return the backend that the settings name.

    Raises:
        ValueError: there is none of that name.
    """
    options = BackendOptions(settings.model, settings.served_name, settings.data, settings.losses, settings.extra)
    if settings.backend == "ledger":
        from twinkle_server.engine.ledger import LedgerBackend

        return LedgerBackend(options)
    if settings.backend == "pool":
        from twinkle_server.engine.pool.backend import PoolBackend  # imports torch

        given = {
            "pass_tokens": settings.pass_tokens,
            "custom_losses": settings.custom_losses,
            "custom_loss_seconds": settings.limits.graph_seconds,
            "strict_losses": settings.strict_losses,
            "loss_workers": _worker_limits(settings),
            "in_process_losses": settings.in_process_losses,
        }
        extra = {**given, **settings.extra}
        return PoolBackend(replace(options, extra=extra))
    raise ValueError(f"there is no backend {settings.backend!r}; there are 'pool' and 'ledger'")


def _worker_limits(settings: Settings) -> dict[str, float] | None:
    """Return the limits of loss workers; a loss must fail before the whole pass is taken for hung."""
    if not settings.loss_workers:
        return None
    times, half = settings.times, settings.times.deadline / 2
    seconds, start = min(times.loss, half), min(times.loss_start, half)
    return {"seconds": seconds, "start": start, "memory": settings.limits.loss_bytes}


def _die_with_parent() -> None:
    """Let the kernel end this process when the service's is gone, however that came."""
    if not sys.platform.startswith("linux"):
        return  # the closed socket tells, too
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
