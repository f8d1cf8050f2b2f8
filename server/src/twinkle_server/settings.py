"""Every limit of the service, with the default of a small machine."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class Limits:
    """What a body, a request and a tenant may be.

    Attributes:
        body_bytes: of a request, as sent.
        decompressed_bytes: of a request, after decompression.
        inflight_bytes: of all bodies that are being read or wait for the log.
        datums: rows of a pass.
        request_tokens: tokens of all rows of a pass.
        samples: sequences of one sampling request.
        queued: operations of one tenant that wait or run.
        small_bytes: payloads and results up to this size live in the database, as those of a pass of 4,096 tokens do;
            larger ones are files, which take longer and keep the database small.
        loss_bytes: that the loss of a plugin may allocate in its worker process.
        graph_seconds: that a loss graph of a client may take for all rows of one operation, backward included.
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
    """Seconds.

    Attributes:
        poll: a future's request is held so long before it answers `try_again`.
        gap_pause: a missing number is told as the reason after this.
        gap_fail: what waits for it fails after this, unless its request may still come: a slow upload of its tenant is
            under way or has just ended, or a request of its tenant was turned away for the moment (see `resend`).
        gap_limit: what waits for it fails after this at the latest.
        resend: a client sends a request again within this time if it was answered with 408, 429 or 5xx, if its
            connection broke, or if the service was started anew.
        session: a session without heartbeat ends after this.
        kept_run: the state of a model whose session ended is kept so long.
        kept_result: a result that nobody has read is kept so long.
        read_result: a result that was read is kept so long.
        kept_record: sequences that were sampled with `record_stability_info` can be trained on for so long after they
            were sampled or trained on last.
        kept_audit: an entry of the audit log is kept so long.
        deadline: a pass that takes longer is taken for hung, and the engine is started anew.
        drain: SIGTERM waits so long for the pass that runs.
        snapshot: a model that changed is snapshotted at least so often.
        silent: an engine that gives no sign of life for so long is said not to respond (it was stopped, say).
        stopped: an engine whose process is stopped (SIGSTOP) for so long is started anew if it owes an answer; where
            there is no `/proc`, only `deadline` ends it.
        start: the engine may take so long to load the model.
        revocations: policy and revocation lists are read so often, and plugins that they forbid are dropped.
        loss: the loss of a plugin may take so long for one operation, at most half of `deadline`.
        loss_start: the import of such a plugin may take so long, likewise.
        upkeep: checkpoints whose time is over, or that are more than a quota keeps, are removed at least so often.
        trash: a checkpoint that was removed is kept so long in the trash.
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
    """Of one service.

    Attributes:
        model: folder or Hub id of the base model.
        data: directory of the database, payloads, snapshots and checkpoints.
        name: what clients call the model; by default `model` as given.
        tokenizer: where clients find its tokenizer; None is the model's folder, for those on this machine.
        host: to listen on.
        port: to listen on; 0 takes a free one.
        auth: False serves everybody; on loopback only.
        max_pass_seconds: a decode step waits at most about so long for training, as far as passes are that short.
        pass_tokens: tokens that go through the model at one time; None follows from the model's size. The same
            operations give the same numbers only with the same value.
        backend: the engine, a component of kind `engine` by name or reference; None is the only one installed.
        snapshot_steps: optimizer steps of a model after which it is snapshotted.
        losses: names of loss plugins beside the published ones that requests may use; None is every installed one that
            says it is tenant-safe.
        custom_losses: let clients register loss graphs.
        strict_losses: refuse losses under a published name whose formula is not the published one.
        loss_workers: compute the losses of plugins that do not ship with Twinkle in processes of their own.
        in_process_losses: names of plugins whose losses are computed in the engine all the same.
        local_metrics: answer `/metrics` and `/twinkle/status` to programs on this machine without a key. Not where a
            proxy on this machine forwards requests of others: they look like its own.
        take_over: take the data directory from a service on another machine, which is dead.
        accept_base: serve the model though the directory's adapters of that name were trained on another one.
        limits: see `Limits`.
        times: see `Times`.
        extra: further options of the engine.
    """

    model: str
    data: Path
    name: str | None = None
    tokenizer: str | None = None
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
        """What clients call the model."""
        return self.name or self.model

    def dump(self) -> str:
        """Return them as JSON, for the engine's command line: `python -m twinkle_server.engine DESCRIPTOR JSON`."""
        return orjson.dumps(asdict(self), default=str).decode()

    @classmethod
    def parse(cls, text: str) -> "Settings":
        """Read what `dump` wrote."""
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
