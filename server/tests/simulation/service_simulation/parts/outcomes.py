"""The writer of outcomes."""

import asyncio
import itertools
import random
from typing import Any

from service_simulation.parts.support import (
    operation,
)
from service_simulation.reference import demand
from service_simulation.virtual import Clock

from twinkle_server.errors import Busy, LeaseLost
from twinkle_server.operations import Operation, Outcome
from twinkle_server.runtime.outcomes import Outcomes


class _Writes:
    def __init__(self, draw: random.Random, clock: Clock) -> None:
        self.draw, self.clock = draw, clock
        self.written: list[int] = []
        self.bad: set[int] = set()
        self.full_until = 0.0
        self.lost = False
        self.pause: float | None = None
        self.tries: list[float] = []

    async def finish(self, outcomes: Any) -> list[Outcome]:
        self.tries.append(self.clock.now)
        await asyncio.sleep(self.pause if self.pause is not None else self.draw.choice([0.0, 0.01]))
        if self.lost:
            raise LeaseLost("another process writes")
        if self.clock.now < self.full_until:
            raise self.draw.choice([Busy("the disk is full"), OSError(28, "No space left")])
        if any(outcome.operation in self.bad and outcome.result is not None for outcome in outcomes):
            raise ValueError("it cannot be written")
        self.written += [outcome.operation for outcome in outcomes]
        return list(outcomes)


async def write_outcomes(clock: Clock, draw: random.Random) -> None:
    """What the engine did is written in order, once, and told; a full disk delays it."""
    journal: Any = _Writes(draw, clock)
    told: list[tuple[int, str | None]] = []
    lost: list[str] = []
    unwritten: list[int] = []
    events: list[Any] = []

    def written(operation: Operation, outcome: Outcome) -> None:
        told.append((operation.id, outcome.error))
        events.append(operation.id)
        if draw.random() < 0.1:
            raise RuntimeError("who is told fails")

    outcomes = Outcomes(journal, written, lost.append, lambda operation: unwritten.append(operation.id))
    await outcomes.flush()
    outcomes.start()
    wanted: list[Any] = []
    bad: list[int] = []
    for number in range(60):
        what = draw.choice(["put"] * 6 + ["then", "flush", "full", "bad", "sleep"])
        if what in ("put", "bad"):
            each = operation(number, queue=draw.choice(["m", "n"]))
            if what == "bad":
                journal.bad.add(each.id)
                bad.append(each.id)
            outcomes.put(each, Outcome(each.id, b"result"))
            wanted.append(each.id)
        elif what == "then":

            def job(number: int = number) -> Any:
                async def run() -> None:
                    events.append(f"job {number}")

                return run()

            outcomes.then(job)
            wanted.append(f"job {number}")
        elif what == "flush":
            await outcomes.flush()
            demand(events == wanted, f"after a flush: {events}, not {wanted}")
            demand(outcomes.trouble is None, f"trouble: {outcomes.trouble}")
        elif what == "full":
            await outcomes.flush()
            begin, journal.full_until, journal.tries = clock.now, clock.now + 20.0, []
            each = operation(number)
            outcomes.put(each, Outcome(each.id, b"result"))
            wanted.append(each.id)
            await asyncio.sleep(1.0)
            demand(
                (outcomes.trouble is not None and "disk" in outcomes.trouble) or "space" in str(outcomes.trouble),
                f"trouble: {outcomes.trouble}",
            )
            demand(each.id not in events, "it is told before it is written")
            await asyncio.sleep(25.0)
            demand(events == wanted and outcomes.trouble is None, "it is not written when the disk takes it")
            pauses = [round(after - before, 1) for before, after in zip(journal.tries, journal.tries[1:], strict=False)]
            demand(
                pauses[-1] >= 5.0 and all(b <= 2 * a + 0.2 and b <= 5.1 for a, b in itertools.pairwise(pauses)),
                f"it was tried after {pauses} s from {begin}",
            )
            demand(pauses == sorted(pauses) and pauses[0] < 0.2, f"it was tried after {pauses} s")
        elif what == "sleep":
            await asyncio.sleep(0.1)
    await outcomes.flush()
    demand(events == wanted, f"{events}, not {wanted}")
    demand(sorted(journal.written) == sorted(each for each in wanted if isinstance(each, int)), "what was written")
    demand(unwritten == bad, f"{unwritten} cannot be written, not {bad}")
    demand(
        dict(told)
        == {
            each: "the result could not be written" if each in bad else None for each in wanted if isinstance(each, int)
        },
        "what was told",
    )
    await _withdraw(outcomes, journal, clock, events)
    if draw.random() < 0.5:
        journal.lost = True
        outcomes.put(operation(900), Outcome(901, b"result"))
        await outcomes.flush()
        demand(lost == ["another process writes"] and 901 not in events, f"the lease is lost: {lost}")
        demand(outcomes.trouble == "another process writes", "why nothing is written")
        await asyncio.wait_for(outcomes.flush(), 1.0)
    else:
        journal.full_until = clock.now + 1000.0
        outcomes.put(operation(900), Outcome(901, b"result"))
        begin = clock.now
        await outcomes.stop(3.0)
        demand(clock.now - begin < 3.1 and 901 not in events, "how long it tries at the end")
    await outcomes.stop(1.0)
    await Outcomes(journal, written, lost.append).stop(1.0)


async def _withdraw(outcomes: Outcomes, journal: Any, clock: Clock, events: list[Any]) -> None:
    """Take back results of one queue that are not written; failures, and those of others, stay."""
    journal.full_until = clock.now + 10.0
    rows = [operation(800 + number, queue="mn"[number % 2]) for number in range(6)]
    for row in rows:
        outcomes.put(row, Outcome(row.id, None, "failed") if row.number == 804 else Outcome(row.id, b"result"))
        await asyncio.sleep(0.2)
    demand(outcomes.withdraw("m") == [rows[2]], "what is taken back")
    await asyncio.sleep(30.0)
    demand(events[-5:] == [rows[each].id for each in (0, 1, 3, 4, 5)], f"what was taken back is written: {events[-6:]}")
    del events[-5:]
    journal.bad, journal.pause = {rows[0].id}, 0.02
    journal.full_until = clock.now + 1.0
    for row in rows:
        outcomes.put(row, Outcome(row.id, b"result"))
    await asyncio.sleep(0.0)
    await asyncio.sleep(0.0)
    while not outcomes._batch:  # they are written one by one
        await asyncio.sleep(0.01)
        demand(clock.now < journal.full_until + 10.0, "they are never written one by one")
    left = [row for row in rows if any(row is entry[0] for entry in outcomes._batch)]
    demand(outcomes.withdraw("m") == [row for row in left if row.queue_id == "m"], "what is taken back from a batch")
    journal.pause = None
    await outcomes.flush()
