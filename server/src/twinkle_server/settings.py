"""Settings and limits of the service, with defaults for a small machine."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson


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
        small_bytes: payloads and results up to this size (a pass of 4,096 tokens, for example) are stored in the
            database. Larger ones are files, which take longer and keep the database small.
        loss_bytes: memory that the loss of a plugin may allocate in its worker process.
        graph_seconds: time of a client's loss graph for all rows of one operation, backward included.
    """

    body_bytes: int = 64 * 2**20
    decompressed_bytes: int = 256 * 2**20
    inflight_bytes: int = 512 * 2**20
    datums: int = 4096
    request_tokens: int = 4 * 2**20
    samples: int = 512
    queued: int = 4096
    small_bytes: int = 128 * 2**10
    loss_bytes: int = 2**30
    graph_seconds: float = 5.0


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
    """

    poll: float = 30.0
    gap_pause: float = 3.0
    gap_fail: float = 10.0
    gap_limit: float = 600.0
    resend: float = 35.0
    session: float = 300.0
    kept_run: float = 7 * 86400.0
    kept_result: float = 86400.0
    read_result: float = 600.0
    kept_record: float = 86400.0
    kept_audit: float = 90 * 86400.0
    deadline: float = 600.0
    drain: float = 30.0
    snapshot: float = 30.0
    silent: float = 5.0
    stopped: float = 60.0
    start: float = 1800.0
    loss: float = 10.0
    loss_start: float = 60.0
    upkeep: float = 600.0
    trash: float = 86400.0
    revocations: float = 20.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one service.

    Attributes:
        model: folder or hub id of the base model.
        data: directory for the database, payloads, snapshots and checkpoints.
        name: name of the model for clients; by default `model`.
        tokenizer: where clients load the tokenizer; None is the model folder, for clients on this machine.
        template: the chat template of the chat endpoints, a component of kind `template` by name.
        host: address to listen on.
        port: port to listen on; 0 uses a free one.
        auth: False serves requests without keys; on loopback only.
        max_pass_seconds: approximate time that a decode step waits for training, if passes are short enough.
        pass_tokens: tokens per pass; None depends on the size of the model. The same operations give the same numbers
            only with the same value.
        backend: the engine, a component of kind `engine` by name or reference; None is the only installed one.
        snapshot_steps: optimizer steps of a model after which it is snapshotted.
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
        limits: size limits, see `Limits`.
        times: time limits, see `Times`.
        extra: additional options of the engine.
    """

    model: str
    data: Path
    name: str | None = None
    tokenizer: str | None = None
    template: str = "Template"
    host: str = "127.0.0.1"
    port: int = 8000
    auth: bool = True
    max_pass_seconds: float = 0.5
    pass_tokens: int | None = None
    backend: str | None = None
    snapshot_steps: int = 20
    losses: tuple[str, ...] | None = None
    custom_losses: bool = False
    strict_losses: bool = False
    loss_workers: bool = True
    in_process_losses: tuple[str, ...] = ()
    local_metrics: bool = False
    take_over: bool = False
    accept_base: bool = False
    limits: Limits = field(default_factory=Limits)
    times: Times = field(default_factory=Times)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def served_name(self) -> str:
        """Name of the model for clients."""
        return self.name or self.model

    def dump(self) -> str:
        """Serialize the settings as JSON, for `python -m twinkle_server.engine DESCRIPTOR JSON`."""
        return orjson.dumps(asdict(self), default=str).decode()

    @classmethod
    def parse(cls, text: str) -> "Settings":
        """Parse the output of `dump`."""
        fields = orjson.loads(text)
        losses = fields.pop("losses")
        return cls(
            data=Path(fields.pop("data")),
            losses=None if losses is None else tuple(losses),
            in_process_losses=tuple(fields.pop("in_process_losses")),
            limits=Limits(**fields.pop("limits")),
            times=Times(**fields.pop("times")),
            **fields,
        )
