"""Limits of data resources."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge

from twinkle_server.bounds import Amount, Count, Seconds


@dataclass(frozen=True, slots=True)
class DataLimits:
    """Limits of the data sets, loaders and other components that requests create on the service.

    Attributes:
        resources: maximum number of a tenant; 0 turns them off.
        workers: maximum number of worker processes of all tenants. A data set and its loaders share one.
        rows: maximum number of rows of a data set.
        memory: bytes that a worker process may allocate after its start.
        answer_bytes: size of the result of one call, such as a batch.
        seconds: time limit of one call, such as `encode`.
        start: time limit of the start of the first worker process, which imports what all need.
        idle: seconds without a call after which a resource is removed.
        hubs: schemes of the hubs from which data sets and tokenizers may be loaded (`hf`, `ms`). Their files are
            stored in the hub's cache on the service, which has no limit of its own.
        sets: data sets of the operator: a file, a folder or a hub's id by the id that clients use. The ids `ms://a/b`,
            `hf://a/b` and `a/b` are the same.
    """

    resources: Amount = 16
    workers: Count = 16
    rows: Count = 1_000_000
    memory: Annotated[int, Ge(64 * 2**20)] = 2 * 2**30
    answer_bytes: Count = 32 * 2**20
    seconds: Seconds = 300.0
    start: Seconds = 120.0
    idle: Seconds = 1800.0
    hubs: tuple[Literal["hf", "ms"], ...] = ()
    sets: Mapping[str, str] = field(default_factory=dict)
