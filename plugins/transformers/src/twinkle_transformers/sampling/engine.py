"""Continuous batching for models that can run step by step; other models are sampled call by call.

Each step reads one token of every running sequence, together with chunks of prompts.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import Condition, RLock
from typing import Any

import torch
from torch import Tensor

from twinkle.data_format import SamplingParams
from twinkle.errors import ArgumentError, CapacityError, Unsupported
from twinkle.logging import get_logger
from twinkle_torch.numerics import Evidence
from twinkle_transformers.router_replay import RouterReplay
from twinkle_transformers.sampling.decode_loop import WholeCalls, broken_logits, more_logprobs
from twinkle_transformers.sampling.kv_cache import (
    BLOCK,
    KVCache,
    KVCacheManager,
    PrefixCache,
    SharedPrefix,
    default_budget,
    shared_prefix,
    usable,
)
from twinkle_transformers.sampling.logit_processing import processed
from twinkle_transformers.sampling.prefill import shared, whole
from twinkle_transformers.sampling.requests import CacheSlot, Prompt, Request, Running, SequenceState, Server, StopRule
from twinkle_transformers.sampling.runner import Piece, Read, Runner
from twinkle_transformers.sampling.sampling_ops import draw, log_probs, most_probable, noise_of, with_logprobs
from twinkle_transformers.sampling.sources import Pick, Source
from twinkle_transformers.segments import PatchWatch

Work = list[tuple[Request | Running, Piece]]
"""The pieces that a step reads, each with its request or running sample."""

_LOGIT_BYTES = 1 << 26  # most bytes of float32 logits that are sampled or scored at once
Row = tuple[Request, SequenceState]


class StepPlanner:
    """Plans and runs steps for the waiting and running requests; used by one thread at a time.

    A step reads in this order: admit waiting requests, give slots to samples with a first token, choose the tokens to
    read, run the model, sample the next tokens, release finished sequences. An interrupted step (such as by Ctrl-C) is
    repeated by the next one.

    Attributes:
        runner: the model.
        kv_manager: manager of the KV cache.
        prefixes: keys and values of earlier prompts.
        waiting: requests without a slot, in the order of their arrival.
    """

    def __init__(self, runner: Runner, kv_manager: KVCacheManager, prefixes: PrefixCache, prefill_tokens: int) -> None:
        """Create it without requests.

        Args:
            runner: the model.
            kv_manager: manager of the KV cache.
            prefixes: keys and values of earlier prompts.
            prefill_tokens: maximum number of prompt tokens that a step reads.
        """
        self.runner, self.kv_manager, self.prefixes = runner, kv_manager, prefixes
        self._prefill_tokens = prefill_tokens
        self.waiting: list[Request] = []
        self._passed_over: Request | None = None
        self._active: list[Request] = []
        self._running: list[Running] = []

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.waiting or self._active)

    def step(self) -> bool:
        """Run one step; False if there was nothing to do."""
        self.reap()
        before = len(self.waiting)
        self.kv_manager.expected = sum(request.params.num_samples for request in (*self._active, *self.waiting))
        try:
            self._admit()
            self._start_samples()
            work = self._plan()
            if work:
                self._run(work)
                self._admit()  # before finished prompts release the slots to copy from
        except (MemoryError, RuntimeError) as error:  # not enough memory to grow the KV cache
            self._fail_largest(error)
            return True
        self.reap()
        if not self._active and not self.waiting:
            self.kv_manager.release_memory()
        return bool(work) or before > len(self.waiting)

    def forget(self) -> None:
        """Make present keys and values unavailable to other prompts, because the base model has changed."""
        self.prefixes.clear()
        for request in self._active:
            request.stale = True

    def _admit(self) -> None:
        """Admit waiting requests in order of arrival, with one slot each.

        A request that shares a prefix with a prompt that is being read waits until that prefix can be copied. Its slot
        stays reserved, so that later requests cannot overtake it.
        """
        candidates: list[Request] = []
        for request in list(self.waiting):
            candidates.append(request)
            if not self.kv_manager.can_allocate(candidates):
                return
            # With row_multiple, results must not depend on neighbours, so nothing is copied from them.
            invariant = self.runner.row_multiple > 1
            prefix = SharedPrefix() if invariant else shared_prefix(request, self._active)
            if prefix.grows:
                continue
            candidates.pop()
            self.waiting.remove(request)
            self._active.append(request)
            request.slots.append(self.kv_manager.allocate(request))
            self._reuse_prefix(request, prefix)

    def _reuse_prefix(self, request: Request, prefix: SharedPrefix) -> None:
        """Copy the longest known prefix, from the slot of an active request or from the prefix cache."""
        blocks = self.prefixes.find(request.key, request.prompt.ids)[: usable(request) // BLOCK]
        tokens = max(prefix.tokens, len(blocks) * BLOCK)
        if not tokens:
            return
        self.kv_manager.ensure_capacity(tokens)
        slot = request.slots[0].index
        if prefix.source is not None and prefix.tokens == tokens:
            self.kv_manager.store.copy(prefix.source.slots[0].index, slot, tokens)
        else:
            for number, block in enumerate(blocks):
                self.kv_manager.store.put(slot, number * BLOCK, block.parts)
        request.read = request.known = tokens

    def _start_samples(self) -> None:
        """Give slots to samples that have a first token; waiting requests take precedence over second samples."""
        for request in self._active:
            while request.pending and (request.idle or self.kv_manager.can_allocate([*self.waiting, request])):
                if not request.idle:
                    self._copy_prompt(request)
                self._running.append(Running(request, request.pending.popleft(), request.idle.pop()))
            if not request.pending:
                for slot in request.idle:
                    self._free(request, slot)
                request.idle.clear()

    def _copy_prompt(self, request: Request) -> None:
        slot, length = self.kv_manager.allocate(request), len(request.prompt.ids)
        try:
            self.kv_manager.ensure_capacity(length)
            self.kv_manager.store.copy(request.slots[0].index, slot.index, length)
        except BaseException:
            self.kv_manager.free(slot)
            raise
        request.slots.append(slot)
        request.idle.append(slot)

    def _plan(self) -> Work:
        """Return the pieces of the next step: chunks of prompts within the budget, and one token per running sample.

        The budget bounds the latency of a step: a long prompt must not delay the next token of running samples.
        """
        readers = [request for request in self._active if request.reading]
        if self.runner.row_multiple > 1:  # results must not depend on neighbours
            counts = whole(readers, self._prefill_tokens, self._passed_over)
            self._passed_over = next((oldest for oldest in readers[:1] if not counts[oldest]), None)
        else:
            counts = shared(readers, self._prefill_tokens)
        prompts = [(request, request.read + count) for request, count in counts.items() if count]
        lengths = [*(stop for _, stop in prompts), *(running.length + 1 for running in self._running)]
        if not lengths:
            return []
        self.kv_manager.ensure_capacity(max(lengths))
        work: Work = [(r, Piece(r.slot.index, r.length, r.draft.tokens[-1:], r.request.version)) for r in self._running]
        for request, stop in prompts:
            ids = request.prompt.ids[request.read : stop]
            work.append((request, Piece(request.slots[0].index, request.read, ids, request.version)))
        return work

    def _run(self, work: Work) -> None:
        """Run a step; if it fails, run the pieces of each request separately, so that only the faulty request fails."""
        try:
            read = self.runner.read([piece for _, piece in work], self.kv_manager.store)
            self._process(work, read)
        except Exception as error:  # any error of the model becomes the error of a request
            by_request: dict[Request, Work] = {}
            for owner, piece in work:
                by_request.setdefault(owner.request if isinstance(owner, Running) else owner, []).append((owner, piece))
            if len(by_request) > 1:
                for own_work in by_request.values():
                    if remaining := [(o, p) for o, p in own_work if not _processed(o, p)]:
                        self._run(remaining)
            else:
                for request in by_request:
                    request.error = request.error or error

    def _process(self, work: Work, read: Read) -> None:
        """Score the prompt tokens that were read, and sample the next tokens."""
        rows: dict[int, Request | Running] = {}
        for (owner, piece), first in zip(work, read.stream.firsts, strict=True):
            past = first + len(piece.tokens)
            if isinstance(owner, Request):
                self._score(owner, piece, read, first)
                stop = piece.start + len(piece.tokens)
                if stop < len(owner.prompt.ids) or owner.prompt.max_new_tokens == 0:
                    owner.read = stop
                    continue
            rows[past - 1] = owner
        for chunk in self._chunks(sorted(rows)):
            logits = self.runner.logits(read, chunk)
            owners = [rows[row] for row in chunk]
            running = [(index, owner) for index, owner in enumerate(owners) if isinstance(owner, Running)]
            if running:
                own_logits = logits if len(running) == len(chunk) else logits[[index for index, _ in running]]
                choose(own_logits, [(owner.request, owner.draft) for _, owner in running])
            for index, owner in enumerate(owners):
                if isinstance(owner, Request):
                    self._draw_first(owner, logits[index : index + 1])

    def _score(self, request: Request, piece: Piece, read: Read, first: int) -> None:
        scores, begin = request.prompt.scores, first - piece.start
        rows = range(max(piece.start, scores.first) + begin, min(first + len(piece.tokens), scores.past + begin))
        for chunk in self._chunks(rows):
            logits = self.runner.logits(read, chunk)
            if not scores.write(chunk[0] - begin, logits, request.seed, request.prompt.row):
                request.error = request.error or broken_logits(request.prompt.row)

    def _draw_first(self, request: Request, logits: Tensor) -> None:
        """Sample the first token of every sample of a prompt that was read completely.

        All samples share the logits of the last prompt token, so the prompt is read once for the whole group.
        """
        drafts = [draft for draft in request.result.drafts if not draft.tokens]
        for chunk in self._chunks(range(len(drafts))):
            choose(logits, [(request, drafts[index]) for index in chunk])
        if request.error is None:
            self._cache_prefix(request, request.slots[0], request.prompt.ids)
            for draft in (draft for draft in drafts if draft.reason is not None):
                self._note_experts(request, draft, request.slots[0])
        request.pending.extend(draft for draft in request.result.drafts if draft.reason is None)
        request.idle.extend(request.slots)
        request.read = len(request.prompt.ids)

    def _chunks(self, rows: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield rows in parts whose logits stay below `_LOGIT_BYTES`."""
        size = max(1, _LOGIT_BYTES // (4 * self.runner.vocabulary))
        for first in range(0, len(rows), size):
            yield rows[first : first + size]

    # Completion

    def reap(self) -> None:
        """Release samples that ended, and requests that finished, failed or were cancelled."""
        for running in [r for r in self._running if r.draft.reason is not None or r.request.over]:
            self._running.remove(running)
            request = running.request
            if request.over:
                continue
            self._cache_prefix(request, running.slot, request.prompt.ids + running.draft.tokens[:-1])
            self._note_experts(request, running.draft, running.slot)
            if request.pending and (len(request.slots) == 1 or not self.waiting):
                request.idle.append(running.slot)
            else:
                self._free(request, running.slot)
        for requests in (self._active, self.waiting):
            for request in [r for r in requests if r.over or r.finished]:
                requests.remove(request)
                self._close(request)

    def _close(self, request: Request) -> None:
        for slot in list(request.slots):
            if request.over and slot.index < self.kv_manager.store.slots:
                self.kv_manager.store.clear(slot.index)
            self._free(request, slot)
        self.kv_manager.drop_reservation(request)
        for draft in request.result.drafts:
            draft.reason = draft.reason or ("length" if request.prompt.max_new_tokens == 0 else "abort")
        request.pending.clear()
        request.done = True

    def _cache_prefix(self, request: Request, slot: CacheSlot, tokens: list[int]) -> None:
        if not request.stale:
            self.prefixes.add(request.key, tokens, self.kv_manager.store, slot.index)

    def _note_experts(self, request: Request, draft: SequenceState, slot: CacheSlot) -> None:
        """Keep the experts of all tokens that were read of a finished sample: all but the last one."""
        tokens = len(request.prompt.ids) + len(draft.tokens) - 1
        draft.experts = self.runner.experts_of(self.kv_manager.store, slot.index, tokens)

    def _free(self, request: Request, slot: CacheSlot) -> None:
        request.slots.remove(slot)
        self.kv_manager.free(slot)

    def _fail_largest(self, error: Exception) -> None:
        largest = max(self._active, key=lambda request: request.most)
        largest.error = error
        self.reap()


def _processed(owner: Request | Running, piece: Piece) -> bool:
    """Return whether a failed step had already processed this piece, so that it must not be read again."""
    if isinstance(owner, Running):
        return owner.length > piece.start
    return owner.read > piece.start


class StepEngine:
    """Serves requests of any thread. There is no thread of its own: a thread that waits for a result runs the steps.

    Attributes:
        runner: the model.
        prefixes: keys and values of earlier prompts.
        kv_manager: manager of the KV cache.
    """

    def __init__(
        self,
        runner: Runner,
        store: KVCache,
        *,
        slots: int,
        budget: int,
        prefix_bytes: int,
        prefill_tokens: int = 512,
        ready: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Create it without requests.

        Args:
            runner: the model.
            store: the result of `runner.store()`.
            slots: maximum number of running sequences.
            budget: limit of the KV cache, in bytes.
            prefix_bytes: limit of the prefix cache, in bytes.
            prefill_tokens: maximum number of prompt tokens that a step reads.
            ready: returns the context in which the model runs.
        """
        self.runner, self.prefixes = runner, PrefixCache(prefix_bytes)
        self.kv_manager = KVCacheManager(store, budget, slots)
        self._batch = StepPlanner(runner, self.kv_manager, self.prefixes, prefill_tokens)
        self._ready = ready
        self._incoming: deque[Request] = deque()
        self._changed = Condition()
        self._driven = self._stale = False

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a sequence."""
        return self.kv_manager.budget // self.kv_manager.store.token_bytes

    @property
    def idle(self) -> bool:
        """Whether all requests are done."""
        return not self._incoming and not self._batch.busy

    def check(self, request: Request) -> None:
        """Refuse a request that can never be served.

        Raises:
            CapacityError: its keys and values do not fit into the KV cache.
            NonFiniteError: its adapter's weights are NaN or infinite.
        """
        manager = self.kv_manager
        token_bytes = manager.store.token_bytes
        if request.most > self.longest:
            raise CapacityError(
                f"row {request.prompt.row}: {request.most} tokens need {request.most * token_bytes / 2**20:.1f} MiB of "
                f"keys and values ({token_bytes} bytes per token), but the KV cache has "
                f"{manager.budget / 2**20:.1f} MiB, enough for {self.longest} tokens; "
                "lower max_tokens or increase cache_bytes"
            )
        if request.version is not None:
            request.version.check()

    def admit(self, request: Request) -> None:
        """Queue a checked request; a later call of `drive` or `step` serves it."""
        with self._changed:
            self._incoming.append(request)
            self._changed.notify_all()

    def cancel(self, request: Request) -> None:
        """Stop a request; it keeps its tokens, and its unfinished samples end with the reason "abort"."""
        request.cancelled = True
        with self._changed:
            if self._driven:
                return
            self._driven = True
        try:
            with self._ready():
                self._receive()
                self._batch.reap()
        finally:
            self._hand_over()

    def drive(self, until: Callable[[], bool]) -> None:
        """Run steps, or wait for another thread that does, until the condition holds."""
        while True:
            with self._changed:
                while self._driven and not until():
                    self._changed.wait()
                if until():
                    return
                self._driven = True
            try:
                with self._ready():
                    while not until():
                        self._receive()
                        if not self._batch.step():
                            raise RuntimeError("the engine has nothing to do, but a caller waits for a result")
                        with self._changed:
                            self._changed.notify_all()
            finally:
                self._hand_over()

    def step(self) -> bool:
        """Run one step unless another thread runs steps; False if there was nothing to do."""
        with self._changed:
            if self._driven:
                return True
            self._driven = True
        try:
            with self._ready():
                self._receive()
                return self._batch.step()
        finally:
            self._hand_over()

    def forget_prefixes(self) -> None:
        """Make present keys and values unavailable to other prompts, from the next step on."""
        with self._changed:
            self._stale = True

    def _receive(self) -> None:
        """Take over requests that other threads queued; only for the thread that runs steps."""
        if self._stale:
            self._stale = False
            self._batch.forget()
        while self._incoming:
            self._batch.waiting.append(self._incoming.popleft())

    def _hand_over(self) -> None:
        with self._changed:
            self._driven = False
            self._changed.notify_all()


def choose(logits: Tensor, rows: Sequence[Row]) -> None:
    """Sample the next token of each sequence; NaN in a row becomes the error of its request.

    Args:
        logits: `[n, V]`; a single row is used for all sequences.
        rows: the sequences with their requests.
    """
    changed = _processed_logits(logits, rows) if any(request.changes for request, _ in rows) else logits
    kinds: dict[tuple[float, ...], list[int]] = {}
    for index, (request, _) in enumerate(rows):
        kinds.setdefault(request.drawing, []).append(index)
    for indices in kinds.values():
        group = [rows[index] for index in indices]
        own = _rows_of(logits, indices)
        _choose_alike(own, own if changed is logits else _rows_of(changed, indices), group)


def _rows_of(logits: Tensor, indices: list[int]) -> Tensor:
    """Return the logits of some rows; a single row is those of all."""
    if len(logits) == 1:
        return logits.expand(len(indices), -1)
    return logits if len(indices) == len(logits) else logits[torch.tensor(indices, device=logits.device)]


def _processed_logits(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Return the logits to sample from; a grammar that fails is the error of its request."""
    try:
        return processed(logits, [(request.params, draft.prompt, draft) for request, draft in rows])
    except ArgumentError:
        for request, draft in rows:
            try:
                processed(logits[:1], [(request.params, draft.prompt, draft)])
            except ArgumentError as error:
                request.error = request.error or error
                draft.watch.grammar = None
        return processed(logits, [(request.params, draft.prompt, draft) for request, draft in rows])


def _choose_alike(raw: Tensor, logits: Tensor, rows: Sequence[Row]) -> None:
    params = rows[0][0].params
    if params.temperature == 0 and logits is raw:
        highest, tokens = raw.max(-1)
    else:
        highest = raw.amax(-1)
        positions = [noise_of(r.seed, d.row, d.sample, len(d.tokens)) for r, d in rows] if params.temperature else None
        noise = None if positions is None else torch.tensor(positions, dtype=torch.float64)
        tokens = draw(
            logits, noise, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
        )
    broken = highest.isnan().tolist()  # `max` and `amax` propagate NaN
    table = log_probs(raw, params.temperature) if params.logprobs or params.topk_logprobs else raw
    pairs = with_logprobs(table, tokens, params.logprobs) if params.logprobs else None
    best = most_probable(table, params.topk_logprobs) if params.topk_logprobs else None
    sampled, own = more_logprobs(logits, raw, tokens, params)
    for index, ((request, draft), token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
        if broken[index]:
            request.error = request.error or broken_logits(request.prompt.row)
            continue
        if pairs is not None:
            draft.logprobs.append(pairs[index])
        if best is not None:
            draft.topk.append(best[index])
        if sampled is not None:
            draft.sampled.append(sampled[index])
        if own is not None:
            draft.raw.append(own[index])
        try:
            draft.take(token)
        except Exception as error:  # a tokenizer error on the text of one request must not affect the others
            request.error = request.error or error


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an engine.

    Attributes:
        batch: maximum number of running sequences.
        cache_bytes: limit of the KV cache; None means a third of the memory that is free at the start.
        prefix_bytes: limit of the prefix cache; None means a quarter of `cache_bytes`.
        prefill_tokens: maximum number of prompt tokens that a step reads.
        row_multiple: the rows of a step are padded to a multiple of it.
    """

    batch: int
    cache_bytes: int | None = None
    prefix_bytes: int | None = None
    prefill_tokens: int = 512
    row_multiple: int = 1

    def __post_init__(self) -> None:
        for name, value, low in (
            ("max_batch_size", self.batch, 1),
            ("prefill_tokens", self.prefill_tokens, 1),
            ("cache_bytes", self.cache_bytes, 1),
            ("prefix_cache_bytes", self.prefix_bytes, 0),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
                raise ArgumentError(f"TorchSampler: {name} is {value!r}; it must be a whole number of at least {low}")


class SamplingService:
    """The sampling engines of a sampler: continuous batching, and a decode loop for other models and adapters.

    Attributes:
        source: the module and its adapters.
        whole: the decode loop, for requests that the engine cannot serve.
        gate: lock that prevents new requests.
    """

    def __init__(self, source: Source, limits: Limits, *, records_experts: bool = False) -> None:
        """Create the service; the model is measured at the first call.

        Args:
            source: the module and its adapters.
            limits: limits of the engine.
            records_experts: whether to record the experts that routers choose.
        """
        self.source, self._limits, self._records_experts = source, limits, records_experts
        self.whole = WholeCalls(lambda: source.base, source.ready, limits.batch, self._bytes)
        self._engine: StepEngine | None = None
        self._model: Any = None
        self._judged: Runner | None = None
        self._patches: PatchWatch | None = None
        self._lock = RLock()
        self.gate = RLock()

    @property
    def engine(self) -> StepEngine | None:
        """The engine; None, with one message in the log, if the model cannot run step by step.

        The engine is rebuilt if the model is replaced, or a patch of it is applied or undone.
        """
        with self._lock:
            model = self.source.base
            patched = self._patches is None or self._patches.changed()
            if model is not self._model or patched:
                self._patches = PatchWatch(model)
                self._engine, self._model = self._build(model), model
            return self._engine

    @property
    def evidence(self) -> Evidence | None:
        """The measurement of steps of the present model; None before."""
        return None if self._judged is None else self._judged.evidence

    @property
    def runner(self) -> Runner | None:
        """The engine's runner."""
        engine = self.engine
        return None if engine is None else engine.runner

    def rebuild(self) -> None:
        """Inspect and measure the model again, after its code has changed."""
        with self._lock:
            self._model = None

    def submit(
        self, prompts: Sequence[Prompt], params: SamplingParams, stop: StopRule, seed: int | Sequence[int],
        picks: Sequence[Pick], cache_salt: str | None = None,
    ) -> list[tuple[Request, Server]]:  # fmt: skip
        """Submit the prompts of a call; returns the request of each prompt and the server that runs it.

        Args:
            prompts: prompts of the call.
            params: sampling parameters.
            stop: rule that ends a sample.
            seed: seed of the noise.
            picks: the adapter of each prompt.
            cache_salt: only requests with equal salts share keys and values.

        Raises:
            CapacityError: the keys and values of a prompt do not fit into the KV cache.
            NonFiniteError: an adapter's weights are NaN or infinite.
        """
        engine = self.engine
        if engine is not None and engine.runner.changed():
            engine.forget_prefixes()
        requests = [
            Request(prompt, params, stop, seed, chosen.version, cache_salt)
            for prompt, chosen in zip(prompts, picks, strict=True)
        ]
        for request, chosen in zip(requests, picks, strict=True):
            if engine is not None and not chosen.whole:
                engine.check(request)
            elif self._records_experts:
                reason = self.evidence.reason if engine is None and self.evidence else "its adapter cannot"
                raise Unsupported(
                    f"enable_return_routed_experts: {type(self.source.base).__name__} is not sampled step by step "
                    f"({reason}), and experts are recorded only so; record them with forward_only of the trainer"
                )
        served: list[tuple[Request, Server]] = []
        for request, chosen in zip(requests, picks, strict=True):
            if engine is None or chosen.whole:
                self.whole.admit(request, chosen.peft)
                served.append((request, self.whole))
            else:
                engine.admit(request)
                served.append((request, engine))
        return served

    def step(self) -> bool:
        """Run one step for all requests, without waiting for another thread; False if there was nothing to do."""
        engine = self._engine
        return (engine is not None and engine.step()) or self.whole.step()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Finish all running requests, and admit none for the duration of the block."""
        with self.gate:
            if (engine := self._engine) is not None:
                engine.drive(lambda: engine.idle)
            self.whole.drive(lambda: self.whole.idle)
            with self.source.alone():
                yield

    def _build(self, model: Any) -> StepEngine | None:
        routers = RouterReplay.of(model) if self._records_experts else None
        runner = Runner(model, row_multiple=self._limits.row_multiple, backbone=self.source.backbone, routers=routers)
        self._judged = runner
        try:
            with self.source.stepping():
                store = runner.store()
        except Unsupported as error:
            get_logger().info(
                "%s cannot be sampled step by step (%s); each call runs alone with transformers' own cache, which is "
                "slower",
                type(model).__name__,
                error,
            )
            return None
        limits, budget = self._limits, self._bytes()
        return StepEngine(
            runner,
            store,
            slots=limits.batch,
            budget=budget,
            prefix_bytes=budget // 4 if limits.prefix_bytes is None else limits.prefix_bytes,
            prefill_tokens=limits.prefill_tokens,
            ready=self.source.stepping,
        )

    def _bytes(self) -> int:
        """Return the limit of the KV cache, in bytes."""
        if self._limits.cache_bytes is not None:
            return self._limits.cache_bytes
        device: torch.device = self.source.base.get_input_embeddings().weight.device
        return default_budget(device)
