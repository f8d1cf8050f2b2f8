"""Background jobs that merge checkpoints into the base model, one at a time, each in a process of its own."""

import asyncio
import os
import shutil
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import orjson
import structlog
from sqlalchemy import Connection, func, select

from twinkle_server.checkpoints.merging import CannotMerge, size_of_merged
from twinkle_server.engine.files import Damaged, read_manifest
from twinkle_server.environment import scrubbed
from twinkle_server.errors import BadRequest, Busy, Forbidden, NotFound, ServiceError, Unavailable
from twinkle_server.ids import CheckpointPath, new_id
from twinkle_server.store import checkpoints, folders
from twinkle_server.store.checkpoints import Checkpoints
from twinkle_server.store.database import SqliteDatabase
from twinkle_server.store.records import Checkpoint
from twinkle_server.store.tables import checkpoints as table
from twinkle_server.tenancy.auth import Caller
from twinkle_server.tenancy.quotas import Quotas, check_quotas

MOST: Final = 2
"""Jobs of a tenant that wait or run."""
_KEPT: Final = 1024
_ROOM: Final = 2**30  # bytes that must stay free
_KINDS: Final = ("sampler_weights", "external_weights")
_log = structlog.get_logger(__name__)
Status = Literal["waiting", "running", "done", "failed"]


@dataclass(slots=True)
class Job:
    """A merge.

    Attributes:
        id: 128 random bits.
        tenant: its owner.
        source: the checkpoint that is merged.
        target: path of the merged model.
        status: of the job.
        done: bytes written.
        total: bytes of the merged model.
        error: why it failed.
    """

    id: str
    tenant: str
    source: str
    target: str
    status: Status = "waiting"
    done: int = 0
    total: int = 0
    error: str | None = None

    @property
    def open(self) -> bool:
        """Whether it waits or runs."""
        return self.status in ("waiting", "running")


