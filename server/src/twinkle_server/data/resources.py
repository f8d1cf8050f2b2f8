"""Data resources of tenants: their owners, sessions, numbered calls and lifetimes.

All methods run on the event loop; the work is done in processes, which threads wait for.
"""

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from twinkle_server.data.limits import DataLimits
from twinkle_server.data.rules import Rules
from twinkle_server.data.workers import DataWorker, DataWorkers, WorkerEnded
from twinkle_server.errors import Busy, Gone, NotFound, SequenceConflict, ServiceError, Unavailable, Unprocessable

_log = logging.getLogger(__name__)
_REMEMBERED: Final = 4096
_AGAIN: Final = "create it again"
T = TypeVar("T")


class CallFailed(Unprocessable):
    """A call raised an error."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True, eq=False)
class Family:
    """Resources that share a process: a data set and its loaders.

    Attributes:
        thread: waits for the process.
        lock: held during a call.
        worker: the process; None until the first resource is created.
        members: ids of the resources.
    """

    thread: ThreadPoolExecutor
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    worker: DataWorker | None = None
    members: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Resource:
    """A resource of a tenant.

    Attributes:
        id: cannot be guessed.
        tenant: its owner.
        session: with which it ends.
        kind: kind of its component.
        name: of its component.
        family: its process.
        used: time of the last call (monotonic seconds).
        number: of the last call.
        digest: of the last call.
        answer: its result, which a repetition of the request gets.
    """

    id: str
    tenant: str
    session: str
    kind: str
    name: str
    family: Family
    used: float
    number: int = 0
    digest: bytes = b""
    answer: "asyncio.Task[bytes] | None" = None

    @property
    def busy(self) -> bool:
        """Whether a call runs."""
        return self.answer is not None and not self.answer.done()


class DataResources:
    """The data resources of a service.

    Args:
        limits: of tenants and processes.
        rules: what requests may name.
        secret: of the service; marks its ids.
        is_active: whether a session of a tenant is active.
        clock: returns seconds.
    """

    def __init__(
        self,
        limits: DataLimits,
        rules: Rules,
        secret: bytes,
        is_active: Callable[[str, str], Awaitable[bool]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self._workers = DataWorkers(limits, rules)
        self._secret, self._is_active, self._clock = secret, is_active, clock
        self._resources: dict[str, Resource] = {}
        self._families: set[Family] = set()
        self._created: OrderedDict[tuple[str, str], asyncio.Task[Resource]] = OrderedDict()
        self._ends: OrderedDict[str, str] = OrderedDict()

    @property
    def processes(self) -> int:
        """Number of processes."""
        return len(self._families)

    # Requests

    async def create(
        self, tenant: str, session: str, kind: str, name: str, body: bytes, *, key: str, parent: str | None = None
    ) -> Resource:
        """Create a resource.

        Args:
            tenant: its owner.
            session: an active session of the tenant.
            kind: of the component.
            name: of the component.
            body: a frame with the arguments of its constructor.
            key: identifies the request; a repetition gets the same resource.
            parent: a resource whose process it shares.

        Raises:
            CallFailed: the component or an argument is not allowed, or the constructor failed.
            NotFound: the tenant has no such parent.
            Gone: the parent no longer exists, or the process ended.
            Busy: all processes are in use.
            Unprocessable: the tenant has too many resources.
        """
        task = self._created.get((tenant, key))
        if task is None:
            task = asyncio.create_task(self._create(tenant, session, kind, name, body, parent))
            self._created[tenant, key] = task
            task.add_done_callback(lambda done: self._forget_failed(tenant, key, done))
            while len(self._created) > _REMEMBERED:
                self._created.popitem(last=False)
        return await asyncio.shield(task)

    async def call(self, tenant: str, resource_id: str, method: str, number: int, body: bytes) -> bytes:
        """Call a method, and return the frame of its result.

        Args:
            tenant: the caller.
            resource_id: of the resource.
            method: of the component.
            number: of the call, from 1; the last number again returns the same result without another call.
            body: a frame with the arguments.

        Raises:
            NotFound: the tenant has no such resource.
            Gone: it no longer exists.
            SequenceConflict: the number is not the next one.
            CallFailed: the call raised an error.
            Busy: the previous call still runs.
        """
        resource = self._find(tenant, resource_id)
        resource.used = self._clock()
        digest = hashlib.sha256(method.encode() + b"\0" + body).digest()
        if number == resource.number and resource.answer is not None:
            if digest != resource.digest:
                raise SequenceConflict(f"call {number} of this resource was another one; number calls from 1")
            return await asyncio.shield(resource.answer)
        if number != resource.number + 1:
            raise SequenceConflict(
                f"the next call of this resource must have number {resource.number + 1}, got {number}"
            )
        if resource.busy:
            raise Busy("the previous call of this resource still runs")
        resource.number, resource.digest = number, digest
        resource.answer = asyncio.create_task(self._call(resource, method, body))
        resource.answer.add_done_callback(_retrieved)
        return await asyncio.shield(resource.answer)

    def of(self, tenant: str) -> list[Resource]:
        """Return the resources of a tenant, oldest first."""
        return [resource for resource in self._resources.values() if resource.tenant == tenant]

    def delete(self, tenant: str, resource_id: str) -> None:
        """Delete a resource; a second time does nothing.

        Raises:
            NotFound: the tenant never had such a resource.
        """
        try:
            self._end(self._find(tenant, resource_id), "it was deleted")
        except Gone:
            return

    # Lifetime

    async def sweep(self) -> None:
        """Remove resources that nobody uses, and those of ended sessions."""
        now = self._clock()
        for resource in list(self._resources.values()):
            if not resource.busy and now - resource.used > self.limits.idle:
                self._end(resource, f"it was not used for {self.limits.idle:g} s")
            elif not await self._is_active(resource.tenant, resource.session):
                self._end(resource, "its session has ended")

    async def close(self) -> None:
        """End all processes, also those in which a call runs."""
        for family in self._families:
            if family.worker is not None:
                family.worker.kill()
        await asyncio.to_thread(self._workers.close)
        for family in self._families:
            family.thread.shutdown(wait=False, cancel_futures=True)

    # Inside

    async def _create(
        self, tenant: str, session: str, kind: str, name: str, body: bytes, parent: str | None
    ) -> Resource:
        if not await self._is_active(tenant, session):
            raise Gone("the session does not exist or has ended; create a new one")
        if len(self.of(tenant)) >= self.limits.resources:
            held = len(self.of(tenant))
            raise Unprocessable(
                f"too many data resources: you have {held} (limit {self.limits.resources}); close some of them"
                if self.limits.resources
                else "this service does not offer data resources; load and encode the data yourself"
            )
        family = self._new_family() if parent is None else self._find(tenant, parent).family
        resource = Resource(self._new_id(tenant), tenant, session, kind, name, family, self._clock())
        self._resources[resource.id] = resource
        family.members.add(resource.id)
        try:
            await self._ask(
                resource, {"do": "create", "resource": resource.id, "kind": kind, "name": name, "body": body}
            )
        except BaseException:
            self._end(resource, "its creation failed")
            raise
        resource.used = self._clock()
        return resource

    async def _call(self, resource: Resource, method: str, body: bytes) -> bytes:
        answer = await self._ask(resource, {"do": "call", "resource": resource.id, "method": method, "body": body})
        resource.used = self._clock()
        return bytes(answer["body"])

    async def _ask(self, resource: Resource, request: dict[str, Any]) -> dict[str, Any]:
        family = resource.family
        async with family.lock:
            if resource.id not in self._resources:
                raise self._gone(resource.id)
            try:
                if family.worker is None:
                    family.worker = await self._on_thread(family, self._workers.fork)
                worker = family.worker
                answer = await self._on_thread(family, lambda: worker.ask(request))
            except WorkerEnded as error:
                _log.warning("data resource %s of %s: %s", resource.name, resource.tenant, error)
                family.worker = None
                for member in list(family.members):
                    self._end(self._resources[member], str(error))
                raise self._gone(resource.id) from error
        if "error" in answer:
            fields = answer["error"]
            if fields.get("log"):
                _log.warning("data resource %s raised:\n%s", resource.name, fields["log"])
            raise CallFailed(str(fields["text"]), str(fields["type"]))
        return answer

    async def _on_thread(self, family: Family, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(family.thread, work)
        except RuntimeError as error:
            raise Unavailable("the service is shutting down") from error

    def _new_family(self) -> Family:
        if len(self._families) >= self.limits.workers:
            raise Busy(f"all {self.limits.workers} processes for data of this service are in use", 5.0)
        family = Family(ThreadPoolExecutor(1, thread_name_prefix="data"))
        self._families.add(family)
        return family

    def _end(self, resource: Resource, reason: str) -> None:
        """Remove a resource, and the process with the last one."""
        if self._resources.pop(resource.id, None) is None:
            return
        self._ends[resource.id] = reason
        while len(self._ends) > _REMEMBERED:
            self._ends.popitem(last=False)
        family = resource.family
        family.members.discard(resource.id)
        if family.members:
            if family.worker is not None:
                family.thread.submit(_dropped, family.worker, resource.id)
            return
        self._families.discard(family)
        if family.worker is not None:
            family.worker.kill()  # a call may run, which then fails at once
            family.thread.submit(family.worker.end)
        family.thread.shutdown(wait=False)

    def _find(self, tenant: str, resource_id: str) -> Resource:
        resource = self._resources.get(resource_id)
        if resource is not None and resource.tenant == tenant:
            return resource
        expected = self._marked(tenant, resource_id[5:37])
        if not hmac.compare_digest(resource_id.encode("utf-8", "surrogatepass"), expected.encode()):
            raise NotFound(f"data resource {resource_id[:80]!r} does not exist")
        raise self._gone(resource_id)

    def _gone(self, resource_id: str) -> ServiceError:
        reason = self._ends.get(resource_id, "the service was restarted, or it was unused for long")
        return Gone(f"this data resource no longer exists: {reason}; {_AGAIN}")

    def _new_id(self, tenant: str) -> str:
        return self._marked(tenant, secrets.token_hex(16))

    def _marked(self, tenant: str, nonce: str) -> str:
        """Return the id of a tenant with 128 random bits; its mark shows later that it was the tenant's."""
        text = f"data {tenant} {nonce}".encode("utf-8", "surrogatepass")
        mark = hmac.new(self._secret, text, "sha256").hexdigest()
        return f"data-{nonce}{mark[:16]}"

    def _forget_failed(self, tenant: str, key: str, task: "asyncio.Task[Resource]") -> None:
        if task.cancelled() or task.exception() is not None:
            self._created.pop((tenant, key), None)


def _retrieved(task: "asyncio.Task[bytes]") -> None:
    """Mark the error of a call as seen: its request may be gone."""
    if not task.cancelled():
        task.exception()


def _dropped(worker: DataWorker, resource_id: str) -> None:
    try:
        worker.ask({"do": "drop", "resource": resource_id})
    except WorkerEnded:
        return  # noticed at the next call
