"""The random state of a process: torch, CUDA, numpy and Python, as safetensors and JSON."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from twinkle.errors import CheckpointError
from twinkle_transformers.reading import read_json, read_tensors

_NAME = "rng_state_{rank}"


@dataclass(frozen=True, slots=True)
class RandomState:
    """What `read_random` found, not yet in force."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None
    numpy: tuple[Any, ...]
    python: tuple[Any, ...]

    def apply(self) -> None:
        """Make it this process's random state."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


def capture_random() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return this process's random state, as tensors and as plain values."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    name, keys, *rest = np.random.get_state()
    tensors["numpy"] = torch.from_numpy(np.asarray(keys).astype(np.int64))
    version, internal, gauss = random.getstate()
    tensors["python"] = torch.tensor(internal, dtype=torch.int64)
    return tensors, {"numpy": [name, *rest], "python": [version, gauss]}


def write_random(folder: Path, rank: int, captured: tuple[dict[str, torch.Tensor], dict[str, Any]]) -> None:
    """Write what `capture_random` returned on a rank."""
    base = _NAME.format(rank=rank)
    save_file(captured[0], folder / f"{base}.safetensors")
    (folder / f"{base}.json").write_text(json.dumps(captured[1]) + "\n", "utf-8")


def fresh_random(seed: int) -> RandomState:
    """Return the state after seeding every generator with `seed`, without touching this process's."""
    generator = torch.Generator().manual_seed(seed)
    return RandomState(
        cpu=generator.get_state(),
        cuda=torch.Generator("cuda").manual_seed(seed).get_state() if torch.cuda.is_available() else None,
        numpy=tuple(np.random.RandomState(seed % 2**32).get_state(legacy=True)),
        python=random.Random(seed).getstate(),
    )


def read_random(folder: Path, rank: int) -> RandomState:
    """Read a process's random state.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    base = _NAME.format(rank=rank)
    tensors, extra = read_tensors(folder / f"{base}.safetensors"), read_json(folder / f"{base}.json")
    try:
        name, *rest = extra["numpy"]
        version, gauss = extra["python"]
        return RandomState(
            cpu=tensors["torch"],
            cuda=tensors.get("cuda"),
            numpy=(name, tensors["numpy"].numpy().astype(np.uint32), *rest),
            python=(version, tuple(tensors["python"].tolist()), gauss),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / base}.*: not a random state ({error}); the checkpoint is damaged") from error
