"""Settings and limits of the service, with defaults for a small machine.

Other modules get a plain `Settings`. `configuration` derives the schema of the configuration file from its fields: a
nested dataclass is a section of the file, and adding one takes a single field of `Settings`.
"""

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, cast

import orjson
from annotated_types import Ge, Le

from twinkle_server.bounds import Amount, Count, Seconds, Share
from twinkle_server.data.limits import DataLimits
from twinkle_server.hub_uploads.limits import UploadLimits

S = TypeVar("S")


class Secret:
    """Marks a field whose value is never printed and never passed to the engine: `Annotated[str, SECRET]`."""


SECRET: Final = Secret()
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Size limits of requests and tenants.

    Attributes:
        body_bytes: size of a request body, as sent.
        decompressed_bytes: size of a request body after decompression.
        inflight_bytes: total size of the request bodies that are being read or written to the log.
        datums: rows of one forward-backward request.
        request_tokens: tokens of all rows of one forward-backward request.
        samples: sequences of one sampling request.
        queued: pending operations of one tenant.
        adapters: models of one tenant, for keys without a quota of their own; None does not limit them.
        small_bytes: payloads and results up to this size (a pass of 64,000 tokens, for example) are stored in the
            database. Larger ones are files, which keep the database small and take longer.
        loss_bytes: memory that the loss of a plugin may allocate in its worker process.
        graph_seconds: time of a client's loss graph for all rows of one operation, backward included.
    """

    body_bytes: Count = 64 * 2**20
    decompressed_bytes: Count = 256 * 2**20
    inflight_bytes: Count = 512 * 2**20
    datums: Count = 4096
    request_tokens: Count = 4 * 2**20
    samples: Count = 512
    queued: Count = 4096
    adapters: Count | None = None
    small_bytes: Count = 2**20
    loss_bytes: Count = 2**30
    graph_seconds: Seconds = 5.0


@dataclass(frozen=True, slots=True)
class Times:
    """Time limits, in seconds.

    Attributes:
        poll: how long a request for a result waits before it answers `try_again`.
        gap_pause: time after which a missing sequence number is reported as the reason for waiting.
        gap_fail: time after which operations that wait for a missing number fail, unless its request may still
            arrive: a slow upload of the tenant is in progress or has just ended, or a request of the tenant was
            rejected temporarily (see `resend`).
        gap_limit: time after which operations that wait for a missing number fail in any case.
        resend: time within which a client repeats a request that was answered with 408, 429 or 5xx, whose connection
            broke, or that was interrupted by a restart of the service.
        session: time without a heartbeat after which a session ends.
        kept_run: retention of the state of a model whose session ended.
        kept_result: retention of a result that was not read.
        read_result: retention of a result that was read.
        kept_record: retention of sequences that were sampled with `record_stability_info`, after the last sampling or
            training on them.
        kept_audit: retention of audit log entries.
        deadline: time after which a pass counts as hung and the engine restarts.
        drain: time that SIGTERM waits for the running pass.
        snapshot: time after which a changed model is snapshotted at the latest.
        silent: time without a sign of life after which an engine is reported as not responding.
        stopped: time after which an engine whose process is stopped (SIGSTOP) restarts if operations are pending.
            Without `/proc`, only `deadline` restarts it.
        start: time for the engine to load the model.
        revocations: interval at which policy and revocation lists are read; plugins that they forbid are disabled.
        loss: time of the loss of a plugin for one operation, at most half of `deadline`.
        loss_start: time of the import of such a plugin, at most half of `deadline`.
        upkeep: interval at which expired checkpoints, and those over a quota, are removed.
        trash: retention of a removed checkpoint in the trash.
        kept_figures: retention of the figures of a run after its last training operation.
        kept_rollouts: retention of recorded rows.
        login: time after which a login to the dashboard ends.
    """

    poll: Seconds = 30.0
    gap_pause: Seconds = 3.0
    gap_fail: Seconds = 10.0
    gap_limit: Seconds = 600.0
    resend: Seconds = 35.0
    session: Seconds = 300.0
    kept_run: Seconds = 7 * 86400.0
    kept_result: Seconds = 86400.0
    read_result: Seconds = 600.0
    kept_record: Seconds = 86400.0
    kept_audit: Seconds = 90 * 86400.0
    deadline: Seconds = 600.0
    drain: Seconds = 30.0
    snapshot: Seconds = 30.0
    silent: Seconds = 5.0
    stopped: Seconds = 60.0
    start: Seconds = 1800.0
    loss: Seconds = 10.0
    loss_start: Seconds = 60.0
    upkeep: Seconds = 600.0
    trash: Annotated[float, Ge(0)] = 86400.0
    kept_figures: Seconds = 30 * 86400.0
    kept_rollouts: Seconds = 7 * 86400.0
    login: Seconds = 12 * 3600.0
    revocations: Seconds = 20.0


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Which sampled rows of training are kept to be read in the dashboard. They contain texts of tenants.

    Attributes:
        rows: newest rows of each run that are kept; 0 records none.
        tokens: maximum number of tokens of a row; longer ones are cut.
        bytes: size of all kept rows together; the oldest are deleted first.
        operator: whether operators may read rows of other tenants.
    """

    rows: Amount = 32
    tokens: Count = 1024
    bytes: Amount = 64 * 2**20
    operator: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one service.

    Attributes:
        model: folder or hub id of the base model.
        data: directory for the database, payloads, snapshots and checkpoints.
        name: name of the model for clients; by default the id of a model on a hub, or the last part of a folder.
        tokenizer: where clients load the tokenizer: an id at Hugging Face, or a path that is valid on their machines;
            None is the id of a model from Hugging Face, and otherwise nothing, because paths of this machine are not
            shown to tenants.
        template: the chat template of the chat endpoints, a component of kind `template` by name.
        host: address to listen on.
        port: port to listen on; 0 uses a free one.
        root_path: prefix of all URLs that a proxy removes before it forwards a request, such as `/twinkle`.
        trusted_proxies: addresses and networks of proxies whose `X-Forwarded-*` headers are believed.
        tls_cert: certificate chain for HTTPS (PEM); SIGHUP reads it again.
        tls_key: private key of the certificate (PEM); None if it is in the same file.
        auth: False serves requests without keys; on loopback only.
        max_pass_seconds: approximate time that a decode step waits for training, if passes are short enough.
        pass_tokens: tokens per pass; None depends on the size of the model. The same operations give the same numbers
            only with the same value.
        backend: the engine, a component of kind `engine` by name or reference; None is the only installed one.
        snapshot_steps: optimizer steps of a model after which it is snapshotted.
        full_parameters: allow sessions that train all parameters of the model. Such a session has the service for
            itself; see the guide for operators.
        losses: names of loss plugins that requests may use in addition to the published losses; None is every
            installed one that is tenant-safe.
        custom_losses: allow clients to register loss graphs.
        strict_losses: refuse losses with a published name whose formula is not the published one.
        loss_workers: compute the losses of plugins that do not ship with Twinkle in separate processes.
        in_process_losses: names of plugins whose losses are computed in the engine process.
        local_metrics: answer `/metrics` and `/twinkle/status` to programs on this machine without a key. Do not use
            it with a proxy on this machine, because forwarded requests look local.
        take_over: take the data folder from a dead service on another machine.
        accept_base: serve the model although the adapters in the directory were trained on another one.
        log_level: minimum level of log lines; `debug` logs every operation.
        limits: size limits, see `Limits`.
        times: time limits, see `Times`.
        datasets: data resources, see `DataLimits`.
        uploads: uploads to hubs, see `UploadLimits`.
        rollouts: which sampled rows are kept to be read, see `Rollouts`.
        dashboard: serve the dashboard at `/`.
        otlp_endpoint: URL of an OpenTelemetry collector (OTLP over HTTP) that gets traces; None uses the environment
            variable `OTEL_EXPORTER_OTLP_ENDPOINT`, and records no traces without it.
        trace_share: share of the requests that are traced, if their client does not decide; None uses the
            environment variables `OTEL_TRACES_SAMPLER` and `OTEL_TRACES_SAMPLER_ARG`.
        extra: additional options of the engine.
    """

    model: str
    data: Path
    name: str | None = None
    tokenizer: str | None = None
    template: str = "Template"
    host: str = "127.0.0.1"
    port: Annotated[int, Ge(0), Le(65535)] = 8000
    root_path: str = ""
    trusted_proxies: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    auth: bool = True
    max_pass_seconds: Annotated[float, Ge(0.001)] = 0.5
    pass_tokens: Count | None = None
    backend: str | None = None
    snapshot_steps: Count = 20
    full_parameters: bool = False
    losses: tuple[str, ...] | None = None
    custom_losses: bool = False
    strict_losses: bool = False
    loss_workers: bool = True
    in_process_losses: tuple[str, ...] = ()
    local_metrics: bool = False
    take_over: bool = False
    accept_base: bool = False
    log_level: LogLevel = "info"
    limits: Limits = field(default_factory=Limits)
    times: Times = field(default_factory=Times)
    datasets: DataLimits = field(default_factory=DataLimits)
    uploads: UploadLimits = field(default_factory=UploadLimits)
    rollouts: Rollouts = field(default_factory=Rollouts)
    dashboard: bool = True
    otlp_endpoint: str | None = None
    trace_share: Share | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def served_name(self) -> str:
        """Name of the model for clients."""
        return self.name or self.model

    def dump(self) -> str:
        """Serialize the settings as JSON, for `python -m twinkle_server.engine DESCRIPTOR JSON`, without secrets."""
        return orjson.dumps(_plain(self), default=str).decode()

    @classmethod
    def parse(cls, text: str) -> "Settings":
        """Parse the output of `dump`."""
        return build(cls, orjson.loads(text))


def build(kind: type[S], values: Mapping[str, Any]) -> S:
    """Return a settings object from plain values: mappings for nested dataclasses, texts for paths, lists for tuples.

    Args:
        kind: `Settings`, or the dataclass of a nested group.
        values: by field; missing fields keep their defaults. They are converted, not validated.
    """
    hints = hints_of(kind)
    return kind(**{name: _converted(hints[name], value) for name, value in values.items()})


def hints_of(kind: type[Any]) -> dict[str, Any]:
    """Return the annotations of a dataclass by field, with their constraints."""
    return typing.get_type_hints(kind, include_extras=True)


def bare(annotation: Any) -> Any:
    """Return a type without constraints and without None."""
    if typing.get_origin(annotation) is Annotated:
        return bare(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        kinds = [bare(member) for member in typing.get_args(annotation) if member is not types.NoneType]
        return kinds[0] if len(kinds) == 1 else annotation
    return annotation


def is_secret(annotation: Any) -> bool:
    """Return whether a field is marked with `SECRET`."""
    return any(isinstance(mark, Secret) for mark in getattr(annotation, "__metadata__", ()))


def _converted(annotation: Any, value: Any) -> Any:
    kind = bare(annotation)
    if value is None:
        return None
    if is_dataclass(kind):
        return value if is_dataclass(value) else build(cast("type[Any]", kind), value)
    if kind is Path:
        return Path(value)
    if typing.get_origin(kind) is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        item = typing.get_args(kind)[0]
        return tuple(_converted(item, entry) for entry in value)
    return value


def _plain(value: Any) -> Any:
    if not is_dataclass(value):
        return value
    hints = hints_of(type(value))
    return {
        entry.name: _plain(getattr(value, entry.name)) for entry in fields(value) if not is_secret(hints[entry.name])
    }
