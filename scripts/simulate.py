"""Run simulations of the service: `python scripts/simulate.py SEED [--trace]`, or `--from 0 --seeds 1000`."""

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "server" / "tests" / "simulation")]


def main() -> int:
    """Run, and return the exit status: 1 if a simulation failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", nargs="?", type=int, help="run one simulation")
    parser.add_argument("--trace", action="store_true", help="print what happens in it")
    parser.add_argument("--from", dest="first", type=int, default=0, help="first of several seeds")
    parser.add_argument("--seeds", type=int, default=100, help="number of seeds")
    parser.add_argument(
        "--size", type=int, default=1, choices=range(1, 17), metavar="1..16", help="multiplies the number of operations"
    )
    options = parser.parse_args()
    from service_simulation.simulation import simulate

    if options.seed is not None:
        print(simulate(options.seed, print if options.trace else None, options.size))
        return 0
    begin, operations, requests, failed = time.process_time(), 0, 0, []
    for seed in range(options.first, options.first + options.seeds):
        try:
            report = simulate(seed, size=options.size)
        except Exception as error:
            failed.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
            continue
        operations, requests = operations + report.operations, requests + report.requests
    seconds = time.process_time() - begin
    print(f"{options.seeds} seeds, {operations} operations, {requests} requests, {seconds:.1f} s of CPU time:")
    print(f"{operations / seconds * 3600:,.0f} operations and {requests / seconds * 3600:,.0f} requests a CPU-hour")
    print(f"failed: {failed or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
