"""`PoolBackend`: one base model in this process, its adapters, and the sampler that shares its weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from twinkle import registry
from twinkle_server.engine.backend import BackendOptions, Cost, Pass, Sampled, State
from twinkle_server.engine.pool.checkpoints import Checkpoints
from twinkle_server.engine.pool.faults import telling
from twinkle_server.engine.pool.lanes import Lanes
from twinkle_server.engine.pool.loss_workers.workers import WorkerLimits
from twinkle_server.engine.pool.losses import Losses
from twinkle_server.engine.pool.sampling import Sampling
from twinkle_server.engine.pool.tokenizers import has_tokenizer
from twinkle_server.engine.pool.training import Training
from twinkle_server.operations import ModelInfo
from twinkle_server.payloads import Create, Load, OptimStep, Sample, Save
from twinkle_server.settings import Limits

_NO_CONTEXT = 1 << 20
"""Tokens that a row may have where the model's configuration does not say."""


_WORK = {"cpu": 1e11, "cuda": 1e14}
"""Floating-point operations of a pass: about a second of two CPU cores, or of a small device. A constant and not a
measurement, because where a pass is cut changes the last places of its numbers."""
_LEAST = {"cpu": 128, "cuda": 1024}
"""Tokens below which products are far from their speed."""
_MOST = {"cpu": 1024, "cuda": 16_384}
"""Tokens above which they gain nothing more."""


def _pass_tokens(pool: Any) -> int:
    """Return the tokens of a pass: a function of the model's size and the kind of device."""
    kind = "cpu" if pool.device.type == "cpu" else "cuda"
    tokens = int(_WORK[kind] / (4 * max(1.0, pool.costs.base)))  # forward and back through a frozen base
    return min(int(pool.tokens_per_pass), _MOST[kind], max(_LEAST[kind], tokens // 64 * 64))


class PoolBackend:
    """Trains and samples adapters of one base model with torch; see `Backend`.

    Args:
        options: what is served. `extra` may hold `model`, further arguments of `MultiLoraTransformersModel`, `sampler`,
            those of `TorchSampler`, `pass_tokens`, how many tokens go through the model at one time, `custom_losses`,
            whether clients may send losses of their own, `custom_loss_seconds`, that such a loss may take for one
            operation, `strict_losses` (see `Losses`), `loss_workers`, fields of `WorkerLimits`, or None to compute the
            losses of all plugins in this process, and `in_process_losses`, plugins whose losses are computed in this
            process all the same.
    """

    def __init__(self, options: BackendOptions) -> None:
        limits = options.extra.get("loss_workers", {})
        self._losses = Losses(
            options.losses,
            None if limits is None else WorkerLimits(**limits),  # workers start while the model is loaded
            options.extra.get("in_process_losses", ()),
            strict=bool(options.extra.get("strict_losses")),
        )
        precision = "bf16" if torch.cuda.is_available() else "no"
        given: dict[str, Any] = {"mixed_precision": precision, **options.extra.get("model", {})}
        self.model: Any = registry().build("MultiLoraTransformersModel", "model", model_id=options.model, **given)
        config = self.model.model.config
        text = config.get_text_config()
        context = getattr(text, "max_position_embeddings", None) or _NO_CONTEXT
        vocabulary = int(self.model.model.get_input_embeddings().weight.shape[0])
        self._info = ModelInfo(
            name=options.name,
            context=int(context),
            vocabulary=vocabulary,
            architecture=type(self.model.model).__name__,
            tokenizer=str(self.model.model_path) if has_tokenizer(Path(self.model.model_path)) else "",
            losses=self._losses.names(),
        )
        self._lanes = Lanes(self.model)
        given_tokens = options.extra.get("pass_tokens")
        self.model.pool.tokens_per_pass = _pass_tokens(self.model.pool) if given_tokens is None else int(given_tokens)
        self._training = Training(self.model.pool, self._lanes, self._losses, self._info.context, vocabulary)
        self._training.custom = bool(options.extra.get("custom_losses"))
        self._training.custom_seconds = float(options.extra.get("custom_loss_seconds", Limits().graph_seconds))
        self._checkpoints = Checkpoints(self.model, self._lanes, options.name)
        together = {"max_batch_size": 256 if torch.cuda.is_available() else 32}
        self._sampling = Sampling(self.model, self._info, together | dict(options.extra.get("sampler", {})))
        measured = [*self.model.evidence(), *self._sampling.evidence()]
        self._info = replace(self._info, paths=tuple(found.as_dict() for found in measured))

    @property
    def pass_tokens(self) -> int:
        """Tokens that go through the model at one time."""
        return int(self.model.pool.tokens_per_pass)

    def describe(self) -> ModelInfo:
        """Return what the base model is."""
        return self._info

    def create(self, lane: str, create: Create, source: Path | None) -> None:
        """Make a model, from a checkpoint's folder if one is given."""
        with telling():
            self._checkpoints.create(lane, create, source)

    def run(self, passes: Sequence[Pass]) -> tuple[list[bytes | Exception], Cost]:
        """Do passes of many models together, in pieces between which a step of sampling can be taken."""
        return self._training.run(passes)

    def interrupt(self, between: Callable[[], None]) -> None:
        """Call `between` between the pieces of a pass; see `Interruptible`."""
        self._training.interrupt(between)

    def step(self, steps: Sequence[tuple[str, OptimStep]]) -> list[Mapping[str, float] | Exception]:
        """Update models together, each once."""
        return self._training.step(steps)

    def save(self, lane: str, save: Save) -> tuple[State, Mapping[str, Any]]:
        """Copy what a checkpoint is to hold."""
        with telling():
            return self._checkpoints.save(lane, save)

    def load(self, lane: str, load: Load, source: Path) -> None:
        """Put a checkpoint in place of a model's weights."""
        with telling():
            self._checkpoints.load(lane, load, source)

    def end_dropped_plugins(self) -> None:
        """End the worker processes of plugins that offer no loss any more, because they were revoked."""
        self._losses.end_dropped()

    def remove(self, lane: str) -> None:
        """Zero and forget a model; one that is not there is no error."""
        if self._losses.workers is not None:
            self._losses.workers.forget(lane)
        with telling():
            self._lanes.remove(lane)

    def snapshot(self, lane: str) -> State:
        """Copy all of a model's state, pending gradients included."""
        with telling():
            return self._checkpoints.snapshot(lane)

    def restore(self, lane: str, folder: Path) -> None:
        """Make a model again as a snapshot has it."""
        with telling():
            self._checkpoints.restore(lane, folder)

    def sample(self, key: int, sample: Sample, source: Path | None) -> None:
        """Take a sampling request; it raises what is wrong with it."""
        with telling():
            self._sampling.submit(key, sample, source)

    def decode(self) -> list[Sampled]:
        """Take one step of sampling, and return the requests that are over."""
        with telling():
            return self._sampling.step()

    @property
    def sampling(self) -> int:
        """Number of sampling requests that are not over."""
        return len(self._sampling)

    def cancel(self, key: int) -> None:
        """Drop a sampling request; one that is not there is no error."""
        self._sampling.cancel(key)
