"""Serves the requests of models that cannot run step by step: each call's rows together, to their end."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from threading import RLock
from typing import Any

from torch import nn

from twinkle.errors import CapacityError
from twinkle_torch.segments import Segments
from twinkle_transformers.cached import CachedModel, SequenceBytes, Within
from twinkle_transformers.generation import Prompt, generate, scoring_bytes
from twinkle_transformers.lowrank.products import Routing
from twinkle_transformers.sampling.requests import Request
from twinkle_transformers.sampling.runner import Runner
from twinkle_transformers.segments import Scope
from twinkle_transformers.sites import install
from twinkle_transformers.versions import AdapterVersion

Ready = Callable[[str | None], AbstractContextManager[nn.Module]]


class WholeCalls:
    """The slower path: a decode loop with the cache of transformers; what arrives meanwhile waits."""

    def __init__(
        self, base: Callable[[], Any], ready: Ready, max_batch_size: int, budget: Callable[[], int]
    ) -> None:  # fmt: skip
        """Begin without requests.

        Args:
            base: returns the Hugging Face model.
            ready: gives the module to call with an adapter of PEFT's chosen.
            max_batch_size: sequences decoded at once, as far as memory allows.
            budget: returns the bytes that a call may take.
        """
        self._base, self._ready, self._most, self._budget = base, ready, max_batch_size, budget
        self._bytes: tuple[Any, SequenceBytes] | None = None
        self._waiting: list[tuple[Request, str | None]] = []
        self._known: Runner | None = None
        self._lock = RLock()

    @property
    def idle(self) -> bool:
        """Whether no request waits."""
        return not self._waiting

    def admit(self, request: Request, adapter: str | None) -> None:
        """Take a request; somebody has to `drive`.

        Args:
            request: those of one call have the same parameters, stop rule and seed.
            adapter: PEFT's name of it, "" for the base model, None for what is active.
        """
        self._waiting.append((request, adapter))

    def cancel(self, request: Request) -> None:
        """Stop a request that has not begun; one that runs, runs to its end."""
        with self._lock:
            if not request.done:
                self._waiting = [pair for pair in self._waiting if pair[0] is not request]
                for draft in request.result.drafts:
                    draft.reason = draft.reason or "abort"
                request.done = True

    def drive(self, until: Callable[[], bool]) -> None:
        """Serve calls in their order until something is so."""
        while not until():
            with self._lock:
                if not until():
                    self._next_call()

    def step(self) -> bool:
        """Serve the next call to its end; False if none waits."""
        with self._lock:
            if self._waiting:
                self._next_call()
                return True
            return False

    def _next_call(self) -> None:
        first, adapter = self._waiting[0]
        mine = [r for r, a in self._waiting if a == adapter and _same_call(r, first)]
        try:
            with self._ready(adapter) as module:
                model = CachedModel(module, self._base(), self._within(first.version))
                prompts = [request.prompt for request in mine]
                found = generate(
                    model, prompts, first.params, stop=first.stop, seed=first.seed,
                    max_batch_size=self._at_once(model, prompts),
                )  # fmt: skip
            for request, result in zip(mine, found, strict=True):
                request.result = result
        except Exception as error:  # raised to whoever waits for one of them
            for request in mine:
                request.error = error
        for request in mine:
            request.done = True
        self._waiting = [pair for pair in self._waiting if not pair[0].done]

    def _at_once(self, model: CachedModel, prompts: Sequence[Prompt]) -> int:
        """Return how many sequences may be decoded at once.

        Raises:
            CapacityError: one of them is too long for what is free.
        """
        base = self._base()
        if self._bytes is None or self._bytes[0] is not base:
            hidden = getattr(base.config.get_text_config(), "hidden_size", None) or 0
            self._bytes = base, SequenceBytes.of(model, hidden)
        longest = max(prompts, key=lambda prompt: len(prompt.ids) + prompt.room)
        tokens, widest = len(longest.ids) + longest.room, max(len(prompt.ids) for prompt in prompts)
        needed, budget = self._bytes[1].needed(tokens, widest), self._budget()
        scores = scoring_bytes(prompts, model.vocabulary)
        if needed + scores > budget:
            what = f"{tokens} tokens{' and the scores of their prompt' if scores else ''}"
            raise CapacityError(
                f"row {longest.row}: {what} need about {(needed + scores) / 2**20:.1f} MiB, and the sampler may take "
                f"{budget / 2**20:.1f} MiB; ask for fewer (max_tokens), or give it more (cache_bytes)"
            )
        return min(self._most, (budget - scores) // needed)

    def _within(self, version: AdapterVersion | None) -> Within | None:
        """Return the context in which all rows have one adapter that is not PEFT's."""
        if version is None:
            return None
        runner = self._runner()
        sites = runner.sites  # installed
        if head := [site for site in sites.values() if site.head]:
            install(head, head=True)  # each time: a pool whose model is patched gives its head back its own forward

        def route(rows: int) -> Routing | None:
            return runner.route([version] * rows)

        return lambda tokens: Scope(_ONE, None, route(tokens), route)

    def _runner(self) -> Runner:
        model = self._base()
        if self._known is None or self._known.model is not model:
            self._known = Runner(model)
        return self._known


_ONE = Segments.of([1])
"""What nobody looks at where the model's own attention is in place."""


def _same_call(one: Request, other: Request) -> bool:
    return one.stop is other.stop and one.params is other.params and one.version is other.version
