"""Maps the published configuration to the settings of a service that is one process tree on one machine."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

from twinkle.errors import ConfigError
from twinkle_server.data.rules import bare
from twinkle_server.launch.config import (
    DeviceGroup,
    DeviceMesh,
    ModelApplication,
    ModelArgs,
    ProcessorApplication,
    SamplerApplication,
    SamplerArgs,
    ServerApplication,
    ServerConfig,
    TaskQueue,
)
from twinkle_server.settings import Limits, Settings, Times
from twinkle_server.tenancy.auth import is_loopback

A = TypeVar("A")
_LOCALHOST: Final = "127.0.0.1"
_MODEL_ROUTE: Final = "/model/"


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
    http = server.args.http_options or config.http_options
    host = _LOCALHOST if http.host == "localhost" else http.host
    settings = Settings(
        model=model.args.model_id,
        data=_data(config, data, notes),
        name=_name(model, server),
        host=host,
        port=http.port,
        auth=not is_loopback(host),
        limits=_limits(model.args.queue_config, notes),
        times=_times(model.args, notes),
    )
    if not any(isinstance(application, ProcessorApplication) for application in config.applications):
        settings = replace(settings, datasets=replace(settings.datasets, resources=0))
        notes.append("there is no application `processor`, so requests cannot create data sets on the service")
    return Mapped(settings, (*notes, *_notes(config, model, settings)))


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
        if ranks > 1 or group.gpus_per_worker > 1:
            raise ConfigError(f"{where}: device_group has several ranks or devices; {_ONE_DEVICE}")
    if mesh is not None and mesh.sizes:
        raise ConfigError(f"{where}: device_mesh has {mesh.sizes}; {_ONE_DEVICE}")


def _data(config: ServerConfig, data: Path, notes: list[str]) -> Path:
    persistence = config.persistence
    if persistence.mode == "redis":
        raise ConfigError(
            "persistence.mode 'redis' is not available: the service stores its state in SQLite in its own folder; use "
            "mode: file with file_path, or leave persistence out"
        )
    if persistence.key_prefix:
        notes.append("persistence.key_prefix has no effect, because each service has its own folder")
    if persistence.mode == "memory":
        notes.append(f"state is kept in the folder {data}, and survives a restart (persistence.mode is 'memory')")
    return (Path(persistence.file_path).parent if persistence.file_path else data).expanduser().absolute()


def _limits(queue: TaskQueue | None, notes: list[str]) -> Limits:
    if queue is None or "max_input_tokens" not in queue.model_fields_set:
        return Limits()
    if queue.max_input_tokens < 1:
        raise ConfigError(f"queue_config.max_input_tokens must be at least 1, got {queue.max_input_tokens}")
    notes.append("queue_config.max_input_tokens limits the tokens of one request; a row is never split")
    return Limits(request_tokens=queue.max_input_tokens)


def _times(args: ModelArgs, notes: list[str]) -> Times:
    times = Times()
    adapters, queue = args.adapter_config, args.queue_config
    if adapters is not None:
        times = replace(times, session=max(10.0, adapters.adapter_timeout))
        if adapters.adapter_timeout < 10:
            notes.append("adapter_timeout is at least 10 s, the interval of heartbeats")
        if "adapter_max_lifetime" in adapters.model_fields_set:
            notes.append("adapter_max_lifetime has no effect: an adapter lives as long as its session")
    if queue is not None and "execution_timeout" in queue.model_fields_set and queue.execution_timeout > 0:
        times = replace(times, deadline=max(30.0, queue.execution_timeout))
    return times


def _notes(config: ServerConfig, model: ModelApplication, settings: Settings) -> Iterable[str]:
    """Yield what the service does in another way than the configuration says."""
    if settings.auth:
        yield "clients need keys, since other machines can reach the service: twinkle server keys create NAME"
    if config.ray_namespace or config.proxy_location:
        yield "ray_namespace and proxy_location have no effect: the service does not use Ray"
    if config.telemetry.enabled:
        yield "telemetry is not exported by this configuration; the service offers /metrics for Prometheus"
    if config.task_queue is not None:
        yield "task_queue has no effect; set limits of keys with: twinkle server keys set"
    if "max_loras" in model.args.model_fields_set:
        yield "max_loras has no effect: the number of adapters is bounded by memory, and idle ones are paged out"
    if model.args.max_length is not None:
        yield "max_length has no effect: rows may be as long as the context of the model"
    for application in config.applications:
        args = application.args
        if isinstance(args, SamplerArgs) and (args.engine_args or args.sampler_type == "vllm"):
            yield f"application {application.name!r}: sampling uses the service's own engine, not vLLM and engine_args"
        queue = getattr(args, "queue_config", None)
        if queue is not None and queue.model_fields_set & {"rps_limit", "tps_limit", "queue_timeout", "window_seconds"}:
            yield f"application {application.name!r}: rates are limits of keys: twinkle server keys set NAME --quota"
        if application.deployments:
            yield f"application {application.name!r}: deployments have no effect: the service is one process tree"
