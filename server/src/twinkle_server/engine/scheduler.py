"""Scheduling in the engine: which operations share a turn, how large a pass is, and when a decode step is due.

Sampling requests are decoded together and admitted fairly; those that ran in a crash run alone (`Sampling`).
"""

import hashlib
import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from twinkle.errors import EngineFault
from twinkle_server.engine import messages
from twinkle_server.engine.errors import NotInMemory, failed
from twinkle_server.engine.executor import Executor
from twinkle_server.engine.messages import Message
from twinkle_server.engine.queues import GENERATE, Task, TaskQueues, done
from twinkle_server.engine.samples import Sampled
from twinkle_server.operations import Generate, Sample

STEPS = 16
"""Maximum number of models in a fused optimizer step."""
_LARGEST = 2**20
_ROUNDING = 1e-6  # tokens; quanta are fractions
_COUNTERS = 4096  # tenants


class Alternation:
    """Divides time between training and sampling when both have work.

    Each gets half of the time, but a decode step waits at most `seconds`, whatever the steps before it took.

    Args:
        seconds: maximum time that a decode step waits for training.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._balance = 0.0
        self._waited = 0.0  # since the last decode step
        self._last = 0.0  # duration of the last training turn, used to predict the next

    def decodes(self, training: bool, sampling: bool) -> bool:
        """Return whether a decode step, not training, is next; at least one of them has work."""
        if not (training and sampling):
            self._balance = self._waited = 0.0
            return sampling
        return self._balance >= 0.0 or (self._waited > 0.0 and self._waited + self._last > self._seconds)

    def took(self, seconds: float, decoding: bool) -> None:
        """Record the duration of a decode step or a training turn."""
        if decoding:
            self._balance = max(-self._seconds, self._balance - seconds)  # a larger deficit is forgiven
            self._waited = 0.0
        else:
            self._balance += seconds
            self._waited += seconds
            self._last = seconds


class Weights:
    """The share of each tenant in the computed tokens; the others' weight is 1."""

    def __init__(self) -> None:
        self._weights: Mapping[str, float] = {}

    def put(self, weights: Mapping[str, float]) -> None:
        """Set the weights of all tenants that have one."""
        self._weights = dict(weights)

    def __getitem__(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)


class DeficitRoundRobin:
    """Fills passes so that tenants with more work than fits get tokens in proportion to their weights.

    Each round gives every tenant a quantum of tokens in proportion to its weight; what it cannot spend yet is kept for
    the next pass, and what it does not need is dropped (Shreedhar and Varghese, 1995). Whatever the passes, two tenants
    that always have work differ in tokens divided by weight by at most two quanta and one operation.

    Args:
        weights: of the tenants.
    """

    def __init__(self, weights: Weights | None = None) -> None:
        self._weights = weights or Weights()
        self._deficits: dict[str, float] = {}
        self._interrupted: str | None = None  # has its quantum of this round, and tasks that did not fit into the pass

    def fill(self, queues: Mapping[str, "TenantQueue"], budget: int) -> list[Task]:
        """Take tasks from non-empty queues; an operation above the budget is taken alone."""
        self._keep_only(queues)
        if next(iter(self._deficits)) != self._interrupted:
            self._interrupted = None
        total = sum(self._weights[tenant] for tenant in queues)
        quanta = {tenant: budget * self._weights[tenant] / total for tenant in queues}
        selected: list[Task] = []
        left = budget
        waiting = {tenant: queues[tenant] for tenant in self._deficits}
        while waiting:
            moved = False
            for tenant, queue in list(waiting.items()):
                if tenant != self._interrupted:
                    self._deficits[tenant] += quanta[tenant]
                self._interrupted = None
                while queue and queue.next.tokens <= self._deficits[tenant] + _ROUNDING:
                    if selected and queue.next.tokens > left:
                        self._start_next_with(tenant)
                        return selected
                    task = queue.take()
                    selected.append(task)
                    self._deficits[tenant] -= task.tokens
                    left -= task.tokens
                    moved = True
                if not queue:
                    del waiting[tenant], self._deficits[tenant]
            if selected and all(queue.next.tokens > left for queue in waiting.values()):
                break
            if not moved:
                self._skip_rounds(waiting, quanta)
        return selected

    def _keep_only(self, queues: Mapping[str, "TenantQueue"]) -> None:
        kept = {tenant: deficit for tenant, deficit in self._deficits.items() if tenant in queues}
        self._deficits = kept | {tenant: 0.0 for tenant in queues if tenant not in kept}

    def _start_next_with(self, tenant: str) -> None:
        """Continue the round in the next pass, with a tenant whose task did not fit into this one."""
        self._interrupted = tenant
        tenants = list(self._deficits)
        place = tenants.index(tenant)
        self._deficits = {name: self._deficits[name] for name in tenants[place:] + tenants[:place]}

    def _skip_rounds(self, waiting: Mapping[str, "TenantQueue"], quanta: Mapping[str, float]) -> None:
        """Skip rounds in which no tenant could take a task."""
        lacking = ((queue.next.tokens - self._deficits[name]) / quanta[name] for name, queue in waiting.items())
        rounds = max(0, math.ceil(min(lacking) - _ROUNDING) - 1)
        for name in waiting:
            self._deficits[name] += rounds * quanta[name]


