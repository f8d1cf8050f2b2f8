"""A pass whose loss a worker process computes, against the same loss in the engine's process: wall time.

    python benchmarks/loss_workers.py

Random Qwen3 (hidden 256, 8 layers, vocabulary 8,192), LoRA r=8 on all linear layers and the head, float32, one thread:
`forward_backward` of the backend of `twinkle serve` with a clipped policy gradient that a plugin, made on the spot,
offers. Theirs: the plugin trusted with the engine's process (`--loss-in-process`). Ours: its worker process. The calls
take turns; loss and gradient must be the same bits. Below the ratios: the loss alone, milliseconds a call, and the
milliseconds until an operation works again after its worker was killed.
"""

import argparse
import os
import signal
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
from fused_tenants import Shape, make_model
from transformers.utils import logging

CASES = ((1, 512), (32, 64), (1, 32))
"""Rows, and tokens of each."""
GOAL = 1.1
"""For a pass of 512 tokens or more."""
MANIFEST = """schema = 1
core = ">=0.1,<1"
name = "acme-bench"

[[component]]
kind = "loss"
name = "AcmeClipped"
ref = "acme_bench.loss:AcmeClipped"
requires = ["torch"]
runtimes = ["local", "served"]
tenant_safe = true
inputs = { advantages = "float32[T]", old_logps = "float32[T]" }
"""
LOSS = '''"""A clipped policy gradient."""

import torch

from twinkle.data_format import LossOutput
from twinkle.loss import Loss


class AcmeClipped(Loss):
    """Sums over tokens."""

    def __call__(self, inputs, outputs, advantages, old_logps):
        """Return the loss."""
        logps = outputs["logps"]
        mine, old = torch.zeros_like(logps), torch.zeros_like(logps)
        for row, (values, before) in enumerate(zip(advantages, old_logps, strict=True)):
            mine[row, : len(values)] = torch.as_tensor(values)
            old[row, : len(before)] = torch.as_tensor(before)
        ratio = torch.exp((logps - old).clamp(-5, 5))
        gain = torch.minimum(ratio * mine, ratio.clamp(0.8, 1.2) * mine) * (inputs["labels"] != -100)
        return LossOutput(-gain.sum(), float(len(advantages)))
'''


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its tables; exit code 1 when the goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    print(describe_machine(["twinkle-server", "torch", "transformers"]))
    print(f"{'':>14}{'in process':>12}{'worker':>10}   ratio")
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sys.path.append(str(write_plugin(folder / "site")))
        make_model(Shape(options.hidden, options.layers, 8192, 1, 512), folder / "model")
        worker, engine = (backend(folder / "model", **extra) for extra in ({}, {"in_process_losses": ["acme-bench"]}))
        for rows, tokens in CASES:
            payload = request(rows, tokens)
            check(worker, engine, payload)
            seconds = in_turn(
                {"worker": lambda: run(worker, payload), "engine": lambda: run(engine, payload)},  # noqa: B023
                options.repetitions,
                clock=time.perf_counter,
            )
            found = ratio(seconds["worker"], seconds["engine"])
            here, there = (1000 * statistics.median(seconds[name]) for name in ("engine", "worker"))
            print(f"{f'{rows} x {tokens}':>14}{here:>9.1f} ms{there:>7.1f} ms   {found}")
            missed += rows * tokens >= 512 and found.median > GOAL
        alone(worker, engine)
        worker._losses.workers.close()
    return 1 if missed else 0


def alone(worker: Any, engine: Any) -> None:
    """Print what the loss alone takes, and how long an operation waits for a new worker."""
    rows, tokens = CASES[0]
    payload = request(rows, tokens)
    spent = spent_on_workers()
    waited = []
    for _ in range(15):
        before = sum(spent)
        run(worker, payload)
        waited.append(1000 * (sum(spent) - before))
    print(f"waiting for the worker in a pass of {rows} x {tokens}: {statistics.median(waited):.1f} ms")
    again = []
    for _ in range(7):
        [found] = worker._losses.workers._tree.workers.values()
        os.kill(found.process.pid, signal.SIGKILL)
        time.sleep(0.2)
        before = sum(spent)
        run(worker, payload)
        again.append(1000 * (sum(spent) - before))
    print(f"the same where the worker was killed: {statistics.median(again):.1f} ms")


