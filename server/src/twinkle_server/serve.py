"""Runs a service: its parts, its socket, and signals."""

import asyncio
import contextlib
import errno
import gc
import importlib
import ipaddress
import logging
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from twinkle.errors import ConfigError, ModelLoadError, OutputError
from twinkle_registry import RequirementMissing
from twinkle_server import preflight, tls
from twinkle_server.runtime.service import Service
from twinkle_server.runtime.supervision import EngineFailed
from twinkle_server.settings import Settings
from twinkle_server.store.base import check_base, rename_base
from twinkle_server.store.inspection import check_database
from twinkle_server.store.opening import Store, open_store
from twinkle_server.store.tenants import UsageLog
from twinkle_server.telemetry import logs, status, systemd
from twinkle_server.telemetry.health import folder_token
from twinkle_server.telemetry.metrics import Metrics
from twinkle_server.tenancy.auth import is_loopback
from twinkle_server.tenancy.keys import issue

if TYPE_CHECKING:
    import ssl

    import uvicorn

    from twinkle_server.telemetry.traces import Traces

_log = logging.getLogger(__name__)
_KEEP_ALIVE = 75  # seconds; clients drop idle connections earlier
_LAST_ANSWERS = 5  # seconds for pending responses after the drain
_FLUSH = 10.0  # seconds
_LOST = 3  # exit code after another process has taken over the data folder


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit code.

    Args:
        settings: of the service.

    Raises:
        ConfigError: the settings would serve other machines without keys, or contradict each other.
        ModelLoadError: the model does not exist, or the engine cannot load it.
        OutputError: the address cannot be used.
    """
    import uvloop

    gc.disable()  # objects created before `_answer` reports readiness live as long as the process
    check(settings)
    settings = resolve(settings)
    logs.configure(settings.log_level.upper())
    _raise_file_limit()
    with listen(settings) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, listener))


def check(settings: Settings) -> None:
    """Refuse unsafe and contradictory settings; all problems are in one message.

    Raises:
        ConfigError: other machines would be served without keys; a prefix, the address of a proxy or of a collector is
            invalid; or the certificate cannot be read.
    """
    preflight.together(preflight.safety(settings))


def resolve(settings: Settings) -> Settings:
    """Download the model if needed; return settings with its local folder, and what clients call model and tokenizer.

    Raises:
        ConfigError: a named loss is not safe for tenants, or several of these problems exist.
        ComponentNotFound: the engine, a named loss or the chat template is not installed.
        ComponentConflict: several engines are installed, and none is named.
        RequirementMissing: a required package is not installed.
        ModelLoadError: the model does not exist, or is not a model.
        HubError: the hub does not have the model, or cannot be reached.
    """
    from twinkle.hub import local_model

    preflight.together(preflight.components(settings))
    folder = local_model(settings.model).absolute()
    name = settings.name or (folder.name if is_folder(settings.model) else settings.model)
    return replace(settings, model=str(folder), name=name, tokenizer=settings.tokenizer or public_id(settings.model))


def try_settings(settings: Settings) -> list[str]:
    """Check settings without serving; return notes for the operator.

    A model on a hub is not downloaded; the address is used for a moment, unless a service runs on the folder.

    Raises:
        ConfigError: the settings are unsafe or contradict each other, or there are several problems.
        TwinkleError: the engine, a loss, the template or the model does not exist, the engine does not take an option,
            or the address cannot be used.
        StoreError: the data folder cannot be used.
    """
    from twinkle_server.engine.provider import check_options

    data = settings.data.expanduser().absolute()
    busy = status.find(data) is not None
    notes = [f"a service runs on {data}, so the address was not tried"] if busy else []
    preflight.together(
        [
            *preflight.safety(settings),
            *preflight.components(settings),
            lambda: preflight.check_reference(settings),
            lambda: check_options(settings),
            lambda: _try_traces(settings),
            lambda: notes.extend(_try_model(settings.model)),
            *preflight.data_sets(settings.datasets.sets),
            *([] if busy else [lambda: _try_folder(data), lambda: listen(settings).close()]),
        ]
    )
    return notes


def _try_folder(data: Path) -> None:
    preflight.check_writable(data)
    if data.exists():
        check_database(data)


def _try_traces(settings: Settings) -> None:
    preflight.check_collector(settings)
    if (traces := open_traces(settings)) is not None:
        traces.close()


def _try_model(model: str) -> list[str]:
    """Check a model that is on this machine; return a note about another one."""
    from twinkle.hub.local import alias_of, local_model, reference_of, scheme_of

    place = alias_of(model)
    local = scheme_of(place) is None and Path(place).expanduser().exists()
    if not local and scheme_of(place) not in ("builtin", "file") and reference_of(place) is not None:
        return [f"the model {model} comes from a hub, and was not downloaded for this check"]
    local_model(model)
    return []


def is_folder(model: str) -> bool:
    """Return whether a model is given by its path, which is not shown to tenants, and not by an id."""
    from twinkle.hub.local import alias_of, scheme_of

    return alias_of(model) == model and scheme_of(model) is None and Path(model).expanduser().exists()


def public_id(model: str) -> str | None:
    """Return the id by which clients on other machines can load the model's tokenizer with the SDK.

    Args:
        model: as given by the user.

    Returns:
        `owner/name` at Hugging Face; None if the model is from elsewhere, or has a fixed revision, which the SDK does
        not support.
    """
    from twinkle.hub.local import alias_of, reference_of, scheme_of

    source = alias_of(model)
    if scheme_of(source) is None and Path(source).expanduser().exists():
        return None
    scheme, _, name = (reference_of(source, bare=True) or "").partition("://")
    return name if scheme.lower() == "hf" and "@" not in name else None


def listen(settings: Settings) -> socket.socket:
    """Return a socket that is bound to the address, but does not listen yet.

    Raises:
        OutputError: the address is in use, or does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        in_use = error.errno in (errno.EADDRINUSE, errno.EACCES)
        remedy = "use --port 0 for a free port" if in_use else "use an address of this machine, such as 127.0.0.1"
        raise OutputError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; {remedy}") from error
    return listener


