"""What the service adds to a call: submit, order, log, engine process, result; the engine itself computes nothing.

    python benchmarks/server_overhead.py

Wall time of one `forward_backward` of one row, p50 over 100 calls with random gaps of 0 to 110 ms: in plain HTTP with a
journal in memory (benchmark only) and with the durable one as shipped, and through the unmodified SDK. Goals at 4,096
tokens: 1.5, 3.5 and 6 ms. Beside it the time that this machine's disk takes to write one block for good, of which a
call waits for at least one.
"""

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from _pairs import describe_machine
from _server import PACKAGES, Connection, fsync_ms, served

os.environ.update(TINKER_TELEMETRY="0", NO_PROXY="127.0.0.1", no_proxy="127.0.0.1")
CALLS = 100
LENGTHS = (128, 4096, 32768)
GOALS = {("memory", 4096): 1.5, ("durable", 4096): 3.5, ("SDK", 4096): 6.0, ("SDK", 32768): 10.0}


def main() -> int:
    """Run the benchmark and print its table; exit code 1 when a goal is missed."""
    print(describe_machine([*PACKAGES, "tinker"]))
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        print(f"one fsync of 4 KiB: {fsync_ms(Path(folder)):.2f} ms")
        print(f"{'':10}{'tokens':>8}{'p50 ms':>8}{'p90':>7}{'p99':>7}{'goal':>7}")
        for way in ("memory", "durable", "SDK"):
            with served(Path(folder), "memory" if way == "memory" else "durable") as url:
                for tokens in LENGTHS:
                    times = timed(through_sdk(url, tokens) if way == "SDK" else plain(url, tokens))
                    p50, p90, p99 = (statistics.quantiles(times, n=100)[at - 1] for at in (50, 90, 99))
                    goal = GOALS.get((way, tokens))
                    missed += goal is not None and p50 > goal
                    print(f"{way:10}{tokens:>8}{p50:>8.2f}{p90:>7.2f}{p99:>7.2f}{goal or '':>7}")
    return 1 if missed else 0


def plain(url: str, tokens: int) -> Callable[[], None]:
    """Return a call over one connection that is kept."""
    connection = Connection(url)
    model, number = connection.model(), 0

    def call() -> None:
        nonlocal number
        number += 1
        connection.forward_backward(model, number, tokens)

    return call


def through_sdk(url: str, tokens: int) -> Callable[[], None]:
    """Return a call of the unmodified SDK."""
    import tinker

    client = tinker.ServiceClient(base_url=url, api_key="tml-benchmark")
    training = client.create_lora_training_client(base_model="null", rank=8).result()
    ids = list(range(1, tokens + 1))
    inputs = {"target_tokens": ids, "weights": [1.0] * tokens}
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(ids), loss_fn_inputs=inputs)

    def call() -> None:
        training.forward_backward([datum], "cross_entropy").result(60)

    return call


def timed(call: Callable[[], None]) -> list[float]:
    """Return milliseconds of calls with gaps between them, so that no rhythm of theirs meets one of the service's."""
    draw = random.Random(0)
    for _ in range(10):
        call()
    times = []
    for _ in range(CALLS):
        time.sleep(draw.uniform(0, 0.11))
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return times


if __name__ == "__main__":
    sys.exit(main())
