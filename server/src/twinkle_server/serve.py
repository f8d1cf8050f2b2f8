"""Runs one service: its parts, the socket they answer on, and the signals that end it."""

import asyncio
import contextlib
import errno
import gc
import importlib
import ipaddress
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle.errors import ConfigError, ModelLoadError, OutputError
from twinkle_server.runtime.service import Service
from twinkle_server.runtime.supervision import EngineFailed
from twinkle_server.settings import Settings
from twinkle_server.store.base import check_base
from twinkle_server.store.opening import Store, open_store
from twinkle_server.store.tenants import UsageLog
from twinkle_server.telemetry import logs, status
from twinkle_server.telemetry.health import folder_token
from twinkle_server.telemetry.metrics import Metrics
from twinkle_server.tenancy.auth import is_loopback
from twinkle_server.tenancy.keys import issue

if TYPE_CHECKING:
    import uvicorn

_KEEP_ALIVE = 75  # seconds; clients drop idle connections earlier
_LAST_ANSWERS = 5  # seconds for answers that are under way when the drain is over
_FLUSH = 10.0  # seconds
_LOST = 3  # exit code of a service whose data directory another one has taken over


def serve(settings: Settings, log_level: str = "INFO") -> int:
    """Serve until SIGTERM or SIGINT, and return the exit code.

    Args:
        settings: of the service.
        log_level: of the lines on standard error.

    Raises:
        ConfigError: the settings would serve strangers without keys.
        ModelLoadError: there is no such model, or the engine cannot load it.
        OutputError: the address cannot be listened on.
    """
    import uvloop

    gc.disable()  # what is made until `_answer` says that the service is ready lives as long as the process
    check(settings)
    settings = resolve(settings)
    logs.configure(log_level)
    _raise_file_limit()
    with listen(settings) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, listener))


def check(settings: Settings) -> None:
    """Refuse settings that cannot be meant.

    Raises:
        ConfigError: nobody would be asked for a key, and others than this machine would be served.
    """
    if not settings.auth and not is_loopback(settings.host):
        raise ConfigError(
            f"--no-auth would accept requests from anyone who can reach {settings.host}; remove it, or serve 127.0.0.1"
        )


def resolve(settings: Settings) -> Settings:
    """Return settings whose model is a local folder; what clients call it, and its tokenizer, stays what was asked for.

    Raises:
        ConfigError: a loss that is named is not for tenants.
        ComponentNotFound: the engine, or a loss that is named, is not installed.
        ComponentConflict: several engines are installed, and none is named.
        RequirementMissing: a package that it needs is not.
        ModelLoadError: nothing is there, or what is there is not a model.
        HubError: the hub does not have it, or cannot be reached.
    """
    from twinkle.hub import local_model
    from twinkle_server.engine.provider import check_installed

    check_installed(settings.backend)
    check_losses(settings.losses or ())
    folder = local_model(settings.model).absolute()
    return replace(settings, model=str(folder), name=settings.served_name, tokenizer=public_id(settings.model))


def public_id(model: str) -> str | None:
    """Return the id by which clients on other machines find a model's tokenizer as the SDK looks for it.

    Args:
        model: as it was asked for.

    Returns:
        `owner/name` of Hugging Face's hub; None where the model came from elsewhere, or is of a certain revision, which
        the SDK cannot ask for.
    """
    from twinkle.hub.local import alias_of, reference_of, scheme_of

    place = alias_of(model)
    if scheme_of(place) is None and Path(place).expanduser().exists():
        return None
    scheme, _, name = (reference_of(place) or "").partition("://")
    return name if scheme.lower() == "hf" and "@" not in name else None


def check_losses(names: Sequence[str]) -> None:
    """Refuse names of losses that no request could use.

    Raises:
        ComponentNotFound: no plugin offers a loss of that name.
        ConfigError: it does not say that it is for tenants.
    """
    from twinkle import registry

    for name in names:
        spec = registry().find(name, "loss")
        if not (spec.tenant_safe and "served" in spec.runtimes):
            raise ConfigError(
                f'--loss {name}: its manifest must declare `tenant_safe = true` and the runtime `"served"`; '
                "remove the option, or declare them if the loss is safe"
            )


