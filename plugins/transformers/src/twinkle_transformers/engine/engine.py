"""Continuous batching: each step reads one token of every running sequence, and pieces of prompts beside them."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from threading import Condition
from typing import Any

from torch import Tensor

from twinkle.errors import CapacityError
from twinkle_transformers.engine.choosing import choose, score
from twinkle_transformers.engine.prefixes import BLOCK, PrefixCache, shared_blocks
from twinkle_transformers.engine.requests import Place, Request, Running
from twinkle_transformers.engine.room import Room
from twinkle_transformers.engine.runner import Read, Runner
from twinkle_transformers.engine.store import Store
from twinkle_transformers.engine.stream import Piece

Work = list[tuple[Request | Running, Piece]]
"""What a step reads, and for whom."""

_LOGIT_BYTES = 1 << 26  # logits of one dtype that are drawn from or scored at once


class Engine:
    """Serves requests of any threads; whoever waits for one takes the steps.

    Attributes:
        runner: the model.
        prefixes: what was read of earlier prompts.
    """

    def __init__(
        self,
        runner: Runner,
        store: Store,
        *,
        slots: int,
        budget: int,
        prefix_bytes: int,
        prefill_tokens: int = 512,
        ready: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Begin without requests.

        Args:
            runner: the model.
            store: what `runner.store()` returned.
            slots: sequences that run at once.
            budget: bytes of keys and values.
            prefix_bytes: bytes that may be kept of prompts for later ones.
            prefill_tokens: tokens of prompts that a step reads at most.
            ready: the context in which the model runs.
        """
        self.runner, self.prefixes = runner, PrefixCache(prefix_bytes)
        self._room = Room(store, budget, slots)
        self._prefill_tokens, self._ready = prefill_tokens, ready
        self._incoming: deque[Request] = deque()
        self._waiting: list[Request] = []
        self._active: list[Request] = []
        self._running: list[Running] = []
        self._changed = Condition()
        self._driven = self._stale = False

    # From any thread

    @property
    def longest(self) -> int:
        """Tokens that one sequence may have."""
        return self._room.budget // self._room.store.token_bytes

    def check(self, request: Request) -> None:
        """Refuse what could never be served.

        Raises:
            CapacityError: its keys and values could never fit.
            NonFiniteError: its adapter's weights are NaN or infinite.
        """
        room = self._room
        token_bytes = room.store.token_bytes
        if request.most > self.longest:
            raise CapacityError(
                f"row {request.prompt.row}: {request.most} tokens need {request.most * token_bytes / 2**20:.1f} MiB of "
                f"keys and values ({token_bytes} bytes a token), and the sampler has {room.budget / 2**20:.1f} MiB, "
                f"room for {self.longest}; ask for fewer (max_tokens), or give it more (cache_bytes)"
            )
        if request.version is not None:
            request.version.check()

    def admit(self, request: Request) -> None:
        """Take a request that was checked; somebody has to `drive`."""
        with self._changed:
            self._incoming.append(request)
            self._changed.notify_all()

    def cancel(self, request: Request) -> None:
        """Stop a request; what it has stays, its other samples end with the reason "abort"."""
        request.cancelled = True
        with self._changed:
            if self._driven:
                return
            self._driven = True
        try:
            with self._ready():
                while self._incoming:
                    self._waiting.append(self._incoming.popleft())
                self._reap()
        finally:
            self._hand_over()

    def drive(self, until: Callable[[], bool]) -> None:
        """Take steps, or wait for those of another thread, until something is so."""
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
                        if not self.step():
                            raise RuntimeError("the engine has nothing to do although somebody waits")
                        with self._changed:
                            self._changed.notify_all()
            finally:
                self._hand_over()

    def forget_prefixes(self) -> None:
        """Forget what was read of earlier prompts, between two steps."""
        with self._changed:
            self._stale = True

    def _hand_over(self) -> None:
        with self._changed:
            self._driven = False
            self._changed.notify_all()

    # Steps

    def step(self) -> bool:
        """Take one step; False if there was nothing to do."""
        if self._stale:
            self._stale = False
            self.prefixes.clear()
        while self._incoming:
            self._waiting.append(self._incoming.popleft())
        self._reap()
        before = len(self._waiting)
        try:
            self._begin()
            self._start()
            work = self._plan()
        except (MemoryError, RuntimeError) as error:  # no memory for a larger store
            self._give_up(error)
            return True
        if work:
            self._serve(work)
            self._reap()
        if not self._active and not self._waiting:
            self._room.release()
        return bool(work) or before > len(self._waiting)

    def _begin(self) -> None:
        """Give waiting requests a slot each, in their order."""
        for request in list(self._waiting):
            if not self._room.fits(request):
                return
            if self._comes(request):
                continue
            self._waiting.remove(request)
            self._active.append(request)
            request.places.append(self._room.take(request))
            if not request.scored:
                self._recall(request)

    def _recall(self, request: Request) -> None:
        """Begin with what is known of an earlier prompt."""
        blocks = self.prefixes.find(_key(request), request.prompt.ids)
        if blocks:
            self._room.prepare(len(blocks) * BLOCK)
            for number, block in enumerate(blocks):
                self._room.store.put(request.places[0].slot, number * BLOCK, block.parts)
            request.read = len(blocks) * BLOCK

    def _comes(self, request: Request) -> bool:
        """Say whether a prompt that is being read will leave more of this one's beginning than is known now."""
        if request.scored or not self.prefixes.limit:
            return False
        alike = [r.prompt.ids for r in self._active if r.reading and _key(r) == _key(request)]
        shared = max((shared_blocks(request.prompt.ids, ids) for ids in alike), default=0)
        return shared > 0 and shared > len(self.prefixes.find(_key(request), request.prompt.ids))

    def _start(self) -> None:
        """Give samples that have a first token their slots; a request that waits comes before a second sample."""
        for request in self._active:
            while request.pending and (request.idle or (not self._waiting and self._room.fits(request))):
                if not request.idle:
                    self._copy_prompt(request)
                self._running.append(Running(request, request.pending.popleft(), request.idle.pop()))
            if not request.pending:
                for place in request.idle:
                    self._leave(request, place)
                request.idle.clear()

    def _copy_prompt(self, request: Request) -> None:
        place = self._room.take(request)
        request.places.append(place)
        self._room.prepare(len(request.prompt.ids))
        self._room.store.copy(request.places[0].slot, place.slot, len(request.prompt.ids))
        request.idle.append(place)

    def _plan(self) -> Work:
        """Return what the next step reads, and for whom."""
        left = self._prefill_tokens
        parts = []
        for request in self._active:
            if request.reading and left:
                stop = min(len(request.prompt.ids), request.read + left)
                left -= stop - request.read
                parts.append((request, stop))
        lengths = [*(stop for _, stop in parts), *(running.length + 1 for running in self._running)]
        if not lengths:
            return []
        self._room.prepare(max(lengths))
        work: Work = [(r, Piece(r.place.slot, r.length, r.draft.tokens[-1:], r.request.version)) for r in self._running]
        for request, stop in parts:
            ids = request.prompt.ids[request.read : stop]
            work.append((request, Piece(request.places[0].slot, request.read, ids, request.version)))
        return work

    def _serve(self, work: Work) -> None:
        """Run a step; if it fails, run each request's part alone, so that only one that fails there fails."""
        try:
            read = self.runner.read([piece for _, piece in work], self._room.store)
            self._take(work, read)
        except Exception as error:  # whatever the model raises is the answer to somebody's request
            mine: dict[Request, Work] = {}
            for owner, piece in work:
                mine.setdefault(owner.request if isinstance(owner, Running) else owner, []).append((owner, piece))
            if len(mine) > 1:
                for part in mine.values():
                    if left := [(o, p) for o, p in part if not _taken(o, p)]:
                        self._serve(left)
            else:
                for request in mine:
                    request.error = request.error or error

    def _take(self, work: Work, read: Read) -> None:
        """Score what was read, and draw what comes next."""
        rows: dict[int, Request | Running] = {}
        for (owner, piece), first in zip(work, read.stream.firsts, strict=True):
            past = first + len(piece.tokens)
            if isinstance(owner, Request):
                if owner.scored:
                    self._score(owner, piece, read, first)
                stop = piece.start + len(piece.tokens)
                if stop < len(owner.prompt.ids) or owner.prompt.room == 0:
                    owner.read = stop
                    continue
            rows[past - 1] = owner
        for part in self._portions(sorted(rows)):
            logits = self.runner.logits(read, part)
            owners = [rows[row] for row in part]
            going = [(index, owner) for index, owner in enumerate(owners) if isinstance(owner, Running)]
            if going:
                mine = logits if len(going) == len(part) else logits[[index for index, _ in going]]
                choose(mine, [(owner.request, owner.draft) for _, owner in going])
            for index, owner in enumerate(owners):
                if isinstance(owner, Request):
                    self._draw_first(owner, logits[index : index + 1])

    def _score(self, request: Request, piece: Piece, read: Read, first: int) -> None:
        for part in self._portions(range(first, first + len(piece.tokens))):
            score(request, piece.start + part[0] - first, self.runner.logits(read, part))

    def _draw_first(self, request: Request, logits: Tensor) -> None:
        """Draw the first token of every sample of a prompt that was read to its end."""
        drafts = [draft for draft in request.result.drafts if not draft.tokens]
        for part in self._portions(range(len(drafts))):
            choose(logits, [(request, drafts[index]) for index in part])
        if request.error is None:
            self._keep(request, request.places[0], request.prompt.ids)
        request.pending.extend(draft for draft in request.result.drafts if draft.reason is None)
        request.idle.extend(request.places)
        request.read = len(request.prompt.ids)

    def _portions(self, rows: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield rows in parts whose logits are not too large together."""
        size = max(1, _LOGIT_BYTES // (4 * self.runner.vocabulary))
        for first in range(0, len(rows), size):
            yield rows[first : first + size]

    # Ends

    def _reap(self) -> None:
        """Let go of samples that ended, and of requests that failed, are finished, or are not wanted any more."""
        for running in [r for r in self._running if r.draft.reason is not None or _over(r.request)]:
            self._running.remove(running)
            request = running.request
            if _over(request):
                continue
            self._keep(request, running.place, request.prompt.ids + running.draft.tokens[:-1])
            if request.pending and (len(request.places) == 1 or not self._waiting):
                request.idle.append(running.place)
            else:
                self._leave(request, running.place)
        for requests in (self._active, self._waiting):
            for request in [r for r in requests if _over(r) or _finished(r)]:
                requests.remove(request)
                self._close(request)

    def _close(self, request: Request) -> None:
        for place in list(request.places):
            if _over(request) and place.slot < self._room.store.slots:
                self._room.store.clear(place.slot)
            self._leave(request, place)
        self._room.forget(request)
        for draft in request.result.drafts:
            draft.reason = draft.reason or ("length" if request.prompt.room == 0 else "abort")
        request.pending.clear()
        request.done = True

    def _keep(self, request: Request, place: Place, tokens: list[int]) -> None:
        self.prefixes.add(_key(request), tokens, self._room.store, place.slot)

    def _leave(self, request: Request, place: Place) -> None:
        request.places.remove(place)
        self._room.leave(place)

    def _give_up(self, error: Exception) -> None:
        largest = max(self._active, key=lambda request: request.most)
        largest.error = error
        self._reap()


def _key(request: Request) -> str:
    return "" if request.version is None else request.version.key


def _over(request: Request) -> bool:
    return request.cancelled or request.error is not None


def _finished(request: Request) -> bool:
    if request.prompt.room == 0:
        return not request.reading
    return all(draft.reason is not None for draft in request.result.drafts)


def _taken(owner: Request | Running, piece: Piece) -> bool:
    """Say whether a step that failed had come so far that this piece is not to be read again."""
    if isinstance(owner, Running):
        return owner.length > piece.start
    return owner.read > piece.start
