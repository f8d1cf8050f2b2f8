"""Eight tenants who train through the unmodified SDK at once, against the same eight one after another: wall time.

    python benchmarks/server_tenants.py

Random Qwen3, LoRA r=8, float32, one service with the durable log as shipped, one thread in its engine. A tenant has a
key and data of its own; each step sends `forward_backward` and `optim_step`, and waits for both. Tenants are threads of
one process. Both rounds do the same work with fresh models of the same seeds on the same service, in turn; making the
models is not counted.

- small batches, one row of about 16 tokens a step (hidden 128, 4 layers, vocabulary 2,048): at once >= 2 x as fast.
- batches that keep the processor busy, 4 rows of about 40 tokens (hidden 256, 8 layers, vocabulary 8,192): >= 0.98 x.

Loss and log-probabilities of the last pass of every tenant must agree within 1e-4 between the rounds before any time
counts.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from _pairs import describe_machine, ratio
from _serving import NAME, PACKAGES, Served, metric, pool
from fused_tenants import Shape, make_model
from transformers.utils import logging

RANK, SECONDS = 8, 300
ROUNDS = {"small": (Shape(128, 4, 2048, 1, 16), 20, 2.0), "busy": (Shape(256, 8, 8192, 4, 40), 5, 0.98)}
"""Shape, steps of each tenant, goal."""
TURN = 'twinkle_pass_{}{{kind="{}"}}'


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; exit code 1 when the goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", choices=tuple(ROUNDS))
    options = parser.parse_args(arguments)
    logging.disable_progress_bar()
    print(describe_machine([*PACKAGES, "tinker", "torch", "transformers"]))
    good = True
    for name in (options.only,) if options.only else ROUNDS:
        good &= round_of(name, options.tenants, options.repetitions)
    return 0 if good else 1


def round_of(name: str, count: int, repetitions: int) -> bool:
    """Serve a model of one shape, and compare."""
    shape, steps, goal = ROUNDS[name]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_model(shape, folder / "model")
        service = pool(folder / "data", folder / "model", {"name": NAME, "auth": True})
        try:
            service.start()
            with ExitStack() as sessions:
                tenants = [Tenant(service, shape, steps, number) for number in range(count)]
                for tenant in tenants:
                    sessions.enter_context(tenant.client)
                return contest(service, tenants, repetitions, goal)
        finally:
            service.stop()


class Tenant:
    """One tenant: a key, data, and a model that is made anew for each round."""

    def __init__(self, service: Served, shape: Shape, steps: int, number: int) -> None:
        self.number, self.steps = number, steps
        self.client = tinker.ServiceClient(base_url=service.url, api_key=service.new_key(f"tenant-{number}"))
        draw = random.Random(number)
        lengths = [
            draw.randint(shape.width - shape.width // 4, shape.width + shape.width // 4) for _ in range(shape.rows)
        ]
        self.data = [row([draw.randrange(shape.vocabulary) for _ in range(length + 1)]) for length in lengths]
        self.tokens = sum(lengths)

    def prepare(self) -> None:
        """Make a fresh model, the same each time."""
        self.training = self.client.create_lora_training_client(base_model=NAME, rank=RANK, seed=self.number).result(
            SECONDS
        )

    def train(self) -> np.ndarray[Any, Any]:
        """Take all steps, and return the loss and the log-probabilities of the last pass."""
        adam = tinker.AdamParams(learning_rate=1e-3)
        for _ in range(self.steps):
            passing = self.training.forward_backward(self.data, "cross_entropy")
            stepping = self.training.optim_step(adam)
            found = passing.result(SECONDS)
            stepping.result(SECONDS)
        scores = [np.asarray(output["logprobs"].data) for output in found.loss_fn_outputs]
        return np.concatenate([[found.metrics["loss:sum"]], *scores])


def contest(service: Served, tenants: Sequence[Tenant], repetitions: int, goal: float) -> bool:
    """Compare results, then times."""
    tokens = sum(tenant.tokens * tenant.steps for tenant in tenants)
    rows = len(tenants[0].data)
    print(f"\n{len(tenants)} tenants, {tenants[0].steps} steps of {rows} rows each, {tokens:,} tokens a round")
    with ThreadPoolExecutor(len(tenants)) as threads:

        def at_once() -> Iterable[np.ndarray[Any, Any]]:
            return threads.map(Tenant.train, tenants)

        def one_by_one() -> Iterable[np.ndarray[Any, Any]]:
            return map(Tenant.train, tenants)

        print(agreement(timed(at_once, tenants)[1], timed(one_by_one, tenants)[1]))
        times: dict[str, list[float]] = {"at once": [], "one by one": []}
        fused, busy = [], []
        for number in range(repetitions):
            order = [("at once", at_once), ("one by one", one_by_one)]
            for words, work in order if number % 2 else reversed(order):
                before = turns(service)
                times[words].append(timed(work, tenants)[0])
                if work is at_once:
                    together, count, seconds = (b - a for a, b in zip(before, turns(service), strict=True))
                    fused.append(together / count)
                    busy.append(seconds / times[words][-1])
    gain = ratio(times["one by one"], times["at once"])
    for words, took in times.items():
        middle = statistics.median(took)
        print(f"  {words:12}{middle:7.2f} s {tokens / middle:9.0f} tokens/s")
    shares = f"{statistics.fmean(fused):.1f} tenants a pass, the engine works {statistics.fmean(busy):.0%} of the time"
    print(f"  at once: {shares}")
    print(f"  {gain} x   goal >= {goal}")
    return gain.median >= goal


def timed(
    work: Callable[[], Iterable[np.ndarray[Any, Any]]], tenants: Sequence[Tenant]
) -> tuple[float, list[np.ndarray[Any, Any]]]:
    """Make fresh models, do the work, and return its seconds and results."""
    for tenant in tenants:
        tenant.prepare()
    start = time.perf_counter()
    found = list(work())
    return time.perf_counter() - start, found


def agreement(first: Sequence[np.ndarray[Any, Any]], second: Sequence[np.ndarray[Any, Any]]) -> str:
    """Compare two rounds; returns what to print.

    Raises:
        SystemExit: they differ, so that no time counts.
    """
    worst = max(float(np.max(np.abs(a - b) / np.maximum(1, np.abs(b)))) for a, b in zip(first, second, strict=True))
    if not worst <= 1e-4:
        raise SystemExit(f"the rounds differ by {worst:.1e}; no time counts")
    return f"losses and log-probabilities of all tenants agree within {worst:.0e}"


def turns(service: Served) -> tuple[float, float, float]:
    """Return, of all work so far, the tenants of passes summed, the number of passes, and the seconds of all turns."""
    seconds = sum(metric(service, TURN.format("seconds_sum", kind)) for kind in ("pass", "optim_step"))
    return (
        metric(service, TURN.format("tenants_sum", "pass")),
        metric(service, TURN.format("tenants_count", "pass")),
        seconds,
    )


def row(tokens: Sequence[int]) -> tinker.Datum:
    """Return a row: every token but the first is a target."""
    inputs: Any = {"target_tokens": list(tokens[1:]), "weights": [1.0] * (len(tokens) - 1)}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=inputs)


if __name__ == "__main__":
    sys.exit(main())
