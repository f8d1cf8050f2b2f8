"""What becomes of each key of the published configuration: a setting of the service, or nothing and why.

A key of an application begins with its kind, such as `model.args.max_loras`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from pydantic import BaseModel

from twinkle_server.launch.config import ServerConfig


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of some keys.

    Attributes:
        pattern: the keys; `*` stands for any text.
        text: what they become, or why they have no effect.
        used: whether they have an effect: they become a setting, or are checked.
    """

    pattern: str
    text: str
    used: bool = True


_RAY: Final = "the service is one process tree without Ray"
_DEVICES: Final = "the service uses an accelerator if there is one; CUDA_VISIBLE_DEVICES selects it"
_ROUTES: Final = "the routes of the service begin with /api/v1, /twinkle and /v1"
_QUOTAS: Final = "twinkle server keys set NAME"
VERDICTS: Final = (
    Verdict("ray_namespace", _RAY, used=False),
    Verdict("proxy_location", _RAY, used=False),
    Verdict("telemetry.enabled", "whether traces.otlp_endpoint is set"),
    Verdict("telemetry.otlp_endpoint", "traces.otlp_endpoint"),
    Verdict("telemetry.service_name", "set OTEL_SERVICE_NAME in the environment", used=False),
    Verdict("telemetry.resource_attributes", "set OTEL_RESOURCE_ATTRIBUTES in the environment", used=False),
    Verdict("telemetry.export_interval_ms", "metrics are not sent, but read from /metrics", used=False),
    Verdict("telemetry.debug", "traces are sent to the collector only, and not printed", used=False),
    Verdict("persistence.mode", "where the data folder is; redis is refused"),
    Verdict("persistence.file_path", "data, the folder of the file"),
    Verdict("persistence.redis_url", "the service stores its state in SQLite in its own folder", used=False),
    Verdict("persistence.key_prefix", "each service has its own folder", used=False),
    Verdict("task_queue.*", f"nothing reads it; limits are quotas of keys: {_QUOTAS}", used=False),
    Verdict("*.deployments.*", f"{_RAY}; set variables of runtime_env in the environment of the service", used=False),
    Verdict("*http_options.host", "network.host"),
    Verdict("*http_options.port", "network.port"),
    Verdict("*.import_path", "the kind of the application"),
    Verdict("server.route_prefix", "must be /api/v1"),
    Verdict("server.args.route_prefix", "must be /api/v1"),
    Verdict("server.args.supported_models.model_name", "must be the name of the model"),
    Verdict("server.args.server_config.per_token_model_limit", "limits.adapters"),
    Verdict(
        "server.args.server_config.expiration_timeout",
        "a session ends after adapter_timeout without a heartbeat; times.kept_run and times.kept_result in a "
        "configuration of `twinkle serve` are the retention of states and results",
        used=False,
    ),
    Verdict("server.args.server_config.cleanup_interval", "the service removes what has expired by itself", used=False),
    Verdict("server.args.server_config.metrics_update_interval", "/metrics is computed when it is read", used=False),
    Verdict("server.args.server_config.actor_name", _RAY, used=False),
    Verdict(
        "processor.args.*",
        "each data set has a worker process on the CPU, and datasets.workers in a configuration of `twinkle serve` is "
        "their maximum number",
        used=False,
    ),
    Verdict("model.route_prefix", "name, the part after /model/"),
    Verdict("sampler.route_prefix", _ROUTES, used=False),
    Verdict("processor.route_prefix", _ROUTES, used=False),
    Verdict("*.args.model_id", "model; all applications must have the same"),
    Verdict("*.args.nproc_per_node", "must be 1"),
    Verdict("*.args.device_group.name", "the device of an application needs no name", used=False),
    Verdict("*.args.device_group.ranks", "must be one rank"),
    Verdict("*.args.device_group.gpus_per_worker", "must be 1"),
    Verdict("*.args.device_group.*", _DEVICES, used=False),
    Verdict("*.args.device_mesh.*_size", "must be 1"),
    Verdict("*.args.device_mesh.sequence_parallel", "there is one device", used=False),
    Verdict("*.args.device_mesh.device_type", _DEVICES, used=False),
    Verdict("model.args.backend", "must be transformers"),
    Verdict("model.args.adapter_config.adapter_timeout", "times.session"),
    Verdict("model.args.adapter_config.adapter_max_lifetime", "an adapter lives as long as its session", used=False),
    Verdict("model.args.queue_config.enabled", "false leaves out max_input_tokens"),
    Verdict("model.args.queue_config.max_input_tokens", "limits.request_tokens"),
    Verdict("model.args.queue_config.execution_timeout", "times.deadline"),
    Verdict("model.args.queue_config.*", f"rates are quotas of keys: {_QUOTAS} --tokens-per-second N", used=False),
    Verdict("model.args.max_loras", "memory bounds the number of adapters, and idle ones are paged out", used=False),
    Verdict("model.args.max_length", "rows may be as long as the context of the model", used=False),
    Verdict("sampler.args.sampler_type", "mock is refused; torch and vllm are the service's own engine"),
    Verdict("sampler.args.engine_args", "sampling uses the service's own engine, not vLLM", used=False),
    Verdict(
        "sampler.args.queue_config.*",
        f"the context of the model limits sampling, and rates are quotas of keys: {_QUOTAS} --tokens-per-second N",
        used=False,
    ),
    Verdict("*.name", "the name of the application in messages"),
)
"""The first pattern that fits a key counts."""


def verdict_of(key: str) -> Verdict | None:
    """Return what becomes of a key; None if it is not of the published configuration."""
    return next((verdict for verdict in VERDICTS if fnmatchcase(key, verdict.pattern)), None)


def notes_of(config: ServerConfig) -> Iterator[str]:
    """Yield a note for each reason for which keys that a configuration sets have no effect.

    Keys of `telemetry` count if it is enabled.
    """
    reasons: dict[str, list[str]] = {}
    for key in _keys(config):
        verdict = verdict_of(key)
        if verdict is None or verdict.used or (key.startswith("telemetry.") and not config.telemetry.enabled):
            continue
        named = key.partition(".deployments.")[0] + ".deployments" if ".deployments." in key else key
        keys = reasons.setdefault(verdict.text, [])
        if named not in keys:
            keys.append(named)
    for reason, keys in reasons.items():
        yield f"{', '.join(keys)} {'has' if len(keys) == 1 else 'have'} no effect: {reason}"


def _keys(config: ServerConfig) -> Iterator[str]:
    for name in ServerConfig.model_fields:
        if name in config.model_fields_set and name != "applications":
            yield from _below(name, getattr(config, name))
    for application in config.applications:
        yield from _below(application.import_path, application)


def _below(key: str, value: Any) -> Iterator[str]:
    """Yield the keys that are set in a part of the configuration; keys of a list's items do not have its indices."""
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            if name in value.model_fields_set:
                yield from _below(f"{key}.{name}", getattr(value, name))
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
        for item in value:
            yield from _below(key, item)
    elif value is not None:
        yield key
