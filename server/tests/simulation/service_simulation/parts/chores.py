"""Periodic chores, and what is remembered of the last pass."""

import asyncio
import random
from typing import Any

from service_simulation.reference import demand
from service_simulation.virtual import Clock

from twinkle_server.runtime.core import Janitor
from twinkle_server.runtime.status import FORGOTTEN, LastPass


async def count_turns(clock: Clock, draw: random.Random) -> None:
    """What failed last and has not worked since is told for a while."""
    last = LastPass()
    shown = {"pass": "pass", "optim_step": "optimizer step", "sample": "sampling step"}
    turns: dict[str, set[bool]] = {}
    failed: dict[str, float] = {}
    for _ in range(60):
        kind: Any = draw.choice(["forward", "forward_backward", "optim_step", "sample", "save", "create", "load"])
        name = "pass" if kind.startswith("forward") else kind
        what = draw.choice(["ended"] * 3 + ["passed", "passed", "sleep", "anew"])
        if what == "ended":
            category: Any = draw.choice([None, "user", "server", "unknown"])
            last.ended(kind, category)
            if name in shown and category in (None, "server"):
                turns.setdefault(name, set()).add(category is None)
        elif what == "passed":
            last.passed(name)
            ended = turns.pop(name, set())
            if True in ended:
                failed.pop(name, None)
            elif ended:
                failed[name] = clock.now
        elif what == "sleep":
            await asyncio.sleep(draw.choice([1.0, 29.0, FORGOTTEN]))
        elif draw.random() < 0.2:
            last.reset()
            turns.clear()
            failed.clear()
        fresh = [
            f"the last {shown[each]} failed as a whole; the log says why"
            for each, since in failed.items()
            if clock.now - since < FORGOTTEN
        ]
        demand(last.trouble == (fresh[0] if fresh else None), f"{last.trouble}, not {fresh}")


async def do_chores(clock: Clock, draw: random.Random) -> None:
    """Each chore is done again so many seconds after it was done, whether or not it failed."""
    janitor = Janitor()
    done: dict[str, list[tuple[float, float]]] = {}

    def chore(name: str, every: float, takes: float, fails: bool) -> None:
        runs = done.setdefault(name, [])

        async def work() -> None:
            begin = clock.now
            await asyncio.sleep(takes)
            runs.append((begin, clock.now))
            if fails:
                raise RuntimeError("a chore fails")

        janitor.add(name, every, work)

    began = clock.now
    for name, every in (("a", 2.0), ("b", 3.0), ("c", 7.0)):
        chore(name, every, draw.choice([0.0, 0.25]), draw.random() < 0.4)
    await asyncio.sleep(1.0)
    demand(not any(done.values()), "a chore is done before it is due")
    janitor.start()
    await asyncio.sleep(50.0)
    await janitor.stop()
    demand(janitor._task is not None and janitor._task.done(), "the chores are not ended")
    ended = clock.now
    for name, every in (("a", 2.0), ("b", 3.0), ("c", 7.0)):
        previous = began
        for begin, end in done[name]:
            demand(
                every - 1e-6 <= begin - previous <= every + 0.76, f"{name} began {begin - previous} s after the last"
            )
            previous = end
        demand(ended - previous <= every + 1.0, f"{name} is done no more")
    counts = {name: len(runs) for name, runs in done.items()}
    await asyncio.sleep(20.0)
    demand(counts == {name: len(runs) for name, runs in done.items()}, "a chore is done after the end")
    await Janitor().stop()
