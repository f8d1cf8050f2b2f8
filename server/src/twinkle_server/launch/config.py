"""The published configuration file of a service, as pydantic models; unknown keys are errors."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Positive = Annotated[int, Field(ge=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class HttpOptions(_Part):
    """Where the service listens."""

    host: str = "localhost"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000


class Telemetry(_Part):
    """Export of metrics and traces."""

    enabled: bool = False
    service_name: str = "twinkle-server"
    otlp_endpoint: str = "http://localhost:4317"
    debug: bool = False
    export_interval_ms: Positive = 30000
    resource_attributes: dict[str, str] = {}


class Persistence(_Part):
    """Where state is stored."""

    mode: Literal["memory", "file", "redis"] = "memory"
    file_path: str | None = None
    redis_url: str | None = None
    key_prefix: str = ""


class TaskQueue(_Part):
    """Limits of requests."""

    rps_limit: float = 100
    tps_limit: float = 16000
    window_seconds: float = 1
    queue_timeout: float = 300
    execution_timeout: float = 120
    enabled: bool = True
    token_cleanup_multiplier: float = 10
    token_cleanup_interval: float = 60
    max_input_tokens: int = 16000


class DeviceGroup(_Part):
    """Devices of an application."""

    name: str = ""
    ranks: int | list[int] = 1
    device_type: str = "CPU"
    gpus_per_worker: Positive = 1
    visible_devices: str | None = None


class DeviceMesh(_Part):
    """Topology of the devices of an application."""

    device_type: str | None = None
    world_size: Positive = 1
    dp_size: Positive = 1
    fsdp_size: Positive | None = None
    tp_size: Positive | None = None
    pp_size: Positive | None = None
    cp_size: Positive | None = None
    ep_size: Positive | None = None
    etp_size: Positive | None = None
    ep_fsdp_size: Positive | None = None
    vpp_size: Positive | None = None
    ulysses_size: Positive | None = None
    sequence_parallel: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that are above 1, by name."""
        return {name: value for name, value in self.model_dump().items() if type(value) is int and value > 1}


class AdapterConfig(_Part):
    """Lifetime of adapters."""

    adapter_timeout: float = 1800
    adapter_max_lifetime: float = 36000


class ServerSettings(_Part):
    """Settings of the gateway."""

    expiration_timeout: float = 86400
    cleanup_interval: float = 3600
    per_token_model_limit: Positive = 30
    metrics_update_interval: float = 15
    actor_name: str | None = None


class SupportedModel(_Part):
    """A model of the gateway."""

    model_name: str


class ServerArgs(_Part):
    """Arguments of the application `server`."""

    server_config: ServerSettings = ServerSettings()
    supported_models: list[SupportedModel] = []
    http_options: HttpOptions | None = None
    route_prefix: str | None = None

    @field_validator("supported_models", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [{"model_name": item} if isinstance(item, str) else item for item in value]


class ModelArgs(_Part):
    """Arguments of an application `model`."""

    model_id: Annotated[str, Field(min_length=1)]
    nproc_per_node: Positive = 1
    device_group: DeviceGroup | None = None
    device_mesh: DeviceMesh | None = None
    backend: Literal["mock", "transformers", "megatron"] = "transformers"
    adapter_config: AdapterConfig | None = None
    queue_config: TaskQueue | None = None
    max_loras: Positive = 5
    max_length: Positive | None = None


class SamplerArgs(_Part):
    """Arguments of an application `sampler`."""

    model_id: Annotated[str, Field(min_length=1)]
    nproc_per_node: Positive = 1
    device_group: DeviceGroup | None = None
    device_mesh: DeviceMesh | None = None
    sampler_type: Literal["mock", "vllm", "torch"] = "vllm"
    engine_args: dict[str, Any] = {}
    queue_config: TaskQueue | None = None


class ProcessorArgs(_Part):
    """Arguments of the application `processor`."""

    ncpu_proc_per_node: Positive = 1
    device_group: DeviceGroup | None = None
    device_mesh: DeviceMesh | None = None
    queue_config: TaskQueue | None = None


class Autoscaling(_Part):
    """Replicas of a deployment."""

    min_replicas: Annotated[int, Field(ge=0)] = 1
    max_replicas: Positive = 1
    target_ongoing_requests: float = 128


class Deployment(_Part):
    """A deployment of Ray Serve."""

    name: str = ""
    max_ongoing_requests: Positive = 50
    autoscaling_config: Autoscaling = Autoscaling()
    ray_actor_options: dict[str, Any] = {}


class _Application(_Part):
    name: str
    route_prefix: str = "/"
    deployments: list[Deployment] = []


class ServerApplication(_Application):
    """The gateway."""

    import_path: Literal["server"]
    args: ServerArgs = ServerArgs()


class ModelApplication(_Application):
    """A base model that is trained."""

    import_path: Literal["model"]
    args: ModelArgs


class SamplerApplication(_Application):
    """A base model that is sampled."""

    import_path: Literal["sampler"]
    args: SamplerArgs


class ProcessorApplication(_Application):
    """Data resources."""

    import_path: Literal["processor"]
    args: ProcessorArgs = ProcessorArgs()


Application = Annotated[
    ServerApplication | ModelApplication | SamplerApplication | ProcessorApplication,
    Field(discriminator="import_path"),
]


class ServerConfig(_Part):
    """The published configuration of a service."""

    ray_namespace: str | None = None
    proxy_location: str | None = None
    http_options: HttpOptions = HttpOptions()
    telemetry: Telemetry = Telemetry()
    persistence: Persistence = Persistence()
    task_queue: TaskQueue | None = None
    applications: Annotated[list[Application], Field(min_length=1)]