def listen(settings: Settings) -> socket.socket:
    """Return a socket that listens nowhere yet, bound to the address.

    Raises:
        OutputError: it is taken, or is none of this machine.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        way = "--port 0 takes a free one" if taken else "--host is an address of this machine, such as 127.0.0.1"
        raise OutputError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; {way}") from error
    return listener


async def _serve(settings: Settings, listener: socket.socket) -> int:
    stop = _stop_on_signals()
    store = open_store(settings.data, limits=settings.limits, times=settings.times, take_over=settings.take_over)
    try:
        await _check_keys(settings, store)
        await check_base(store.database, settings.served_name, Path(settings.model), settings.accept_base)
        metrics = Metrics(store.secret)
        logs.mark_tenants(store.secret)
        service = Service(settings, store, metrics)
        usage = UsageLog(store.usage)
        metrics.spent = usage.add
        service.janitor.add("usage", _FLUSH, usage.flush)
        await service.start()
        try:
            assembly = await asyncio.to_thread(
                importlib.import_module, "twinkle_server.application"
            )  # while the engine starts
            application = assembly.assemble(settings, store, service, metrics)
            return await _answer(settings, application, service, store, listener, stop)
        finally:
            status.withdraw(settings.data)
            await service.close()
            await usage.flush()
    except EngineFailed as error:
        raise ModelLoadError(f"the engine cannot start: {last_words(str(error))}") from error
    finally:
        store.close()


async def _answer(
    settings: Settings, application: Any, service: Service, store: Store, listener: socket.socket, stop: asyncio.Event
) -> int:
    """Answer requests until a signal comes, then until what runs is over; returns the exit code."""
    server = _server(application)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    ready = asyncio.create_task(service.wait_ready(), name="ready")
    ends = {serving, *(asyncio.create_task(event.wait()) for event in (stop, service.lost))}
    try:
        await asyncio.wait({ready, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            await ready
            gc.freeze()  # without a collection, which would take longer than its finds are worth
            gc.enable()
            await _first_key(settings, store)
            if not service.info.tokenizer:
                _say(no_tokenizer(settings.model))
            _say_ready(settings, listener, store.secret)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not service.lost.is_set():
            await service.drain()
    finally:
        server.should_exit = True
        await serving
        for task in (ready, *ends):
            task.cancel()
    return _LOST if service.lost.is_set() else 0


def no_tokenizer(model: str) -> str:
    """Return what is said at the start where the model's folder has no tokenizer."""
    return (
        f"Warning: {model} has no tokenizer. Training and sampling by token ids work; stop strings are refused, and "
        "clients need a tokenizer of their own. Copy the tokenizer's files (tokenizer.json, …) there."
    )


def last_words(text: str) -> str:
    """Return what a traceback says at its end, without the name of the exception's class."""
    line = ([line for line in text.splitlines() if line.strip()] or [""])[-1].strip()
    name, colon, said = line.partition(": ")
    return said if colon and re.fullmatch(r"[A-Za-z_][\w.]*", name) else line


def _server(application: Any) -> "uvicorn.Server":
    """Return uvicorn without its handling of signals: a drain comes before the end."""
    import uvicorn

    from twinkle_server.limits.head import GuardedProtocol

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server(
        uvicorn.Config(
            application,
            http=GuardedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=2048,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=_LAST_ANSWERS,
        )
    )


def _stop_on_signals() -> asyncio.Event:
    """Return what the first SIGTERM or SIGINT sets; a second one ends the process as it is, which loses nothing."""
    stop = asyncio.Event()

    def hear(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, hear, number)
    return stop


async def _check_keys(settings: Settings, store: Store) -> None:
    """Refuse to serve others with a directory whose keys are all revoked."""
    known = await store.keys.all(revoked=True)
    if settings.auth and known and not is_loopback(settings.host) and all(key.revoked for key in known):
        raise ConfigError(
            f"all keys of this directory are revoked; create one with "
            f"`twinkle server keys create NAME --data {settings.data}`"
        )


async def _first_key(settings: Settings, store: Store) -> None:
    """Make an operator's key in a directory that never had one, and show it once, when nothing can fail any more."""
    if settings.auth and not await store.keys.all(revoked=True):
        key = await issue(store, "operator", role="operator")
        _say(f"Operator's key, shown this once: {key}")


def _say_ready(settings: Settings, listener: socket.socket, secret: bytes) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    here = status.Presence(os.getpid(), local_url(host, port), settings.served_name, time.time(), folder_token(secret))
    status.announce(Path(settings.data), here)
    _say(f"Twinkle serves {settings.served_name} at {url} (pid {os.getpid()})")


def local_url(host: str, port: int) -> str:
    """Return where this machine itself reaches a server that listens on an address."""
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        return f"http://[::1]:{port}" if address.version == 6 else f"http://127.0.0.1:{port}"
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _raise_file_limit() -> None:
    """Allow as many connections as the system does: each long poll holds one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
