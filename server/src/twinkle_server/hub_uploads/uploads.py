"""Uploads of checkpoints in processes of their own: queued, repeated where a hub is unreachable, and cancelled."""

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from twinkle_server.environment import scrubbed
from twinkle_server.errors import Busy, NotFound, Unprocessable
from twinkle_server.hub_uploads.limits import UploadLimits
from twinkle_server.ids import new_id
from twinkle_server.store.records import Checkpoint

_log = logging.getLogger(__name__)
_MODULE: Final = "twinkle_server.hub_uploads.process"
Status = Literal["queued", "running", "succeeded", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint is uploaded.

    Attributes:
        reference: `hf://owner/name` or `ms://owner/name`.
        token: of the tenant at the hub; never logged or stored.
        private: whether a repository that is created is private.
        revision: branch; None is the default one.
        path_in_repo: folder in the repository; empty for its root.
        message: of the commit; None is the name of the checkpoint.
    """

    reference: str
    token: str = field(repr=False)
    private: bool = True
    revision: str | None = None
    path_in_repo: str = ""
    message: str | None = None


@dataclass(slots=True, eq=False)
class Upload:
    """An upload.

    Attributes:
        id: cannot be guessed.
        tenant: its owner.
        checkpoint: what is uploaded.
        target: where; without its token once it has ended.
        status: "queued", "running", "succeeded", "failed" or "cancelled".
        files: number of files; 0 before it runs.
        size: their bytes.
        attempts: number of attempts so far.
        url: of the repository, after success.
        error: why it failed, or why the last attempt did.
        changed: time of the last change (UTC seconds).
    """

    id: str
    tenant: str
    checkpoint: Checkpoint
    target: Target
    status: Status = "queued"
    files: int = 0
    size: int = 0
    attempts: int = 0
    url: str | None = None
    error: str | None = None
    changed: float = field(default_factory=time.time)
    task: "asyncio.Task[None] | None" = None

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.status in ("succeeded", "failed", "cancelled")


@dataclass(slots=True)
class _Automatic:
    target: Target
    since: float
    seen: set[int] = field(default_factory=set)


class _Failed(Exception):
    def __init__(self, text: str, passing: bool) -> None:
        super().__init__(text)
        self.passing = passing


class HubUploads:
    """The uploads of a service. All methods run on the event loop.

    Args:
        limits: of uploads.
        data: the data folder.
        base: public id of the base model; None if it has none.
        saved: returns a tenant's newest checkpoints of a run.
    """

    def __init__(
        self,
        limits: UploadLimits,
        data: Path,
        base: str | None,
        saved: Callable[[str, str], Awaitable[list[Checkpoint]]],
    ) -> None:
        self.limits = limits
        self._data, self._base, self._saved = data, base, saved
        self._uploads: dict[str, Upload] = {}
        self._requests: dict[tuple[str, str], str] = {}
        self._automatic: dict[tuple[str, str], _Automatic] = {}
        self._processes = asyncio.Semaphore(limits.processes)
        self._turns: dict[str, asyncio.Lock] = {}

    def begin(self, tenant: str, checkpoint: Checkpoint, target: Target, key: str) -> Upload:
        """Begin an upload, and return it; a repetition of the request returns the same one.

        Args:
            tenant: the owner.
            checkpoint: of the tenant.
            target: where.
            key: identifies the request.

        Raises:
            Unprocessable: the hub may not be used.
            Busy: the tenant has too many unfinished uploads.
        """
        known = self._uploads.get(self._requests.get((tenant, key), ""))
        if known is not None:
            return known
        self.check(target)
        unfinished = [upload for upload in self.of(tenant) if not upload.ended]
        if len(unfinished) >= self.limits.waiting:
            raise Busy(
                f"too many uploads: {len(unfinished)} of yours have not ended (limit {self.limits.waiting})", 5.0
            )
        upload = Upload(new_id(), tenant, checkpoint, target)
        self._uploads[upload.id] = upload
        self._requests[tenant, key] = upload.id
        upload.task = asyncio.create_task(self._run(upload), name="hub upload")
        return upload

    def check(self, target: Target) -> None:
        """Refuse a target that this service does not upload to.

        Raises:
            Unprocessable: see above.
        """
        scheme, _, name = target.reference.partition("://")
        if scheme not in self.limits.hubs:
            offered = ", ".join(f"{hub}://" for hub in self.limits.hubs) or "none"
            raise Unprocessable(f"this service does not upload to {scheme[:20]}://; it uploads to: {offered}")
        if not target.token:
            raise Unprocessable(f"an upload to {target.reference} requires hub_token, a token of yours that may write")
        owner, _, rest = name.partition("/")
        if not owner or not rest or "/" in rest:
            raise Unprocessable(f"hub_model_id must be owner/name, got {name[:200]!r}")

    def of(self, tenant: str) -> list[Upload]:
        """Return the uploads of a tenant, oldest first."""
        return [upload for upload in self._uploads.values() if upload.tenant == tenant]

    def get(self, tenant: str, upload_id: str) -> Upload:
        """Return an upload.

        Raises:
            NotFound: the tenant has no such upload.
        """
        upload = self._uploads.get(upload_id)
        if upload is None or upload.tenant != tenant:
            raise NotFound(
                f"upload {upload_id[:80]!r} does not exist; a restart of the service ends all uploads: begin it again"
            )
        return upload

    def cancel(self, tenant: str, upload_id: str) -> Upload:
        """Cancel an upload that has not ended.

        Raises:
            NotFound: the tenant has no such upload.
        """
        upload = self.get(tenant, upload_id)
        if not upload.ended and upload.task is not None:
            self._change(upload, status="cancelled", error="it was cancelled")
            upload.task.cancel()
        return upload

    # After each save

    def set_automatic(self, tenant: str, run: str, target: Target | None) -> None:
        """Upload every later checkpoint of a run; None stops that.

        Raises:
            Unprocessable: the hub may not be used.
        """
        if target is None:
            self._automatic.pop((tenant, run), None)
            return
        self.check(target)
        self._automatic[tenant, run] = _Automatic(target, time.time())

    def automatic(self, tenant: str, run: str) -> Target | None:
        """Return where the checkpoints of a run are uploaded."""
        found = self._automatic.get((tenant, run))
        return None if found is None else found.target

    async def sweep(self) -> None:
        """Begin the uploads of new checkpoints, and forget old outcomes."""
        for (tenant, run), automatic in list(self._automatic.items()):
            for checkpoint in reversed(await self._saved(tenant, run)):
                if checkpoint.created < automatic.since or checkpoint.id in automatic.seen:
                    continue
                with contextlib.suppress(Busy):
                    self.begin(tenant, checkpoint, automatic.target, f"automatic {run} {checkpoint.id}")
                    automatic.seen.add(checkpoint.id)
        before = time.time() - self.limits.kept
        for upload in [upload for upload in self._uploads.values() if upload.ended and upload.changed < before]:
            del self._uploads[upload.id]
        self._requests = {key: name for key, name in self._requests.items() if name in self._uploads}

    async def close(self) -> None:
        """Cancel all uploads."""
        tasks = [upload.task for upload in self._uploads.values() if upload.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Inside

    async def _run(self, upload: Upload) -> None:
        turn = self._turns.setdefault(upload.tenant, asyncio.Lock())  # in the order of the requests
        pause = self.limits.pause
        try:
            async with turn:
                for attempt in range(1, self.limits.attempts + 1):
                    async with self._processes:
                        self._change(upload, status="running", attempts=attempt)
                        try:
                            url = await asyncio.wait_for(self._upload(upload), self.limits.seconds)
                        except (_Failed, TimeoutError) as error:
                            last = attempt == self.limits.attempts or not getattr(error, "passing", True)
                            text = str(error) or f"it took longer than {self.limits.seconds:g} s"
                            self._change(upload, status="failed" if last else "running", error=text)
                        else:
                            self._change(upload, status="succeeded", url=url, error=None)
                    if upload.ended:
                        return
                    await asyncio.sleep(pause)
                    pause *= 4
        except Exception:
            _log.exception("an upload failed")
            self._change(upload, status="failed", error="the service could not run the upload; see its log")
        except asyncio.CancelledError:
            if not upload.ended:
                self._change(upload, status="cancelled", error="the service is shutting down")

    async def _upload(self, upload: Upload) -> str:
        """Upload once in a process, and return the address of the repository."""
        target, checkpoint = upload.target, upload.checkpoint
        order = {
            "folder": str(self._data / checkpoint.folder), "base": self._base, "reference": target.reference,
            "token": target.token, "private": target.private, "revision": target.revision,
            "path_in_repo": target.path_in_repo, "message": target.message or f"Upload {checkpoint.name}",
        }  # fmt: skip
        environment = scrubbed(os.environ) | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", _MODULE, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL, env=environment,
        )  # fmt: skip
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(order).encode() + b"\n")
            with contextlib.suppress(ConnectionError):
                await process.stdin.drain()
                process.stdin.close()
            return await self._outcome(upload, process.stdout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _outcome(self, upload: Upload, lines: asyncio.StreamReader) -> str:
        while line := await lines.readline():
            fields: dict[str, Any] = json.loads(line)
            if "url" in fields:
                return str(fields["url"])
            if "error" in fields:
                raise self._failure(fields["error"])
            self._change(upload, files=int(fields["files"]), size=int(fields["bytes"]))
        raise _Failed("the process of the upload has ended", passing=True)

    def _failure(self, fields: dict[str, Any]) -> _Failed:
        if fields["own"]:
            return _Failed(str(fields["text"]), bool(fields["passing"]))
        _log.error("an upload failed: %s", fields["text"])
        missing = str(fields["text"]).startswith("FileNotFoundError")
        text = (
            "the checkpoint no longer exists, or has no adapter in PEFT's format; save it again"
            if missing
            else "the service could not upload the checkpoint; see its log"
        )
        return _Failed(text, passing=False)

    def _change(self, upload: Upload, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(upload, name, value)
        upload.changed = time.time()
        if upload.ended:
            upload.target = Target(upload.target.reference, "", upload.target.private)
