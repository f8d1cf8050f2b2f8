"""Gaps in the numbers of a model: they are given up when the missing request can no longer arrive, and not earlier."""

import asyncio
import random
from typing import Any

from service_simulation.parts.support import operation
from service_simulation.reference import demand
from service_simulation.virtual import Clock

from twinkle_server.errors import SequenceConflict, Unavailable
from twinkle_server.operations import LOST, Operation, Submission
from twinkle_server.runtime.arrivals import Arrivals, Cancellation
from twinkle_server.runtime.queues import InFlight, ModelQueue
from twinkle_server.settings import Times

TIMES = Times(gap_fail=20.0, gap_limit=90.0, resend=35.0)
EVERY = 1.0
"""Seconds between two checks."""


class _Journal:
    """Takes the failures of missing numbers.

    Attributes:
        came: numbers that are in the log already, because their requests arrive at this moment.
        fails: the disk is full.
        refused: what was written.
    """

    def __init__(self) -> None:
        self.came: set[int] = set()
        self.fails = False
        self.refused: list[Submission] = []

    async def submit(self, submission: Submission) -> Any:
        await asyncio.sleep(0.01)
        if self.fails:
            raise Unavailable("the disk is full")
        if submission.number in self.came:
            raise SequenceConflict("the number was used")
        self.refused.append(submission)


class _Dispatcher:
    """What the cancellation needs of the dispatcher; queues of models that no engine serves."""

    def __init__(self) -> None:
        self.queues: dict[str, ModelQueue] = {}
        self.failed: list[tuple[Operation, str, str]] = []
        self.cancelled: list[Operation] = []
        self.calls: list[Any] = []

    def fail(self, each: Operation, reason: str, category: str = "server") -> None:
        self.failed.append((each, reason, category))

    def send_ready(self, queue: ModelQueue) -> None:
        self.calls.append(("send_ready", queue.name))

    def release(self, queue: ModelQueue) -> None:
        self.calls.append(("release", queue.name))

    def cancel(self, each: Operation) -> None:
        self.cancelled.append(each)

    def withdraw(self, flights: list[InFlight]) -> "list[asyncio.Future[bool]]":
        self.calls += [("withdraw", flight.operation.id) for flight in flights]
        return [asyncio.get_running_loop().create_future() for _ in flights]

    def pop_in_flight(self, number: int) -> None:
        self.calls.append(("land", number))

    def send_order(self, message: Any) -> None:
        self.calls.append((message.type, message.head["id"]))


async def give_up_gaps(clock: Clock, draw: random.Random) -> None:
    """Operations behind a number that never comes fail after `gap_fail`, and not before it may still come."""
    journal, dispatcher = _Journal(), _Dispatcher()
    arrivals = Arrivals(TIMES.resend)
    any_: Any = (dispatcher, journal)
    cancellation = Cancellation(*any_, arrivals, TIMES, 50)
    await _wait_for_a_lost_number(cancellation, arrivals, journal, dispatcher, clock, draw)
    await _stand_still(cancellation, dispatcher, clock, draw)
    await _drop_far_numbers(cancellation, dispatcher, clock)
    await _cancel(cancellation, dispatcher)
    await _leave(cancellation, dispatcher)


async def _check(cancellation: Cancellation, seconds: float) -> None:
    """Let time pass as the janitor does."""
    for _ in range(round(seconds / EVERY)):
        await asyncio.sleep(EVERY)
        await cancellation.give_up_gaps()


def _queue(dispatcher: _Dispatcher, name: str, *numbers: int) -> list[Operation]:
    """Make a queue of which numbers have arrived."""
    queue = dispatcher.queues[name] = ModelQueue(name, "ada", ordered=True)
    new = [operation(number, queue=name) for number in numbers]
    for each in new:
        demand(queue.arrive(each, asyncio.get_running_loop().time()), "a new number")
    dispatcher.failed.clear()
    dispatcher.calls.clear()
    return new


