"""Maps the published configuration to the settings of a service that is one process tree on one machine."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit

from twinkle.errors import ConfigError
from twinkle_server.data.rules import bare
from twinkle_server.launch.config import (
    DeviceGroup,
    DeviceMesh,
    HttpOptions,
    ModelApplication,
    ModelArgs,
    ProcessorApplication,
    SamplerApplication,
    SamplerArgs,
    ServerApplication,
    ServerConfig,
    TaskQueue,
    Telemetry,
)
from twinkle_server.launch.verdicts import notes_of
from twinkle_server.settings import Limits, Settings, Times
from twinkle_server.tenancy.auth import is_loopback

A = TypeVar("A")
_LOCALHOST: Final = "127.0.0.1"
_MODEL_ROUTE: Final = "/model/"
_ROUTE: Final = "/api/v1"
_GRPC, _HTTP = 4317, 4318
"""Ports on which collectors of OpenTelemetry listen by default."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A published configuration as settings.

    Attributes:
        settings: of the service.
        notes: what the service does in another way than the configuration says, in sentences.
    """

    settings: Settings
    notes: tuple[str, ...]


def map_config(config: ServerConfig, data: Path) -> Mapped:
    """Return the settings for a published configuration.

    Args:
        config: the configuration.
        data: folder for all state, unless `persistence.file_path` names one.

    Raises:
        ConfigError: the configuration asks for something that this service does not have; the message says what to do.
    """
    server = _only(config, ServerApplication, "server")
    model = _model(config)
    notes: list[str] = []
    _check_devices(config)
    http = _http(config, server)
    _check_route(server)
    host = _LOCALHOST if http.host == "localhost" else http.host
    settings = Settings(
        model=model.args.model_id,
        data=_data(config, data, notes),
        name=_name(model, server),
        host=host,
        port=http.port,
        auth=not is_loopback(host),
        limits=_limits(server, model.args.queue_config, notes),
        times=_times(model.args, notes),
        otlp_endpoint=_collector(config.telemetry, notes),
    )
    if not any(isinstance(application, ProcessorApplication) for application in config.applications):
        settings = replace(settings, datasets=replace(settings.datasets, resources=0))
        notes.append("there is no application `processor`, so requests cannot create data sets on the service")
    return Mapped(settings, (*notes, *_notes(config, settings)))


def _only(config: ServerConfig, kind: type[A], name: str) -> A:
    found = [application for application in config.applications if isinstance(application, kind)]
    if len(found) != 1:
        raise ConfigError(f"applications must have one with import_path: {name}, got {len(found)}")
    return found[0]


def _model(config: ServerConfig) -> ModelApplication:
    """Return the application of the base model, which training and sampling share."""
    ids: dict[str, str] = {}
    for application in config.applications:
        if isinstance(application, ModelApplication | SamplerApplication):
            ids.setdefault(bare(application.args.model_id), application.name)
    if len(ids) > 1:
        raise ConfigError(
            f"the applications have the models {' and '.join(map(repr, ids))}; a service has one base model, because "
            "all tenants share it in memory: start one service for each, with its own port and folder"
        )
    found = [application for application in config.applications if isinstance(application, ModelApplication)]
    if len(found) != 1:
        raise ConfigError(f"applications must have one with import_path: model, got {len(found)}")
    return found[0]


def _name(model: ModelApplication, server: ServerApplication) -> str:
    """Return the name of the model for clients: that of its route."""
    _, route, name = model.route_prefix.partition(_MODEL_ROUTE)
    name = name.strip("/") if route else bare(model.args.model_id)
    supported = [entry.model_name for entry in server.args.supported_models]
    if supported and {bare(entry) for entry in supported} != {name}:
        raise ConfigError(
            f"supported_models is {supported}, but the only model of the applications is {name!r}; list that one"
        )
    return name


def _http(config: ServerConfig, server: ServerApplication) -> HttpOptions:
    own, general = server.args.http_options, config.http_options
    if own is not None and "http_options" in config.model_fields_set and own != general:
        raise ConfigError(
            f"http_options is {general.host}:{general.port}, and {own.host}:{own.port} in application {server.name!r}; "
            "a service listens at one address: leave one of them out"
        )
    return own or general


def _check_route(server: ServerApplication) -> None:
    for route in (server.route_prefix, server.args.route_prefix):
        if route is not None and route.rstrip("/") not in ("", _ROUTE):
            raise ConfigError(
                f"application {server.name!r}: route_prefix {route!r} is not available: the service has the routes "
                f"{_ROUTE}, /twinkle and /v1; use {_ROUTE}, or a proxy in front of `twinkle serve --root-path`"
            )


def _collector(telemetry: Telemetry, notes: list[str]) -> str | None:
    """Return the URL of the collector for traces; the published service uses gRPC, this one HTTP."""
    if not telemetry.enabled:
        return None
    url = urlsplit(telemetry.otlp_endpoint)
    try:
        port = url.port
    except ValueError:
        port = None
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"telemetry.otlp_endpoint must be a URL such as http://localhost:4318, got {url.geturl()!r}")
    if port != _GRPC:
        notes.append("telemetry.otlp_endpoint gets traces by OTLP over HTTP, not gRPC; metrics are read from /metrics")
        return telemetry.otlp_endpoint
    host, _, _ = url.netloc.rpartition(":")
    notes.append(
        f"telemetry.otlp_endpoint has the port {_GRPC} for gRPC; traces are sent by OTLP over HTTP to port {_HTTP} of "
        "the same host, and metrics are read from /metrics"
    )
    return url._replace(netloc=f"{host}:{_HTTP}").geturl()


def _check_devices(config: ServerConfig) -> None:
    """Refuse what needs several devices, and engines that this service does not have."""
    for application in config.applications:
        args = application.args
        if isinstance(args, ModelArgs | SamplerArgs):
            where = f"application {application.name!r}"
            if args.nproc_per_node > 1:
                raise ConfigError(f"{where}: nproc_per_node is {args.nproc_per_node}; {_ONE_DEVICE}")
            _check_group(where, args.device_group, args.device_mesh)
        if isinstance(args, ModelArgs) and args.backend != "transformers":
            raise ConfigError(
                f"application {application.name!r}: backend {args.backend!r} is not available; use 'transformers'"
            )
        if isinstance(args, SamplerArgs) and args.sampler_type == "mock":
            raise ConfigError(f"application {application.name!r}: sampler_type 'mock' is not available; use 'torch'")


_ONE_DEVICE: Final = "this service trains and samples on one device; use 1, and start further services for more devices"


def _check_group(where: str, group: DeviceGroup | None, mesh: DeviceMesh | None) -> None:
    if group is not None:
        ranks = group.ranks if isinstance(group.ranks, int) else len(group.ranks)
        if group.ranks not in (0, 1, [0]) and ranks <= 1:
            raise ConfigError(
                f"{where}: device_group.ranks is {group.ranks}; use ranks: 1, and choose the device with "
                "CUDA_VISIBLE_DEVICES"
            )
        if ranks > 1 or group.gpus_per_worker > 1:
            sizes = f"ranks {group.ranks} and gpus_per_worker {group.gpus_per_worker}"
            raise ConfigError(f"{where}: device_group has {sizes}; {_ONE_DEVICE}")
    if mesh is not None and mesh.sizes:
        raise ConfigError(f"{where}: device_mesh has {mesh.sizes}; {_ONE_DEVICE}")


def _data(config: ServerConfig, data: Path, notes: list[str]) -> Path:
    persistence = config.persistence
    if persistence.mode == "redis":
        raise ConfigError(
            "persistence.mode 'redis' is not available: the service stores its state in SQLite in its own folder; use "
            "mode: file with file_path, or leave persistence out"
        )
    folder = (Path(persistence.file_path).parent if persistence.file_path else data).expanduser().absolute()
    if persistence.mode == "memory":
        notes.append(f"state is kept in the folder {folder}, and survives a restart (persistence.mode is 'memory')")
    return folder


def _limits(server: ServerApplication, queue: TaskQueue | None, notes: list[str]) -> Limits:
    limits = Limits(adapters=server.args.server_config.per_token_model_limit)
    if queue is None or "max_input_tokens" not in queue.model_fields_set:
        return limits
    if queue.max_input_tokens < 1:
        raise ConfigError(f"queue_config.max_input_tokens must be at least 1, got {queue.max_input_tokens}")
    if not queue.enabled:
        notes.append("queue_config.max_input_tokens has no effect: queue_config.enabled is false")
        return limits
    notes.append("queue_config.max_input_tokens limits the tokens of one request; a row is never split")
    return replace(limits, request_tokens=queue.max_input_tokens)


def _times(args: ModelArgs, notes: list[str]) -> Times:
    times = Times()
    adapters, queue = args.adapter_config, args.queue_config
    if adapters is not None:
        times = replace(times, session=max(10.0, adapters.adapter_timeout))
        if adapters.adapter_timeout < 10:
            notes.append("adapter_timeout is at least 10 s, the interval of heartbeats")
    if queue is not None and "execution_timeout" in queue.model_fields_set:
        if queue.execution_timeout > 0:
            times = replace(times, deadline=max(30.0, queue.execution_timeout))
        if queue.execution_timeout < 30:
            notes.append(
                f"queue_config.execution_timeout is {queue.execution_timeout:g}: the time limit of a pass is "
                f"{times.deadline:g} s, because a service without one cannot recover from a device that hangs"
            )
    return times


def _notes(config: ServerConfig, settings: Settings) -> Iterable[str]:
    """Yield what the service does in another way than the configuration says."""
    if settings.auth:
        yield "clients need keys, since other machines can reach the service: twinkle server keys create NAME"
    for application in config.applications:
        if isinstance(application, SamplerApplication) and application.args.sampler_type == "vllm":
            yield f"application {application.name!r}: sampling uses the service's own engine, not vLLM"
        elif isinstance(application, ModelApplication) and _MODEL_ROUTE not in application.route_prefix:
            yield f"application {application.name!r}: route_prefix has no /model/NAME, so the name is {settings.name!r}"
    yield from notes_of(config)