async def _serve(settings: Settings, listener: socket.socket) -> int:
    stop = _stop_on_signals()
    store = open_store(settings.data, limits=settings.limits, times=settings.times, take_over=settings.take_over)
    try:
        _print(f"Loading {settings.served_name} ...")
        presence = _presence(settings, listener, store.secret)
        status.announce(settings.data, presence)
        systemd.notify(STATUS=f"Loading {settings.served_name}")
        await _check_keys(settings, store)
        await rename_base(store.database, settings.served_name, Path(settings.model))
        await check_base(store.database, settings.served_name, Path(settings.model), settings.accept_base)
        metrics = Metrics(store.secret)
        logs.mark_tenants(store.secret)
        traces = open_traces(settings)
        service = Service(settings, store, metrics, tracer=traces)
        usage = UsageLog(store.usage)
        metrics.spent, metrics.ended = usage.add, usage.count
        service.janitor.add("usage", _FLUSH, usage.flush)
        await service.start()
        try:
            assembly = await asyncio.to_thread(
                importlib.import_module, "twinkle_server.application"
            )  # while the engine starts
            application = assembly.assemble(settings, store, service, metrics, traces)
            return await _answer(settings, application, service, store, listener, presence, stop)
        finally:
            await service.close()
            await usage.flush()
            if traces is not None:
                await asyncio.to_thread(traces.close)
    except EngineFailed as error:
        raise ModelLoadError(f"the engine cannot start: {last_words(str(error))}") from error
    finally:
        status.withdraw(settings.data)
        store.close()


def open_traces(settings: Settings) -> "Traces | None":
    """Return the traces of a service; None if no collector is configured.

    Raises:
        RequirementMissing: the packages of OpenTelemetry are not installed.
    """
    if preflight.collector(settings) is None:
        return None
    try:
        from twinkle_server.telemetry.traces import Traces

        return Traces.of(settings)
    except ImportError as error:
        raise RequirementMissing(
            f"cannot send traces: {error}; install them with `pip install 'twinkle-server[otel]'`, or remove "
            "--otlp-endpoint and OTEL_EXPORTER_OTLP_ENDPOINT (telemetry.enabled in a published configuration)"
        ) from error


