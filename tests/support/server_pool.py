"""A torch backend on a tiny model, and its requests as the wire has them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from torch import Tensor

from twinkle_server.engine.backend import BackendOptions, Pass
from twinkle_server.engine.pool.backend import PoolBackend
from twinkle_server.payloads import Create, OptimStep, Sample, Save
from twinkle_server.wire import codec
from twinkle_server.wire import tinker_pb2 as pb

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
    """A backend, and short ways to use it.

    Args:
        base: folder of the base model.
        data: the data directory.
        **options: further arguments of the backend.
    """

    def __init__(self, base: Path, data: Path, **options: Any) -> None:
        self.base, self.data = base, data
        self.backend = PoolBackend(BackendOptions(str(base), "tiny", data, **options))
        self._count = 0

    def _folder(self) -> Path:
        return Path(mkdtemp(dir=self.data))

    def create(self, lane: str, rank: int = 4, seed: int = 1, **switches: Any) -> None:
        """Make a model."""
        self.backend.create(lane, Create(rank, seed, **switches), None)

    def shake(self, lane: str, seed: int = 3) -> None:
        """Move a model away from B = 0 by one large step, so that everything it computes says something."""
        self.run(lane, [datum(9, seed)])
        self.step(lane, learning_rate=0.05)

    def run(self, lane: str, data: Sequence[Datum], loss: str = "cross_entropy", **options: Any) -> tuple[Any, Any]:
        """Do one pass and return each row's log-probabilities, and the metrics; raises its error."""
        [found], _ = self.backend.run([Pass(lane, request(data, loss, **options), 1)])
        return answer(found)

    def step(self, lane: str, **values: float) -> Mapping[str, float]:
        """Update a model and return the metrics; raises its error."""
        [found] = self.backend.step([(lane, OptimStep(**values))])
        if isinstance(found, Exception):
            raise found
        return found

    def save(self, lane: str, kind: str = "external_weights") -> Path:
        """Save a checkpoint and return its folder."""
        folder = self._folder()
        copied, _ = self.backend.save(lane, Save(folder.name, kind))
        copied.write(folder)
        return folder

    def snapshot(self, lane: str) -> Path:
        """Write a snapshot and return its folder."""
        folder = self._folder()
        self.backend.snapshot(lane).write(folder)
        return folder

    def sample(self, tokens: Sequence[int], source: Path | None = None, **options: Any) -> tuple[Any, Any]:
        """Sample to the end and return sequences and what is said about the prompt; raises its error."""
        self._count += 1
        self.backend.sample(self._count, Sample(list(tokens), **options), source)
        for _ in range(2000):
            for found in self.backend.decode():
                if found.error is not None:
                    raise found.error
                assert found.result is not None
                return codec.read_sample_response(found.result)
        raise TimeoutError("the request is not over after 2,000 steps")

    def weights(self, lane: str) -> dict[str, Tensor]:
        """Return a copy of a model's weights, by PEFT's names."""
        name = self.backend._lanes[lane].name
        found: dict[str, Tensor] = self.backend.model.get_state_dict(adapter_name=name)
        return found


def answer(found: bytes | Exception) -> tuple[list[Any], dict[str, float]]:
    """Return what a pass gave; raises its error."""
    if isinstance(found, Exception):
        raise found
    outputs, metrics = codec.read_forward_backward_output(found)
    return [output["logprobs"] for output in outputs], metrics