class MergeJobs:
    """The merges of a service. They end with it; the same request starts one again.

    Args:
        data: the data folder.
        base: folder of the base model.
        database: of the data folder.
        table: its checkpoints.
    """

    def __init__(self, data: Path, base: Path, database: SqliteDatabase, table: Checkpoints) -> None:
        self._data, self._base, self._database, self._table = data, base, database, table
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._one = asyncio.Lock()

    def get(self, tenant: str, job: str) -> Job:
        """Return a job.

        Raises:
            NotFound: the tenant has no such job, or it was too long ago, or before a restart.
        """
        found = self._jobs.get(job)
        if found is None or found.tenant != tenant:
            raise NotFound(f"merge {job[:100]!r} does not exist; jobs end with the service, so submit it again")
        return found

    def of(self, tenant: str) -> list[Job]:
        """Return the jobs of a tenant, newest first."""
        return [job for job in reversed(self._jobs.values()) if job.tenant == tenant]

    async def submit(self, caller: Caller, path: CheckpointPath, name: str, ttl: int | None) -> Job:
        """Merge a checkpoint in the background, or return the job that does or has done exactly this.

        Args:
            caller: the owner of the checkpoint.
            path: of the checkpoint.
            name: of the merged model, an external checkpoint of the same run.
            ttl: its lifetime in seconds; None is unlimited.

        Raises:
            NotFound: the caller has no such checkpoint.
            BadRequest: it cannot be merged, or another checkpoint has the name.
            Forbidden: the merged model would exceed the caller's quota of bytes.
            Busy: the caller has too many merges, or the disk is too full.
        """
        if path.kind not in _KINDS:
            raise BadRequest(
                f"cannot merge {path}: it is a checkpoint for training; save one with save_weights_for_sampler"
            )
        now = time.time()
        source = await self._table.get(caller.tenant, path, now)
        target = CheckpointPath(path.run, "external_weights", name)
        if (job := await self._existing(caller, source, target, now)) is not None:
            return job
        if sum(job.open for job in self.of(caller.tenant)) >= MOST:
            raise Busy(f"too many merges: you have {MOST} (limit {MOST}); wait for one to finish", retry_after=10.0)
        size = await asyncio.to_thread(self._size)
        await self._check_room(caller, size, now)
        job = Job(new_id(), caller.tenant, str(path), str(target), total=size)
        self._jobs[job.id] = job
        self._forget()
        task = asyncio.create_task(self._run(job, caller, source, target, ttl), name=f"merge {job.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return job

    async def _existing(self, caller: Caller, source: Checkpoint, target: CheckpointPath, now: float) -> Job | None:
        for job in self.of(caller.tenant):
            if job.open and (job.source, job.target) == (str(source.path), str(target)):
                return job
        try:
            merged = await self._table.get(caller.tenant, target, now)
            facts = (await asyncio.to_thread(read_manifest, self._data / merged.folder)).facts
        except (NotFound, Damaged):
            return None
        if facts.get("source") != source.digest:
            raise BadRequest(f"checkpoint {target} already exists; choose another name")
        job = Job(new_id(), caller.tenant, str(source.path), str(target), "done", merged.size, merged.size)
        self._jobs[job.id] = job
        self._forget()
        return job

    def _forget(self) -> None:
        for key in [key for key, job in self._jobs.items() if not job.open][: max(0, len(self._jobs) - _KEPT)]:
            del self._jobs[key]

    def _size(self) -> int:
        try:
            return size_of_merged(self._base)
        except CannotMerge as error:
            raise BadRequest(f"cannot merge: {error}") from error

    async def _check_room(self, caller: Caller, size: int, now: float) -> None:
        def used(connection: Connection) -> int:
            check_quotas(connection, caller, "save", now)
            mine = select(func.coalesce(func.sum(table.c.size), 0)).where(table.c.tenant == caller.tenant)
            return int(connection.execute(mine.where(table.c.deleted.is_(None))).scalar_one())

        limit = Quotas.read(caller.quotas).bytes
        stored = await self._database.read(used)
        if limit is not None and stored + size > limit:
            raise Forbidden(
                f"quota exceeded: the merged model has {size} bytes, and you have {stored} bytes of checkpoints (limit "
                f"of this key: {limit}); delete some first"
            )
        free = (await asyncio.to_thread(shutil.disk_usage, self._data)).free
        if free < size + _ROOM:
            raise Unavailable("the service's disk has too little space for the merged model", retry_after=300.0)

    async def _run(self, job: Job, caller: Caller, source: Checkpoint, target: CheckpointPath, ttl: int | None) -> None:
        try:
            async with self._one:
                job.status = "running"
                await self._merge(job, caller, source, target, ttl)
                job.status, job.done = "done", job.total
        except asyncio.CancelledError:
            raise
        except CannotMerge as error:
            job.status, job.error = "failed", str(error)
        except ServiceError as error:
            job.status, job.error = "failed", error.message
        except Exception:
            _log.exception("a merge failed", job=job.id)
            job.status, job.error = "failed", "internal error; the log of the service has the details"

    async def _merge(
        self, job: Job, caller: Caller, source: Checkpoint, target: CheckpointPath, ttl: int | None
    ) -> None:
        begun = time.time()
        folder = f"checkpoints/{new_id()}"
        await self._database.write(lambda connection: folders.name(connection, folder, begun))  # a crash is swept up
        facts = {"kind": "merged", "source": source.digest}
        result = await self._process(job, self._data / source.folder, self._data / folder, facts)
        merged = Checkpoint(
            caller.tenant, target.run, target.kind, target.name, folder, int(result["size"]), str(result["digest"]),
            source.base, source.rank, begun, expires=None if ttl is None else time.time() + ttl,
            train_attn=source.train_attn, train_mlp=source.train_mlp, train_unembed=source.train_unembed,
            metadata={"merged_from": str(source.path)}, project=source.project,
        )  # fmt: skip

        def write(connection: Connection) -> None:
            check_quotas(connection, caller, "save", time.time())
            checkpoints.add(connection, merged)

        try:
            await self._database.write(write)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, self._data / folder, True)
            raise
        job.total = merged.size

    async def _process(self, job: Job, adapter: Path, output: Path, facts: dict[str, str]) -> dict[str, Any]:
        """Run the process, follow its progress, and return its result."""
        words = (str(self._base), str(adapter), str(output), orjson.dumps(facts).decode())
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "twinkle_server.checkpoints.merging", *words,
            env=scrubbed(os.environ), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        last: dict[str, Any] = {}
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                last = orjson.loads(line)
                job.done, job.total = last.get("done", job.done), last.get("total", job.total)
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if "error" in last:
            raise CannotMerge(last["error"])
        if code or "digest" not in last:
            raise RuntimeError(f"the process ended with exit status {code}")
        return last