async def _answer(
    settings: Settings,
    application: Any,
    service: Service,
    store: Store,
    listener: socket.socket,
    presence: status.Presence,
    stop: asyncio.Event,
) -> int:
    """Handle requests until a signal arrives, then drain; return the exit code."""
    certificate = tls.context(settings)
    server = _server(application, certificate)
    _reload_on_signal(settings, certificate)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    ready = asyncio.create_task(service.wait_ready(), name="ready")
    watchdog = asyncio.create_task(_feed_watchdog(), name="watchdog")
    ends = {serving, *(asyncio.create_task(event.wait()) for event in (stop, service.lost, service.stop_requested))}
    try:
        await asyncio.wait({ready, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            await ready
            gc.freeze()  # without a collection, which would take longer than it saves
            gc.enable()
            await _first_key(settings, store)
            if not service.info.tokenizer:
                _print(no_tokenizer(settings.model))
            _show_ready(settings, presence, listener)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        systemd.notify(STOPPING="1", STATUS="Finishing running work")
        if not service.lost.is_set():
            await service.drain()
    finally:
        server.should_exit = True
        await serving
        for task in (ready, watchdog, *ends):
            task.cancel()
    return _LOST if service.lost.is_set() else 0


def no_tokenizer(model: str) -> str:
    """Return the warning for a model folder without a tokenizer."""
    return (
        f"Warning: {model} has no tokenizer. Training and sampling by token ids work; stop strings are refused, and "
        "clients must load a tokenizer from elsewhere. To fix this, copy its files (tokenizer.json, …) there."
    )


def last_words(text: str) -> str:
    """Return the last line of a traceback, without the class of the exception."""
    line = ([line for line in text.splitlines() if line.strip()] or [""])[-1].strip()
    name, colon, message = line.partition(": ")
    return message if colon and re.fullmatch(r"[A-Za-z_][\w.]*", name) else line


async def _feed_watchdog() -> None:
    """Tell systemd regularly that the event loop runs."""
    while (interval := systemd.watchdog_seconds()) is not None:
        systemd.notify(WATCHDOG="1")
        await asyncio.sleep(interval / 3)


def _server(application: Any, certificate: "ssl.SSLContext | None") -> "uvicorn.Server":
    """Return a uvicorn server without signal handlers, because a drain precedes its end."""
    import uvicorn

    from twinkle_server.limits.head import GuardedProtocol

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    config = uvicorn.Config(
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
    config.load()
    config.ssl = certificate  # its files are read again on SIGHUP, which uvicorn's own context does not support
    return Server(config)


def _reload_on_signal(settings: Settings, certificate: "ssl.SSLContext | None") -> None:
    """Read the certificate again on SIGHUP; without one, only systemd's reload is answered."""
    if certificate is None and not systemd.notify():
        return

    def reload() -> None:
        systemd.notify(RELOADING="1", MONOTONIC_USEC=systemd.monotonic_microseconds())
        if certificate is not None and settings.tls_cert is not None:
            try:
                tls.read(certificate, settings.tls_cert, settings.tls_key)
                if (presence := status.find(settings.data)) is not None:
                    status.announce(settings.data, replace(presence, certificate=tls.fingerprint(settings.tls_cert)))
                _log.info("read the certificate again")
            except (ConfigError, OSError, ValueError) as error:
                _log.error("keeping the previous certificate: %s", error)
        systemd.notify(READY="1")

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)


def _stop_on_signals() -> asyncio.Event:
    """Return an event set by the first SIGTERM or SIGINT; a second signal exits immediately, which loses no data."""
    stop = asyncio.Event()

    def handle(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, handle, number)
    return stop


async def _check_keys(settings: Settings, store: Store) -> None:
    """Refuse to serve other machines if all keys of the directory are revoked."""
    known = await store.keys.all(revoked=True)
    if settings.auth and known and not is_loopback(settings.host) and all(key.revoked for key in known):
        raise ConfigError(
            f"all keys of this directory are revoked; create one with "
            f"`twinkle server keys create NAME --data {settings.data}`"
        )


async def _first_key(settings: Settings, store: Store) -> None:
    """Create and print an operator key in a directory that never had a key; runs last, when the start cannot fail."""
    if settings.auth and not await store.keys.all(revoked=True):
        key = await issue(store, "operator", role="operator")
        _print(f"Operator key (shown only once): {key}")


def _presence(settings: Settings, listener: socket.socket, secret: bytes) -> status.Presence:
    """Return what commands on this machine need to find this server, before it is ready."""
    host, port = listener.getsockname()[:2]
    url = local_url(host, port, encrypted=settings.tls_cert is not None)
    return status.Presence(
        os.getpid(),
        url,
        settings.served_name,
        time.time(),
        folder_token(secret),
        ready=False,
        certificate=tls.fingerprint(settings.tls_cert),
    )


def _show_ready(settings: Settings, presence: status.Presence, listener: socket.socket) -> None:
    """Tell commands on this machine and the reader of standard output that the service is ready."""
    status.announce(settings.data, replace(presence, ready=True))
    host, port = listener.getsockname()[:2]
    url = f"{urlsplit(presence.url).scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    systemd.notify(READY="1", STATUS=f"Serving {settings.served_name} at {url}")
    _print(f"Twinkle serves {settings.served_name} at {url} (pid {os.getpid()})")
    if settings.root_path:
        _print(f"Clients use the address of the proxy, which ends with {settings.root_path}")


def local_url(host: str, port: int, encrypted: bool = False) -> str:
    """Return the URL of a server for clients on this machine."""
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        host = "::1" if address.version == 6 else "127.0.0.1"
    return f"{'https' if encrypted else 'http'}://{f'[{host}]' if address.version == 6 else host}:{port}"


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _raise_file_limit() -> None:
    """Raise the limit of open files to the maximum, because each long poll holds a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
