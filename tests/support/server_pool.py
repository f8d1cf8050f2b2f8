"""A torch backend on a tiny model, and its requests as the wire has them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from torch import Tensor

from twinkle_server.engine.executor import Executor, Pass
from twinkle_server.engine.losses.catalog import Losses
from twinkle_server.engine.losses.workers import WorkerLimits
from twinkle_server.operations import Create, OptimStep, Sample, Save
from twinkle_server.wire import codec
from twinkle_server.wire import tinker_pb2 as pb
from twinkle_transformers.engine import TransformersEngine

Datum = tuple[Sequence[int], Mapping[str, Any]]
VOCABULARY = 264


def datum(length: int, seed: int, **inputs: Any) -> Datum:
    """Return a row of random tokens, each the target of the one before it, and weights of both signs."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, 256, length + 1)
    given = {
        "target_tokens": tokens[1:].astype(np.int64),
        "weights": draw.choice([0.0, 0.5, 1.0, -0.25, 2.0], length).astype(np.float32),
    }
    return tokens[:-1].tolist(), given | inputs


def drawn(length: int, seed: int, **inputs: Any) -> Datum:
    """Return a row as it comes from sampling: with log-probabilities then, and advantages."""
    tokens, given = datum(length, seed)
    draw = np.random.default_rng(seed + 1000)
    return tokens, {
        "target_tokens": given["target_tokens"],
        "logprobs": (draw.normal(size=length) * 0.5 - 5.5).astype(np.float32),
        "advantages": draw.normal(size=length).astype(np.float32),
        **inputs,
    }


def request(data: Sequence[Datum], loss: str = "cross_entropy", *, forward: bool = False, **config: Any) -> bytes:
    """Return a pass's payload."""
    made = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn=loss, forward_only=forward)
    for name, value in config.items():
        if isinstance(value, str):
            made.loss_fn_config_v2[name].text = value
        else:
            made.loss_fn_config_v2[name].number = value
    for tokens, inputs in data:
        row = made.data.add()
        row.model_input.add().encoded_text.tokens = np.asarray(tokens, "<i4").tobytes()
        for name, value in inputs.items():
            array = value if isinstance(value, codec.Sparse) else np.asarray(value)
            row.loss_fn_inputs[name].CopyFrom(codec.write_tensor(array))
    return made.SerializeToString()


class Bench:
    """An executor over `TransformersEngine`, and short ways to use it.

    Args:
        base: folder of the base model.
        data: the data folder.
        losses: names of losses beside the published ones; None is every one for tenants.
        extra: options of the engine, and `loss_workers` (fields of `WorkerLimits`, or None), `in_process_losses`,
            `strict_losses`, `custom_losses` and `custom_seconds`.
    """

    def __init__(
        self, base: Path, data: Path, losses: Sequence[str] | None = None, extra: Mapping[str, Any] | None = None
    ) -> None:
        self.base, self.data = base, data
        options = dict(extra or {})
        limits = options.pop("loss_workers", {})
        found = Losses(
            losses,
            None if limits is None else WorkerLimits(**limits),
            options.pop("in_process_losses", ()),
            strict=options.pop("strict_losses", False),
        )
        custom = {name: options.pop(name) for name in ("custom_losses", "custom_seconds") if name in options}
        self.engine = TransformersEngine(str(base), **options)
        self.executor = Executor(self.engine, "tiny", found, **custom)
        self.model: Any = self.engine._model
        self.pool: Any = self.engine._pool
        self._count = 0

    def tenant(self, queue_id: str) -> Any:
        """Return the adapter of a model, as the pool has it."""
        return self.pool.tenants[self.executor._models[queue_id].ref]

    def _folder(self) -> Path:
        return Path(mkdtemp(dir=self.data))

    def create(self, queue_id: str, rank: int = 4, seed: int = 1, **switches: Any) -> None:
        """Make a model."""
        self.executor.create(queue_id, Create(rank, seed, **switches), None)

    def shake(self, queue_id: str, seed: int = 3) -> None:
        """Move a model away from B = 0 by one large step, so that everything it computes says something."""
        self.run(queue_id, [datum(9, seed)])
        self.step(queue_id, learning_rate=0.05)

    def run(self, queue_id: str, data: Sequence[Datum], loss: str = "cross_entropy", **options: Any) -> tuple[Any, Any]:
        """Do one pass and return each row's log-probabilities, and the metrics; raises its error."""
        [found], _ = self.executor.run([Pass(queue_id, request(data, loss, **options), 1)])
        return answer(found)

    def step(self, queue_id: str, **values: float) -> Mapping[str, float]:
        """Update a model and return the metrics; raises its error."""
        [found] = self.executor.step([(queue_id, OptimStep(**values))])
        if isinstance(found, Exception):
            raise found
        return found

    def save(self, queue_id: str, kind: str = "external_weights") -> Path:
        """Save a checkpoint and return its folder."""
        folder = self._folder()
        copied, _ = self.executor.save(queue_id, Save(folder.name, kind))
        copied.write(folder)
        return folder

    def snapshot(self, queue_id: str) -> Path:
        """Write a snapshot and return its folder."""
        folder = self._folder()
        self.executor.snapshot(queue_id).write(folder)
        return folder

    def sample(self, tokens: Sequence[int], source: Path | None = None, **options: Any) -> tuple[Any, Any]:
        """Sample to the end and return sequences and what is said about the prompt; raises its error."""
        self._count += 1
        self.executor.sample(self._count, Sample(list(tokens), **options), source)
        for _ in range(2000):
            for found in self.executor.decode():
                if found.error is not None:
                    raise found.error
                assert found.result is not None
                return codec.read_sample_response(found.result)
        raise TimeoutError("the request is not over after 2,000 steps")

    def weights(self, queue_id: str) -> dict[str, Tensor]:
        """Return a copy of a model's weights, by PEFT's names."""
        found: dict[str, Tensor] = self.model.get_state_dict(adapter_name=self.tenant(queue_id).name)
        return found


def answer(found: bytes | Exception) -> tuple[list[Any], dict[str, float]]:
    """Return what a pass gave; raises its error."""
    if isinstance(found, Exception):
        raise found
    outputs, metrics = codec.read_forward_backward_output(found)
    return [output["logprobs"] for output in outputs], metrics