async def _wait_for_a_lost_number(
    cancellation: Cancellation,
    arrivals: Arrivals,
    journal: _Journal,
    dispatcher: _Dispatcher,
    clock: Clock,
    draw: random.Random,
) -> None:
    """Numbers 1 and 2 are missing (or 1 alone), and 5 behind a second gap; the time depends on other requests."""
    await _check(cancellation, 40.0)
    missing = draw.choice([[1], [1, 2]])
    _, *waiting = _queue(dispatcher, "m", 0, *(number for number in (2, 3) if number not in missing))
    begin = clock.now
    how = draw.choice(["nothing", "again", "slow", "for ever", "others"])
    ends, manager, answered = begin + TIMES.gap_fail, None, None
    if how in ("again", "others"):  # a request that was turned away comes again within `resend` seconds
        await _check(cancellation, 10.0)
        with arrivals.watch("ada" if how == "again" else "bob") as done:
            done(503)
        if how == "again":
            ends = clock.now + TIMES.resend
    elif how in ("slow", "for ever"):  # a request that is being received may be the missing one
        manager = arrivals.watch("ada")
        answered = manager.__enter__()
        await _check(cancellation, 10.0)
        if how == "slow":
            answered(200)
            manager.__exit__(None, None, None)
            ends = clock.now + TIMES.gap_fail
        else:
            ends = begin + TIMES.gap_limit
    while clock.now < ends - 1.5:
        await _check(cancellation, 1.0)
        demand(not dispatcher.failed and not journal.refused, f"{how}: given up after {clock.now - begin} s")
    later = operation(5, queue="m")
    demand(dispatcher.queues["m"].arrive(later, clock.now), "a new number")
    fault = draw.choice(["", "", "full", "arrives", "came", "cancelled"])
    if fault == "full":
        journal.fails = True
        await asyncio.sleep(3.0)
        try:
            await cancellation.give_up_gaps()
            demand(False, "nobody is told that the disk is full")
        except Unavailable:
            demand(not dispatcher.failed, "a gap is given up that the log does not know of")
        journal.fails = False
    queue = dispatcher.queues["m"]
    if fault == "came":
        journal.came = set(missing)
        await _check(cancellation, 5.0)
        demand(not dispatcher.failed and queue.order.missing() == missing, "a request arrives, and its gap is given up")
        journal.came = set()
    if fault == "arrives":
        await asyncio.sleep(2.9)
        checking = asyncio.create_task(cancellation.give_up_gaps())
        await asyncio.sleep(0.001)
        queue.order.use_up(missing[0])  # while the failure is being written
        await asyncio.wait([checking])
        checking.result()
        demand(not dispatcher.failed, "a gap that is closed meanwhile is given up")
        if manager is not None and how == "for ever":
            manager.__exit__(None, None, None)
        journal.refused.clear()
        return
    if fault == "cancelled":
        await asyncio.sleep(2.9)
        checking = asyncio.create_task(cancellation.give_up_gaps())
        await asyncio.sleep(0.001)
        checking.cancel()
        await asyncio.sleep(0.1)
        demand([each.number for each in journal.refused] == missing, "what is being written is lost at the end")
        journal.refused.clear()
    await _check(cancellation, 3.0)
    if how == "for ever":
        assert manager is not None
        manager.__exit__(None, None, None)
    seconds = clock.now - begin
    told = [(each.number, each.kind, each.tenant, each.queue_id, each.original) for each in journal.refused]
    demand(told == [(each, "forward", "ada", "m", LOST) for each in missing], f"{how}: {told} after {seconds} s")
    for each in journal.refused:
        demand(f"number {each.number} of this model: it did not arrive within" in str(each.refusal), f"{each.refusal}")
    demand([each for each, _, _ in dispatcher.failed] == waiting, f"{dispatcher.failed} failed, not {waiting}")
    for each, reason, category in dispatcher.failed:
        words = f"cannot run sequence number {each.number} out of order: number {missing[0]} of this model did not"
        demand(reason.startswith(words) and category == "user", reason)
        took = float(reason.partition("did not arrive within ")[2].partition(" s")[0])
        demand(ends - begin - 0.6 <= took <= ends - begin + 7.0, f"{how}: {reason}")
    demand(dispatcher.calls == [("send_ready", "m"), ("release", "m")], f"{dispatcher.calls}")
    demand(queue.order.following == 4 and queue.order.holds(5), "what waits for another number is given up with it")
    gone = len(dispatcher.failed)
    await _check(cancellation, 20.0 if how in ("nothing", "others") else 100.0)
    demand([each for each, _, _ in dispatcher.failed[gone:]] == [later], "the second gap")
    journal.refused.clear()


