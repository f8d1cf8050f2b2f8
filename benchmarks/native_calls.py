"""Calls of our own client against the same calls on a model in this process, and the import of the client.

    python benchmarks/native_calls.py
    python benchmarks/native_calls.py --imports  # only the imports, 20 s

Random Qwen3 (hidden 256, 8 layers, vocabulary 8,192), LoRA r=8 on all linear layers, float32, one thread, one row of
512 tokens. Theirs: `MultiLoraTransformersModel` of Twinkle here. Ours: the class of that name in `twinkle_client`,
against `twinkle serve` with the durable log as shipped. The calls take turns; wall time. Both train first; their losses
must agree within 1e-5. Goal: `forward_backward` at most 1.05 x the call here, as the median of paired ratios. A model
that computes nearly nothing (hidden 64, 1 layer, 16 tokens) shows what the service adds. Times are the least ones.

Imports of the client over a bare interpreter, CPU time: the package, the names that a published script of training
imports, those of reinforcement learning, and these with the packages that the first call loads (httpx and pydantic).
Goal: the names at most 200 ms, and nothing of torch.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _pairs import describe_machine, in_turn, ratio
from _serving import PACKAGES, pool
from fused_tenants import Shape, make_model
from startup import over_bare
from transformers.utils import logging

from twinkle_client import MultiLoraTransformersModel, TwinkleClient
from twinkle_transformers.pool.multi import MultiLoraTransformersModel as LocalModel

GOAL, IMPORT_MS = 1.05, 200.0
CONFIG = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
ADAPTER = "a"
_TRAINING = (
    "from twinkle_client import init_twinkle_client; from twinkle_client.model import MultiLoraTransformersModel; "
    "from twinkle_client.dataset import Dataset; from twinkle_client.dataloader import DataLoader; "
)
_SAMPLING = "from twinkle_client.sampler import vLLMSampler; from twinkle_client.processor import InputProcessor; "
IMPORTS = {
    "import twinkle_client": ("import twinkle_client; ", True),
    "the names of training": (_TRAINING, True),
    "and of sampling": (_TRAINING + _SAMPLING, True),
    "and what the first calls load": (_TRAINING + _SAMPLING + "import httpx, twinkle_client.types; ", False),
}
"""Code by name, and whether the goal is for it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its figures; exit code 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--imports", action="store_true", help="measure only the imports")
    options = parser.parse_args(arguments)
    repetitions = options.repetitions
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    print(describe_machine([*PACKAGES, "torch", "transformers", "httpx", "pydantic"]))
    if options.imports:
        return 0 if compare_imports() else 1
    print(f"{'':42}{'here ms':>9}{'client ms':>11}{'adds ms':>9}  client / here")
    reached = compare(Shape(256, 8, 8192, 1, 512), repetitions)
    compare(Shape(64, 1, 512, 1, 16), 3 * repetitions)
    return 0 if compare_imports() and reached else 1


def compare_imports() -> bool:
    """Print what imports of the client take over a bare interpreter; return whether the goal is met."""
    reached = True
    print(f"\n{'imports, over a bare interpreter':42}{'best ms':>9}{'median ms':>11}{'goal ms':>9}")
    for name, (code, counts) in IMPORTS.items():
        with tempfile.TemporaryDirectory() as cache:
            took = over_bare(f"{code}import sys; sys.exit('torch' in sys.modules)", (), None, Path(cache))
        print(f"{name:42}{min(took):9.0f}{statistics.median(took):11.0f}{IMPORT_MS if counts else '':>9}")
        reached &= not counts or statistics.median(took) <= IMPORT_MS
    return reached


def compare(shape: Shape, repetitions: int) -> bool:
    """Print the calls of one model on both sides; return whether the goal is met."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(shape, folder / "model")
        service = pool(folder / "data", folder / "model", {"name": "null"}).start()
        try:
            with TwinkleClient(service.url) as client:
                here = Side(LocalModel(model_id=str(folder / "model"), mixed_precision="no"), shape.width)
                there = Side(MultiLoraTransformersModel(client=client), shape.width)
                np.testing.assert_allclose(there.trained(), here.trained(), rtol=1e-5)
                shown = f"hidden {shape.hidden}, {shape.width} tokens"
                found = show(f"forward_backward, {shown}", here.train, there.train, repetitions)
                show(f"and a step, {shown}", here.update, there.update, repetitions)
        finally:
            service.stop()
    return found <= GOAL


def show(what: str, here: Callable[[], Any], there: Callable[[], Any], repetitions: int) -> float:
    """Print a line and return the median of the paired ratios."""
    times = in_turn({"here": here, "there": there}, repetitions, clock=time.perf_counter)
    one, other = (1000 * min(times[side]) for side in ("here", "there"))
    found = ratio(times["there"], times["here"])
    print(f"{what:42}{one:>9.2f}{other:>11.2f}{other - one:>9.2f}  {found}")
    return found.median


class Side:
    """A model with one adapter, here or on a service."""

    def __init__(self, model: Any, tokens: int) -> None:
        self._model = model
        self._rows = [{"input_ids": list(range(1, tokens + 1)), "labels": [-100, *range(2, tokens + 1)]}]
        model.add_adapter_to_model(ADAPTER, CONFIG, seed=1)
        model.set_optimizer("AdamW", lr=1e-3, adapter_name=ADAPTER)

    def train(self) -> float:
        """Do one forward and backward pass; return its loss."""
        return float(self._model.forward_backward(inputs=self._rows, adapter_name=ADAPTER)["loss"])

    def update(self) -> float:
        """Do a pass and a step; return the loss before it."""
        loss = self.train()
        self._model.clip_grad_and_step(adapter_name=ADAPTER)
        return loss

    def trained(self) -> list[float]:
        """Take three steps; return the losses of their passes."""
        return [self.update() for _ in range(3)]


if __name__ == "__main__":
    sys.exit(main())
