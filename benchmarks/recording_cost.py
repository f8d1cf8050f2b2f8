"""What recording the figures and rollouts of runs costs the service: CPU time a call, with and without.

    python benchmarks/recording_cost.py

Two services with the durable log as shipped, whose engines compute nothing; the executor of one records nothing. In
turn, 32 clients call each for some seconds (`server_capacity.py`): rows of 128 tokens of a supervised loss, of which
figures are recorded, and sampled rows, of which rollouts are recorded, too. CPU time of the API and the engine for a
call, and calls a second. Goal: a supervised call takes at most 1.02 x the CPU time of one that is not recorded; a real
engine's pass, which is not counted here, takes longer than all of it.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import uvloop
from _pairs import describe_machine, ratio
from _server import ENGINE, PACKAGES, served
from server_capacity import load

GOAL = 1.02


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; exit code 1 when the goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=7)
    repetitions = parser.parse_args(arguments).repetitions
    print(describe_machine(PACKAGES))
    print(f"{'rows':12}{'recorded':>10}{'CPU us a call':>15}{'least':>7}{'calls/s':>9}  with / without")
    engines = {"yes": ENGINE, "no": ENGINE.replace("NullEngine", "Unrecorded")}
    found = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        sides = {side: Side(stack, Path(name) / side, engine) for side, engine in engines.items()}
        for rows in ("supervised", "sampled"):
            for turn in range(repetitions + 1):
                for side in sorted(sides, reverse=bool(turn % 2)):
                    sides[side].measure(rows == "sampled", keep=turn > 0)
            found.append(ratio(sides["yes"].spent, sides["no"].spent))
            for side, measured in sides.items():
                shown = f"  {found[-1]}" if side == "yes" else ""
                print(f"{rows:12}{side:>10}{measured.line()}{shown}")
    return 0 if found[0].median <= GOAL else 1


class Side:
    """A service, and what calls of it cost."""

    def __init__(self, stack: ExitStack, folder: Path, engine: str) -> None:
        folder.mkdir()
        before = children(os.getpid())
        self._url = stack.enter_context(served(folder, "durable", backend=engine))
        (api,) = children(os.getpid()) - before
        self._processes = [api, *children(api)]
        self.spent: list[float] = []
        self._rates: list[float] = []

    def measure(self, sampled: bool, keep: bool) -> None:
        """Let clients call for some seconds; the first turn is not kept, and clears what an earlier kind measured."""
        before = self._cpu()
        times, seconds = uvloop.run(load(self._url, 0, sampled))
        spent = (self._cpu() - before) / len(times)
        if not keep:
            self.spent, self._rates = [], []
            return
        self.spent.append(spent)
        self._rates.append(len(times) / seconds)

    def line(self) -> str:
        """Return what was measured."""
        return f"{statistics.median(self.spent):>15.0f}{min(self.spent):>7.0f}{statistics.median(self._rates):>9.0f}"

    def _cpu(self) -> float:
        """Return microseconds of CPU time of both processes so far."""
        tasks = (task for process in self._processes for task in Path(f"/proc/{process}/task").iterdir())
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1000


def children(process: int) -> set[int]:
    """Return the processes that a process has started."""
    return {int(text) for text in Path(f"/proc/{process}/task/{process}/children").read_text().split()}


if __name__ == "__main__":
    sys.exit(main())
