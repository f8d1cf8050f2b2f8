"""How long the service needs to start, and is away after `kill -9`, of all of it and of its engine alone: wall time.

    python benchmarks/server_recovery.py

With an engine that computes nothing ("ledger") and with a tiny random Qwen3 ("pool": the import of torch is most of its
start), each once with a fresh snapshot and once with 200 operations behind the last one (100 passes, 100 steps), which
are done again when the model is next asked for something. Seconds from the kill until `/readyz` says yes, and until a
pass is done that was asked for as soon as somebody listened. After a kill of everything the service is started at once.
Before that: seconds from the command until `/readyz` says yes, on a new data folder and on one that is there.

No goal for the seconds. What was done again is counted, and a pass after the kill must tell what one before it told:
which rows were applied (ledger), or log-probabilities within 1e-5 (pool); otherwise the exit code is 1.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from _pairs import describe_machine
from _serving import NAME, PACKAGES, Raw, RawModel, Served, arrays, fsync_ms, is_ready, ledger, metric, pool, ready, row

from twinkle.testing import tiny_model

ROW = row(range(1, 18))
SEED, SECONDS = 3, 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; exit code 1 when something was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--operations", type=int, default=200, help="that are done again in the second case")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--only", choices=("ledger", "pool"))
    options = parser.parse_args(arguments)
    print(describe_machine([*PACKAGES, "torch", "transformers"]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_model(folder / "model", "qwen3")
        print(f"one fsync of 4 KiB: {fsync_ms(folder):.2f} ms; {options.repetitions} times each, seconds from the kill")
        for backend in (options.only,) if options.only else ("ledger", "pool"):
            starts = [started(folder / f"{backend}-start-{n}", backend, model) for n in range(options.repetitions)]
            new, again = map(shown, zip(*starts, strict=True))
            print(f"{backend:8}starts on a new directory{new}, on one that is there{again}")
        print(f"{'':8}{'killed':12}{'done again':>11}{'ready':>24}{'first future':>24}")
        for backend in (options.only,) if options.only else ("ledger", "pool"):
            for killed in ("everything", "the engine"):
                for count in (0, options.operations):
                    times = [
                        away(folder / f"{backend}-{killed[-6:]}-{count}-{number}", backend, model, killed, count)
                        for number in range(options.repetitions)
                    ]
                    print(f"{backend:8}{killed:12}{count:>11}" + "".join(map(shown, zip(*times, strict=True))))
    return 0


def shown(seconds: Sequence[float]) -> str:
    """Return a column."""
    return f"{f'{statistics.median(seconds):.2f} ({min(seconds):.2f} .. {max(seconds):.2f})':>24}"


def started(data: Path, backend: str, model: Path) -> tuple[float, float]:
    """Return the seconds until a service is ready on a new directory, and on the same one later."""
    service = pool(data, model, {"name": NAME}) if backend == "pool" else ledger(data, {"name": NAME})
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        service.start()
        seconds.append(time.perf_counter() - begin)
        service.stop()
    return seconds[0], seconds[1]


def away(data: Path, backend: str, model: Path, killed: str, count: int) -> tuple[float, float]:
    """Let a service work, kill it, and return the seconds until it was ready and until the first future was over.

    Args:
        data: its directory, new.
        backend: "ledger" or "pool".
        model: folder of the model.
        killed: "everything" or "the engine".
        count: operations behind the last snapshot; 0 is a fresh snapshot.
    """
    settings = {"name": NAME, "snapshot_steps": 10**6 if count else 1, "times": {"snapshot": 3600.0}}
    service = pool(data, model, settings) if backend == "pool" else ledger(data, settings)
    try:
        service.start()
        with Raw(service.url) as raw:
            trained = raw.model(lora={"seed": SEED})
            for _ in range(count // 2 or 1):
                trained.forward_backward([ROW])
                trained.step(learning_rate=1e-3)
            if not count:
                wait_for_snapshot(service)
            told = "logprobs" if backend == "pool" else "applied"
            wanted = arrays(trained.forward([ROW]), told)[0]
        times = killed_and_back(service, killed, trained, wanted, told)
        again = count and count // 2 * 2 + 1  # its creation, too
        found = metric(service, "twinkle_replays_total") - 1  # the pass that only looked
        if found != again:
            raise SystemExit(f"{found:.0f} operations were done again instead of {again}")
        return times
    finally:
        service.stop()


def killed_and_back(
    service: Served, killed: str, model: RawModel, wanted: "np.ndarray", told: str
) -> tuple[float, float]:
    """Kill a service, bring it back, and compare what a pass tells under a name; returns the seconds.

    Raises:
        SystemExit: its model is another one now.
    """
    begin = time.perf_counter()
    if killed == "everything":
        service.kill()
        service.url = ""
        service.start(wait=False)
        until(lambda: bool(service.url), "the service did not start again")
    else:
        service.kill_engine()
        wait_for_death(service.url)
    with Raw(service.url) as raw:
        request = RawModel(raw, model.id, model.last).submit_pass([ROW], forward_only=True)
        up = ready(service.url)
        output = raw.result(request, "pass")
    over = time.perf_counter()
    found = arrays(output, told)[0]
    if found.shape != wanted.shape or not np.allclose(found, wanted, rtol=0, atol=1e-5):
        raise SystemExit(f"{told} were {wanted} before the kill, and are {found} after it")
    return up - begin, over - begin


def wait_for_snapshot(service: Served) -> None:
    """Wait until the newest state of the model is on the disk."""
    until(lambda: metric(service, "twinkle_snapshot_bytes_total") > 0, "no snapshot was made")


def wait_for_death(url: str) -> None:
    """Wait until the service knows that its engine is gone."""
    until(lambda: not is_ready(url), "the engine did not die")


def until(holds: Callable[[], bool], words: str) -> None:
    """Wait for something.

    Raises:
        SystemExit: it did not come.
    """
    end = time.perf_counter() + SECONDS
    while not holds():
        if time.perf_counter() > end:
            raise SystemExit(words)
        time.sleep(0.001)


if __name__ == "__main__":
    sys.exit(main())