class TenantQueue:
    """The tasks of a tenant that may share the next pass: its queues in turn, each in order."""

    def __init__(self) -> None:
        self._queues: list[tuple[int, int, Task, Iterator[Task]]] = []

    def add(self, tasks: Iterator[Task]) -> None:
        """Add a non-empty queue."""
        task = next(tasks)
        heapq.heappush(self._queues, (0, task.order, task, tasks))

    @property
    def next(self) -> Task:
        """The task that `take` returns."""
        return self._queues[0][2]

    def take(self) -> Task:
        """Remove a task; the queue with the fewest tokens taken is next."""
        taken, _, task, rest = self._queues[0]
        following = next(rest, None)
        if following is None:
            heapq.heappop(self._queues)
        else:
            heapq.heapreplace(self._queues, (taken + task.tokens, following.order, following, rest))
        return task

    def __bool__(self) -> bool:
        return bool(self._queues)


class Scheduler:
    """Selects the tasks of the next turn.

    A round is one unshared task per tenant, one step per queue, and one pass.

    Args:
        queues: the waiting tasks.
        weights: of the tenants.
    """

    def __init__(self, queues: TaskQueues, weights: Weights | None = None) -> None:
        self._queues = queues
        self._passes = DeficitRoundRobin(weights)
        self._served: set[str] = set()
        self._stepped: set[str] = set()
        self._repeated = False  # the last turn repeated recorded passes

    def next(self, budget: int, steps: int = STEPS) -> list[Task]:
        """Take the tasks of the next turn out of the queues; empty if none can run.

        They are passes, in the order of each queue; or optimizer steps, one per queue; or a single task.

        Args:
            budget: maximum number of tokens of the passes together.
            steps: maximum number of optimizer steps.
        """
        heads = list(self._queues.heads())
        for _ in range(2):
            if tasks := self._alone(heads) or self._steps(heads, steps):
                return tasks
            tasks = self._pass(heads, budget)
            self._served.clear()
            self._stepped.clear()
            if tasks:
                return tasks
        return []

    def _alone(self, heads: list[Task]) -> list[Task]:
        """Return the oldest task that must run alone, of a tenant without such a task in this round."""
        candidates = (task for task in heads if not task.fuses and not task.steps and task.tenant not in self._served)
        oldest = min(candidates, key=lambda task: task.order, default=None)
        if oldest is None:
            return []
        self._served.add(oldest.tenant)
        return [self._queues.take(oldest)]

    def _steps(self, heads: list[Task], most: int) -> list[Task]:
        steps = [task for task in heads if task.steps and task.queue_id not in self._stepped][:most]
        self._stepped.update(task.queue_id for task in steps)
        return [self._queues.take(task) for task in steps]

    def _pass(self, heads: list[Task], budget: int) -> list[Task]:
        queues: dict[str, TenantQueue] = {}
        for task in heads:
            if task.fuses and task.first_pass is None:
                queues.setdefault(task.tenant, TenantQueue()).add(self._queues.run_up(task.queue_id))
        again = [] if self._repeated and queues else _earliest(heads)
        self._repeated = bool(again)
        selected = again or (self._passes.fill(queues, budget) if queues else [])
        return [self._queues.take(task) for task in selected]


