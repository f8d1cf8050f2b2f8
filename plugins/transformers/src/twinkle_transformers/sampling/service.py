"""Serves the prompts of a sampler: step by step where the model can run so, else call by call."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch

from twinkle.data_format import SamplingParams
from twinkle.errors import ArgumentError, Unsupported
from twinkle.logging import get_logger
from twinkle_torch.numerics import Evidence
from twinkle_transformers.patch_watch import PatchWatch
from twinkle_transformers.sampling.decode_loop import WholeCalls
from twinkle_transformers.sampling.engine import StepEngine
from twinkle_transformers.sampling.kv_cache import default_budget
from twinkle_transformers.sampling.requests import Prompt, Request, Server
from twinkle_transformers.sampling.runner import Runner
from twinkle_transformers.sampling.sources import Pick, Source
from twinkle_transformers.sampling.stopping import StopRule


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine may take.

    Attributes:
        batch: sequences at once.
        cache_bytes: of keys and values; None is a third of the memory that is free when it begins.
        prefix_bytes: of what is kept of earlier prompts; None is a quarter of `cache_bytes`.
        prefill_tokens: tokens of prompts that a step reads.
        row_multiple: a step's rows are padded to a multiple of it.
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
    """What a sampler samples with.

    Attributes:
        source: the module and its adapters.
        whole: serves what the engine cannot.
        gate: whoever holds it keeps others from beginning.
    """

    def __init__(self, source: Source, limits: Limits) -> None:
        """Begin; the model runs at the first call.

        Args:
            source: the module and its adapters.
            limits: what the engine may take.
        """
        self.source, self._limits = source, limits
        self.whole = WholeCalls(lambda: source.base, source.ready, limits.batch, self._bytes)
        self._engine: StepEngine | None = None
        self._model: Any = None
        self._judged: Runner | None = None
        self._patches: PatchWatch | None = None
        self._lock = RLock()
        self.gate = RLock()

    @property
    def engine(self) -> StepEngine | None:
        """The engine, None where the model cannot run step by step; says so once.

        Another model, and one to which a patch was applied or on which one was undone, gets a new engine.
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
        """What was measured about steps of the present model; None before."""
        return None if self._judged is None else self._judged.evidence

    @property
    def runner(self) -> Runner | None:
        """The engine's runner."""
        engine = self.engine
        return None if engine is None else engine.runner

    def rebuild(self) -> None:
        """Look at the model anew, after its code has changed."""
        with self._lock:
            self._model = None

    def submit(
        self, prompts: Sequence[Prompt], params: SamplingParams, stop: StopRule, seed: int | Sequence[int],
        picks: Sequence[Pick],
    ) -> list[tuple[Request, Server]]:  # fmt: skip
        """Begin with the prompts of a call; returns each one's request and who serves it.

        Args:
            prompts: of the call.
            params: how to draw.
            stop: what ends a sample.
            seed: of the noise.
            picks: the adapter of each prompt.

        Raises:
            CapacityError: a prompt's keys and values could never fit.
            NonFiniteError: an adapter's weights are NaN or infinite.
        """
        engine = self.engine
        if engine is not None and engine.runner.changed():
            engine.forget_prefixes()
        requests = [Request(prompt, params, stop, seed, p.version) for prompt, p in zip(prompts, picks, strict=True)]
        for request, chosen in zip(requests, picks, strict=True):
            if engine is not None and not chosen.whole:
                engine.check(request)
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
        """Take one step for whatever is being sampled, without waiting; False if there was nothing to do."""
        engine = self._engine
        return (engine is not None and engine.step()) or self.whole.step()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Serve what runs to its end, and let nothing begin for the duration of a block."""
        with self.gate:
            if (engine := self._engine) is not None:
                engine.drive(lambda: engine.idle)
            self.whole.drive(lambda: self.whole.idle)
            with self.source.alone():
                yield

    def _build(self, model: Any) -> StepEngine | None:
        runner = Runner(model, row_multiple=self._limits.row_multiple, backbone=self.source.backbone)
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
        """Return the bytes that keys and values may take now."""
        if self._limits.cache_bytes is not None:
            return self._limits.cache_bytes
        device: torch.device = self.source.base.get_input_embeddings().weight.device
        return default_budget(device)