async def _stand_still(cancellation: Cancellation, dispatcher: _Dispatcher, clock: Clock, draw: random.Random) -> None:
    """Requests that were sent while everything stood still have not been read yet."""
    await _check(cancellation, 100.0)
    (waits,) = _queue(dispatcher, "n", 1)
    await _check(cancellation, 4.0)
    still = draw.choice([8.0, 11.5, 30.0])
    clock.now += still
    counts = still > max(5.0, TIMES.gap_fail / 2)
    await cancellation.give_up_gaps()
    since = clock.now
    ends = since + TIMES.resend if counts else since + TIMES.gap_fail - still - 4.0
    while clock.now < ends - 1.1:
        demand(not dispatcher.failed, f"given up {clock.now - since} s after {still} s of standstill")
        await _check(cancellation, 1.0)
    await _check(cancellation, 4.0)
    demand([each for each, _, _ in dispatcher.failed] == [waits], f"not given up {ends - since} s after {still} s")


async def _drop_far_numbers(cancellation: Cancellation, dispatcher: _Dispatcher, clock: Clock) -> None:
    near, far = _queue(dispatcher, "o", 50, 51)
    await _check(cancellation, 1.0)
    reason = "sequence number 51 is too far above the previous ones"
    demand(dispatcher.failed == [(far, reason, "user")], f"{dispatcher.failed}")
    demand(dispatcher.queues["o"].order.holds(near.number), "a number that is near enough is dropped")


async def _cancel(cancellation: Cancellation, dispatcher: _Dispatcher) -> None:
    """What the engine does not have is cancelled, and a sampling request anywhere; the engine is asked for others."""
    first, second, third = _queue(dispatcher, "p", 0, 1, 3)
    queue = dispatcher.queues["p"]
    queue.sent(InFlight(first, queue, 5))
    (asked,) = cancellation.cancel(first)
    none = [*cancellation.cancel(operation(9, queue="nowhere")), *cancellation.cancel(operation(9, queue="p"))]
    demand(not dispatcher.cancelled and not asked.done(), "what runs, or is not there, is cancelled")
    demand(not any(answer.result() for answer in none), "what is not there counts as cancelled")
    demand(dispatcher.calls == [("withdraw", first.id)], f"{dispatcher.calls}")
    dispatcher.calls.clear()
    ends = cancellation.cancel(second, third)
    demand(all(answer.result() for answer in ends), "what waited counts as not cancelled")
    for each in (second, third):
        demand(not queue.order.holds(each.number) and queue.head is None, "what is cancelled waits")
        demand(not cancellation.cancel(each)[0].result(), "it is cancelled twice")
    samples = dispatcher.queues["s"] = ModelQueue("s", "ada", ordered=False)
    sample = operation(20, queue="s", kind="sample")
    samples.arrive(sample, 1.0)
    samples.sent(InFlight(sample, samples, 5))
    cancellation.cancel(sample)
    demand(dispatcher.cancelled == [third, second, sample], f"{dispatcher.cancelled}: the last first")
    calls = [call for call in dispatcher.calls if call[0] != "send_ready"]
    released = [("release", "p"), ("release", "p"), ("land", 21), ("cancel", 21), ("release", "s")]
    demand(calls == released, f"{calls}")


async def _leave(cancellation: Cancellation, dispatcher: _Dispatcher) -> None:
    """At the end of a session its queues are let go of, and what waits in them fails."""
    (other,) = _queue(dispatcher, "zz:train:0", 0)
    first, late = _queue(dispatcher, "z:train:0", 0, 4)
    cancellation.leave("z:", "it is over")
    demand(dispatcher.failed == [(first, "it is over", "user"), (late, "it is over", "user")], f"{dispatcher.failed}")
    demand(dispatcher.calls == [("release", "z:train:0")], f"{dispatcher.calls}")
    demand(dispatcher.queues["z:train:0"].release(engine=True) == "detached", "it does not leave")
    left = dispatcher.queues["zz:train:0"]
    demand(left.head is other and left.release(engine=True) is None, "the queue of another session leaves")
