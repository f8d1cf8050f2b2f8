"""What the service keeps in memory and on the disk after many operations; the engine computes nothing.

    python benchmarks/server_memory.py

Eight clients with a model each send passes of one row of 64 tokens and, after every fourth, an optimizer step, and wait
for each. Resident size of both processes after 1,000, 10,000 and 50,000 operations; goal: together they grow by at most
64 MiB from the first to the last. With `--operations 500000`, the goal is at most 20 bytes an operation from 50,000 on:
all caches are full then. Each step must have seen the four passes before it.

Then the service ends, and its retention runs as it would a day later, when all results have gone, and eight days later,
when rows go. The size of the database is shown before and after.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
from _pairs import describe_machine
from _server import ENGINE
from _serving import NAME, PACKAGES, Connection, Processes, create, ledger

from twinkle_server.store.opening import open_store
from twinkle_server.store.retention import Purged

CLIENTS, TOKENS, PASSES_A_STEP = 8, 64, 4
STAGES = (1_000, 10_000, 50_000, 100_000, 200_000, 300_000, 400_000, 500_000)
WARM, MIB_UNTIL_WARM, BYTES_FROM_THEN = 50_000, 64.0, 20.0
DAY = 86400.0


class Client:
    """One client, and what it has done."""

    def __init__(self, url: str, seed: int) -> None:
        self.connection = Connection(url)
        self.model = create(self.connection, seed)
        self.done = 0

    def work(self, until: int) -> None:
        """Do operations, one after the other, until there were so many."""
        while self.done < until:
            self.done += 1
            if self.done % (PASSES_A_STEP + 1):
                self.connection.forward_backward(self.model, self.done, TOKENS)
            else:
                self._step()

    def _step(self) -> None:
        """Take a step, which counts the passes before it.

        Raises:
            SystemExit: there were more or fewer.
        """
        asked = self.connection.json("/optim_step", model_id=self.model, seq_id=self.done, adam_params={})
        metrics = orjson.loads(self.connection.result(asked["request_id"]))["metrics"]
        if metrics.get("grad_norm") != PASSES_A_STEP:
            raise SystemExit(f"step {self.done} saw {metrics} instead of {PASSES_A_STEP} passes")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its tables; exit code 1 when the goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--operations", type=int, default=50_000)
    options = parser.parse_args(arguments)
    print(describe_machine(PACKAGES))
    print(f"{CLIENTS} clients, {TOKENS} tokens a pass, a step after {PASSES_A_STEP} passes")
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "data"
        sizes = load(data, [stage for stage in STAGES if stage <= options.operations] or [options.operations])
        retention(data)
    first, last = min(sizes), max(sizes)
    warm = min(WARM, last)
    growth = sizes[warm] - sizes[first]
    print(f"\nfrom {first:,} to {warm:,} operations: {growth:.1f} MiB   goal <= {MIB_UNTIL_WARM:.0f}")
    share = 0.0
    if last > warm:
        share = (sizes[last] - sizes[warm]) * 2**20 / (last - warm)
        print(f"from {warm:,} to {last:,}: {share:.1f} bytes an operation   goal <= {BYTES_FROM_THEN:.0f}")
    return 0 if growth <= MIB_UNTIL_WARM and share <= BYTES_FROM_THEN else 1


def load(data: Path, stages: Sequence[int]) -> dict[int, float]:
    """Run all operations; returns the resident MiB of both processes together by number of operations."""
    service = ledger(data, {"name": NAME, "backend": ENGINE})
    try:
        service.start()
        clients = [Client(service.url, seed) for seed in range(CLIENTS)]
        processes = Processes.of(service)
        print(f"\n{'operations':>11}{'a second':>10}{'API MiB':>9}{'engine':>8}{'database':>10}")
        sizes: dict[int, float] = {}
        for total in stages:
            start = time.perf_counter()
            before = sum(client.done for client in clients)
            with ThreadPoolExecutor(CLIENTS) as threads:
                list(threads.map(Client.work, clients, [total // CLIENTS] * CLIENTS))
            rate = (total - before) / (time.perf_counter() - start)
            api, engine = processes.resident_mib()
            print(f"{total:>11,}{rate:>10.0f}{api:>9.1f}{engine:>8.1f}{on_disk(data):>10.1f}", flush=True)
            sizes[total] = api + engine
        return sizes
    finally:
        service.stop()


def retention(data: Path) -> None:
    """Throw away what is over as the service does, at later times, and print what is left."""
    print(f"\n{'':20}{'database MiB':>13}")
    print(f"{'when it has ended':20}{on_disk(data):>13.1f}")
    for words, later in (("a day later", 1.1 * DAY), ("eight days later", 8.0 * DAY)):
        purged = asyncio.run(purge(data, time.time() + later))
        print(f"{words:20}{on_disk(data):>13.1f}   results {purged.results:,}, rows {purged.operations:,}")
    print("(16 MiB of free pages stay, for what comes next)")


async def purge(data: Path, now: float) -> Purged:
    """Throw away what is over at a time, and close the database, which puts its log into it."""
    store = open_store(data)
    try:
        return await store.retention.purge(now)
    finally:
        store.close()


def on_disk(data: Path) -> float:
    """Return the MiB of the database, its log included."""
    return sum(file.stat().st_size for file in data.glob("twinkle.db*")) / 2**20


if __name__ == "__main__":
    sys.exit(main())