def spent_on_workers() -> list[float]:
    """Return a list that is appended the seconds of each call to a worker from now on, and of each wait for one."""
    from twinkle_server.engine.losses.workers.workers import _Remote

    seconds: list[float] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                seconds.append(time.perf_counter() - begin)

        return call

    for name in ("_send", "_receive"):
        setattr(_Remote, name, timed(getattr(_Remote, name)))
    return seconds


def check(worker: Any, engine: Any, payload: bytes) -> None:
    """Compare the answers and the gradients, bit for bit."""
    from twinkle_server.operations import OptimStep

    answers, gradients = [], []
    for made in (worker, engine):
        made.step([("a", OptimStep(learning_rate=0.0))])  # forgets what earlier passes have added
        answers.append(run(made, payload))
        tenant = made.engine._pool.tenants[made._models["a"].ref]
        gradients.append(tenant.flat.grad.clone())
    if answers[0] != answers[1] or not torch.equal(*gradients) or not gradients[0].abs().max() > 0:
        raise SystemExit("the worker's loss or gradient is not that of the engine")


def backend(model: Path, **extra: Any) -> Any:
    """Return an executor with one model, moved away from its first weights."""
    from twinkle_server.engine.executor import Executor
    from twinkle_server.engine.losses.catalog import Losses
    from twinkle_server.engine.losses.workers import WorkerLimits
    from twinkle_server.operations import Create, OptimStep
    from twinkle_transformers.engine import TransformersEngine

    limits = extra.get("loss_workers", {})
    losses = Losses(None, None if limits is None else WorkerLimits(**limits), extra.get("in_process_losses", ()))
    made = Executor(TransformersEngine(str(model)), "bench", losses)
    made.create("a", Create(8, 1), None)
    run(made, request(1, 64, "importance_sampling"))
    made.step([("a", OptimStep(learning_rate=1e-2))])
    return made


def run(backend: Any, payload: bytes) -> Any:
    """Do one pass, and return its answer."""
    [found], _ = backend.run([one(payload)])
    if isinstance(found, Exception):
        raise found
    return found


def one(payload: bytes) -> Any:
    """Return a pass of the one model."""
    from twinkle_server.engine.executor import Pass

    return Pass("a", payload, 1)


def request(rows: int, tokens: int, loss: str = "AcmeClipped") -> bytes:
    """Return the payload of a pass of random rows."""
    from twinkle_server.wire import codec
    from twinkle_server.wire import tinker_pb2 as pb

    draw = np.random.default_rng(rows * tokens)
    made = pb.ForwardBackwardRequest(model_id="a", seq_id=1, loss_fn=loss)
    for _ in range(rows):
        row = made.data.add()
        ids = draw.integers(0, 8192, tokens + 1)
        row.model_input.add().encoded_text.tokens = ids[:-1].astype("<i4").tobytes()
        inputs = {
            "target_tokens": ids[1:].astype(np.int64),
            "logprobs": draw.normal(-9, 0.5, tokens).astype(np.float32),
            "advantages": draw.normal(size=tokens).astype(np.float32),
        }
        for name, values in inputs.items():
            row.loss_fn_inputs[name].CopyFrom(codec.write_tensor(values))
    return made.SerializeToString()


def write_plugin(site: Path) -> Path:
    """Write a plugin, installed, and return the folder for `sys.path`."""
    package = site / "acme_bench"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('"""A plugin."""\n', "utf-8")
    (package / "twinkle-plugin.toml").write_text(MANIFEST, "utf-8")
    (package / "loss.py").write_text(LOSS, "utf-8")
    info = site / "acme_bench-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-bench\nVersion: 1.0\n", "utf-8")
    (info / "entry_points.txt").write_text("[twinkle]\nacme = acme_bench\n", "utf-8")
    return site


if __name__ == "__main__":
    sys.exit(main())