def _earliest(heads: list[Task]) -> list[Task]:
    """Return the tasks that share the earliest recorded pass."""
    recorded = [task for task in heads if task.fuses and task.first_pass is not None]
    earliest = min((task.first_pass for task in recorded if task.first_pass is not None), default=None)
    return [task for task in recorded if task.first_pass == earliest]


class TokenCounters:
    """Counts the tokens that sampling has computed for each tenant, divided by its weight.

    The next request is of the tenant with the lowest counter. A tenant that comes back starts no lower than the lowest
    of those who are there: nobody saves up a claim (virtual token counters; Sheng et al., OSDI 2024).

    Args:
        weights: of the tenants.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._counters: dict[str, float] = {}

    def __getitem__(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def enter(self, tenant: str, advances: Mapping[str, int]) -> None:
        """Begin to count a tenant that had no request.

        Args:
            tenant: the tenant.
            advances: of the tenants that have requests: tokens that were charged and are not yet computed.
        """
        if not advances:
            self._counters.clear()
            return
        lowest = min(self[other] - tokens / self._weights[other] for other, tokens in advances.items())
        self._counters[tenant] = max(self[tenant], lowest)
        if len(self._counters) > _COUNTERS:  # those below the lowest are equal to new ones
            kept = {name: value for name, value in self._counters.items() if name in advances or value > lowest}
            self._counters = kept | {tenant: self._counters[tenant]}

    def charge(self, tenant: str, tokens: int) -> None:
        """Count tokens; a negative number returns what was charged in advance."""
        self._counters[tenant] = self[tenant] + tokens / self._weights[tenant]


TOGETHER = 256
"""Maximum number of sequences sampled at once. The next request is of the tenant with the fewest tokens."""
EXPECTED = 64
"""Tokens of a sequence that are charged in advance; its length is known only at its end."""


def cache_salt(tenant: str) -> str:
    """Return what keeps the cached prompts of a tenant apart from those of others, without its name."""
    return hashlib.blake2b(tenant.encode(), digest_size=16, person=b"cache_salt").hexdigest()


class Sampling:
    """The sampling requests that wait or run.

    Args:
        executor: decodes.
        source: returns the verified folder of a checkpoint.
        report: sends messages to the service.
        weights: of the tenants.
        rebuilding: returns whether a model does not have all its acknowledged operations yet; requests that use its
            present weights wait.
        broken: returns whether the state of a model is unusable, because an operation could not be replayed.

    Attributes:
        begins: called with a request just before it is submitted to the engine, which takes memory.
    """

    def __init__(
        self,
        executor: Executor,
        source: Callable[[str | None], Path | None],
        report: Callable[[Message], None],
        weights: Weights | None = None,
        rebuilding: Callable[[str], bool] = lambda queue_id: False,
        broken: Callable[[str], bool] = lambda queue_id: False,
    ) -> None:
        self._broken = broken
        self.begins: Callable[[int], None] = lambda operation: None
        self._executor, self._source, self._report, self._rebuilding = executor, source, report, rebuilding
        self._waiting: dict[str, dict[int, Task]] = {}  # by tenant and id, in order
        self._counters = TokenCounters(weights or Weights())
        self._sequences: Counter[str] = Counter()  # running, by tenant
        self._charges: dict[int, _Charge] = {}  # by running request
        self.running: dict[int, Task] = {}

    def __len__(self) -> int:
        return len(self.running) + sum(len(tasks) for tasks in self._waiting.values())

    def add(self, task: Task) -> None:
        """Add a request; `admit` starts it when the limit allows."""
        if task.tenant not in self._waiting and task.tenant not in self._sequences:
            self._counters.enter(task.tenant, self._advances())
        self._waiting.setdefault(task.tenant, {})[task.id] = task

    def cancel(self, operation: int) -> bool:
        """Cancel a request, waiting or running; return False if there is none."""
        if operation in self.running:
            self._leave(operation)
            self._executor.cancel(operation)
            return True
        for tenant, tasks in self._waiting.items():
            if operation in tasks:
                self._unqueue(tenant, operation)
                return True
        return False

    def admit(self) -> None:
        """Submit waiting requests; a request that must run alone waits for all others, and they wait for it."""
        while (task := self._next()) is not None:
            self._unqueue(task.tenant, task.id)
            try:
                request = _parse(task)
                if task.kind == GENERATE and self._broken(task.queue_id):
                    raise NotInMemory(task.queue_id)
                self.begins(task.id)
                source = self._source(request.source)
                if isinstance(request, Generate):
                    self._executor.generate(task.id, request, source, cache_salt(task.tenant))
                else:
                    self._executor.sample(task.id, request, source, cache_salt(task.tenant))
            except EngineFault:
                raise
            except Exception as error:
                self._report(failed(task, error))
                continue
            self.running[task.id] = task
            charge = self._charges[task.id] = _Charge.of(request)
            self._sequences[task.tenant] += charge.sequences
            self._counters.charge(task.tenant, len(request.tokens) + charge.output)

    def decode(self) -> int:
        """Run one decode step, report the requests that ended, and return the number of their tokens."""
        try:
            ended = self._executor.decode()
        except EngineFault:
            raise
        except Exception as error:
            self._one_by_one(error)
            return 0
        entries = self._executor.streamed()
        if entries:
            self._report(Message(messages.TOKENS, {}, orjson.dumps(entries)))
        for key, _, end in entries:
            if end is not None:
                self._leave(key)
        for sampled in ended:
            self._finish(sampled)
        for number, charge in self._charges.items():
            if more := charge.step():
                self._counters.charge(self.running[number].tenant, more)
        streamed = sum(len(part[1]) for _, parts, _ in entries for part in parts)
        return streamed + sum(sampled.tokens for sampled in ended)

    def _advances(self) -> dict[str, int]:
        """Return, for each tenant with requests, the tokens that were charged and are not yet computed."""
        advances = dict.fromkeys([*self._waiting, *self._sequences], 0)
        for number, charge in self._charges.items():
            advances[self.running[number].tenant] += max(0, charge.output - charge.computed)
        return advances

    def _next(self) -> Task | None:
        """Return the request to submit next; None if it must wait."""
        full = sum(self._sequences.values()) >= TOGETHER or any(task.alone for task in self.running.values())
        if full or not self._waiting:
            return None
        heads = (
            next((task for task in tasks.values() if self._may_begin(task)), None) for tasks in self._waiting.values()
        )
        ready = [task for task in heads if task is not None]
        task = min(ready, key=lambda head: (self._counters[head.tenant], head.order), default=None)
        return None if task is None or (task.alone and self.running) else task

    def _may_begin(self, task: Task) -> bool:
        return task.kind != GENERATE or not task.queue_id or not self._rebuilding(task.queue_id)

    def _finish(self, sampled: Sampled) -> None:
        if (task := self._leave(sampled.key, sampled.tokens)) is None:
            return
        if sampled.result is None:
            self._report(failed(task, sampled.error or RuntimeError("a request ended without a result")))
        else:
            self._report(done(task, sampled.result))

    def _leave(self, operation: int, tokens: int | None = None) -> Task | None:
        """Remove a running request; return what was charged beyond its tokens, if their number is known."""
        if (task := self.running.pop(operation, None)) is not None:
            charge = self._charges.pop(operation)
            self._counters.charge(task.tenant, (charge.computed if tokens is None else tokens) - charge.output)
            self._sequences[task.tenant] -= charge.sequences
            if not self._sequences[task.tenant]:
                del self._sequences[task.tenant]
        return task

    def _unqueue(self, tenant: str, operation: int) -> None:
        del self._waiting[tenant][operation]
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def _one_by_one(self, error: Exception) -> None:
        """Restart every request alone, to find the one that fails; streamed ones fail, their clients have tokens."""
        for task in [task for task in self.running.values() if task.kind == GENERATE]:
            self._leave(task.id)
            self._executor.cancel(task.id)
            self._report(failed(task, error))
        tasks = list(self.running.values())
        for task in reversed(tasks):
            self._leave(task.id)
            self._executor.cancel(task.id)
            if len(tasks) > 1:
                self._waiting[task.tenant] = {task.id: replace(task, alone=True)} | self._waiting.get(task.tenant, {})
        if len(tasks) == 1:
            self._report(failed(tasks[0], error))


@dataclass(slots=True)
class _Charge:
    """What a running request was charged.

    Attributes:
        sequences: their number.
        output: sampled tokens that were charged.
        steps: decode steps so far.
    """

    sequences: int
    output: int
    steps: int = 0

    @classmethod
    def of(cls, request: Sample | Generate) -> "_Charge":
        """Return the charge of a request that begins."""
        sequences = max(1, request.count)
        longest = EXPECTED if request.max_tokens is None else max(1, request.max_tokens)
        return cls(sequences, sequences * min(EXPECTED, longest))

    @property
    def computed(self) -> int:
        """Tokens of the decode steps so far."""
        return self.sequences * self.steps

    def step(self) -> int:
        """Count a decode step; return the tokens that must be charged in addition."""
        self.steps += 1
        more = max(0, self.computed - self.output)
        self.output += more
        return more


def _parse(task: Task) -> Sample | Generate:
    return Generate.parse(task.payload) if task.kind == GENERATE else Sample.parse(task.payload)


_REPORT_EVERY = 0.5  # seconds of decoding in one PASSED message


class TimeSharing:
    """Alternates training and sampling on one thread.

    Args:
        sampling: the requests.
        arrive: handles received sampling requests, and no other messages.
        report: sends a message to the service.
        seconds: maximum time that a decode step waits for training.
    """

    def __init__(
        self, sampling: Sampling, arrive: Callable[[], None], report: Callable[[Message], None], seconds: float
    ) -> None:
        self._sampling, self._arrive, self._report = sampling, arrive, report
        self._alternation = Alternation(seconds)
        self._decoding = 0.0  # total seconds
        self._accounted = 0.0  # time of `clock`
        self._running: frozenset[int] = frozenset()
        self._figures = _Figures()
        sampling.begins = self._begin_alone

    def clock(self) -> float:
        """Return the time in seconds without decode steps."""
        return time.perf_counter() - self._decoding

    def begin(self, ids: Collection[int]) -> None:
        """Report the running operations to the service if they changed; an empty collection means none."""
        if not self._running.issuperset(ids) or (self._running and not ids):
            self._running = frozenset(ids)
            self._report(Message(messages.BEGIN, {"ids": sorted(ids)}))

    def _begin_alone(self, operation: int) -> None:
        """Report a single running operation to the service."""
        if self._running != {operation}:
            self._running = frozenset((operation,))
            self._report(Message(messages.BEGIN, {"ids": [operation]}))

    def next_is_decoding(self, training: bool) -> bool:
        """Return whether a decode step is next; training or sampling has work."""
        return self._alternation.decodes(training, bool(self._sampling.running))

    def train(self, work: Callable[[], None]) -> None:
        """Run a piece of training."""
        self._accounted = self.clock()
        work()
        self._account()

    def between(self) -> None:
        """Run decode steps that are due in the middle of a pass."""
        self._account()
        before = self._running
        self._arrive()
        self._sampling.admit()
        while self._alternation.decodes(True, bool(self._sampling.running)):
            self.decode()
        self.begin(before)

    def decode(self) -> None:
        """Run one decode step."""
        running = self._sampling.running
        self.begin(running.keys())
        tenants, requests = len({task.tenant for task in running.values()}), len(running)
        begin = time.perf_counter()
        tokens = self._sampling.decode()
        seconds = time.perf_counter() - begin
        self._decoding += seconds
        self._alternation.took(seconds, decoding=True)
        if head := self._figures.add(seconds, tokens, tenants, requests, more=bool(running)):
            self._report(Message(messages.PASSED, head))

    def _account(self) -> None:
        now = self.clock()
        self._alternation.took(now - self._accounted, decoding=False)
        self._accounted = now


class _Figures:
    """Sums the figures of decode steps."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0

    def add(self, seconds: float, tokens: int, tenants: int, requests: int, more: bool) -> dict[str, Any] | None:
        """Add a step; return the sums when it is time to report them."""
        self._seconds += seconds
        self._tokens += tokens
        if more and self._seconds < _REPORT_EVERY:
            return None
        head = {"kind": "sample", "seconds": self._seconds, "tokens": self._tokens, "padded": 0, "flops": 0.0}
        self._seconds, self._tokens = 0.0, 0
        return head | {"tenants": tenants, "operations": requests}
