"""What the service adds to a call: submit, order, log, engine process, result; the engine itself computes nothing.

    python benchmarks/server_overhead.py

Wall time of one `forward_backward` of one row, p50 over 100 calls with random gaps of 0 to 110 ms: with a journal in
memory (benchmark only), with the durable one as shipped, and through the unmodified SDK. The calls alternate with the
same ones to the least that answers this protocol (`_floor.py`), which shows what of it is this machine, its web server
and its client: processors that sleep take milliseconds to wake. Goals are in milliseconds of this run: a durable call
of 4,096 tokens takes at most twice the floor and one fsync of 4 KiB together, one of 32,768 at most 1.5 x the floor.
That fsync is one in a quiet row; below the table is also one that took its turn among the calls, since a disk that
sleeps wakes late, too, and calls without gaps.
"""

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from _pairs import describe_machine
from _server import PACKAGES, Connection, floor, fsync_ms, served

os.environ.update(TINKER_TELEMETRY="0", NO_PROXY="127.0.0.1", no_proxy="127.0.0.1")
CALLS, LENGTHS = 100, (128, 4096, 32768)
Call = Callable[[], None]


def main() -> int:
    """Run the benchmark and print its tables; exit code 1 when a goal is missed."""
    print(describe_machine([*PACKAGES, "tinker"]))
    missed = 0
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        least = stack.enter_context(floor())
        urls = {name: stack.enter_context(served(Path(folder), name)) for name in ("memory", "durable")}
        fsync = fsync_ms(Path(folder))
        print(f"{'':16}{'tokens':>8}{'p50 ms':>8}{'p90':>7}{'p99':>7}{'floor':>7}{'ratio':>7}{'goal ms':>9}")
        for tokens in LENGTHS:
            calls = {"floor": plain(least, tokens), **{name: plain(url, tokens) for name, url in urls.items()}}
            calls |= {"floor SDK": through_sdk(least, tokens), "SDK": through_sdk(urls["durable"], tokens)}
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                times = timed({**calls, "fsync": lambda file=file: append(file)})
            late = statistics.median(times["fsync"])
            for name in (*urls, "SDK"):
                p50, p90, p99 = (statistics.quantiles(times[name], n=100)[at - 1] for at in (50, 90, 99))
                least_p50 = statistics.median(times["floor SDK" if name == "SDK" else "floor"])
                goal = goal_ms(name, tokens, least_p50, fsync)
                missed += goal is not None and p50 > goal
                print(
                    f"{name:16}{tokens:>8}{p50:>8.2f}{p90:>7.2f}{p99:>7.2f}{least_p50:>7.2f}{p50 / least_p50:>7.2f}"
                    f"{'' if goal is None else f'{goal:.2f}':>9}"
                )
        print("\nwithout gaps, 4,096 tokens: p50 ms", end="")
        for name, url in {"floor": least, **urls}.items():
            print(f"; {name} {statistics.median(timed({name: plain(url, 4096)}, gaps=False)[name]):.2f}", end="")
        print(f"; one fsync of 4 KiB {fsync:.2f} (with gaps {late:.2f})")
    return 1 if missed else 0


def goal_ms(name: str, tokens: int, least: float, fsync: float) -> float | None:
    """Return the goal of a call in milliseconds, from those of the floor and of an fsync; None if there is none."""
    return {("durable", 4096): 2 * (least + fsync), ("durable", 32768): 1.5 * least}.get((name, tokens))


def append(file: BinaryIO) -> None:
    """Write 4 KiB for good."""
    file.write(b"x" * 4096)
    os.fsync(file.fileno())


def plain(url: str, tokens: int) -> Call:
    """Return a call over one connection that is kept."""
    connection = Connection(url)
    model, number = connection.model(), 0

    def call() -> None:
        nonlocal number
        number += 1
        connection.forward_backward(model, number, tokens)

    return call


def through_sdk(url: str, tokens: int) -> Call:
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


def timed(calls: dict[str, Call], gaps: bool = True) -> dict[str, list[float]]:
    """Return milliseconds of calls that alternate, with gaps between them so that no rhythm of theirs meets another."""
    draw = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-10, CALLS):
        for name, call in calls.items():
            if gaps and turn >= 0:
                time.sleep(draw.uniform(0, 0.11))
            start = time.perf_counter()
            call()
            if turn >= 0:
                times[name].append(1000 * (time.perf_counter() - start))
    return times


if __name__ == "__main__":
    sys.exit(main())
