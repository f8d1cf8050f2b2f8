"""The queue of a model, and the order of its numbers."""

import asyncio
import random
from collections.abc import Callable

from service_simulation.parts.support import (
    operation,
)
from service_simulation.reference import demand
from service_simulation.virtual import Clock

from twinkle_server.operations import Operation
from twinkle_server.runtime.queues import TRANSITIONS, Closed, Gap, InFlight, ModelQueue, SequenceOrder, State


async def order_numbers(clock: Clock, draw: random.Random) -> None:
    """Items come in any order, and are released in the order of their numbers."""
    first = draw.choice([0, 5])
    order = SequenceOrder[int](first)
    early: dict[int, float] = {}
    used: set[int] = set()
    ready: list[int] = []
    following = first

    def advance() -> None:
        nonlocal following
        while following in used or following in early:
            if following in early:
                ready.append(following)
                del early[following]
            used.discard(following)
            following += 1

    for now in range(60):
        number = draw.randrange(following + 8)
        what = draw.choice(["arrive"] * 6 + ["use", "use", "pop", "pop", "give up", "far", "all"])
        if what == "arrive":
            fresh = number >= following and number not in early and number not in used
            demand(order.arrive(number, number, float(now)) is fresh, f"number {number} arrives")
            if fresh:
                early[number] = float(now)
        elif what == "use":
            order.use_up(number)
            if number >= following:
                early.pop(number, None)
                used.add(number)
        elif what == "pop" and ready:
            demand(order.ready.popleft() == ready.pop(0), "the order of what is ready")
        elif what == "give up":
            dropped = []
            if early:
                following = min(early)
                used = {each for each in used if each >= following}
                while following in early or following in used:
                    if early.pop(following, None) is not None:
                        dropped.append(following)
                    used.discard(following)
                    following += 1
            demand(order.give_up() == dropped, f"given up, not {dropped}")
        elif what == "far":
            far = sorted(each for each in early if each - following > 5)
            demand(order.drop_far(5) == far, f"dropped, not {far}")
            used.update(far)
            for each in far:
                del early[each]
        elif what == "all":
            demand(order.drop_all() == [*ready, *sorted(early)], "what was dropped")
            ready.clear()
            used.update(early)
            early.clear()
        advance()
        gap = Gap(following, min(early.values()), len(early)) if early else None
        demand((order.following, list(order.ready), order.gap()) == (following, ready, gap), f"after {what} {number}")
        hole = range(following, min(early, default=following))
        demand(
            (order.hole(), order.missing()) == (hole, [each for each in hole if each not in used]), "what is missing"
        )
        demand(all(order.holds(each) is (each in early) for each in range(following + 9)), "what is held")
        demand(order.idle is not bool(ready or early), "whether it is idle")


async def change_states(clock: Clock, draw: random.Random) -> None:
    """A model's queue goes through its states; what is illegal is refused."""
    closed = Closed("it is gone") if draw.random() < 0.1 else None
    first, ordered = draw.choice([-1, 3]), draw.random() < 0.9
    queue = ModelQueue("m", "ada", ordered, snapshot_number=first, closed=closed)
    demand((queue.newest_row, queue.snapshot_number, queue.order.following) == (0, first, first + 1), "its beginning")
    state = State.CLOSED if closed else State.DETACHED
    numbers = iter(range(first + 1, 1000))
    ready: list[Operation] = []
    flights: list[InFlight] = []
    sending = leaving = False
    restores: list[asyncio.Future[None] | None] = []  # unanswered; None is for one that drops the model
    deaths = attempts = 0
    distrusted: int | None = None

    def legal(target: State) -> bool:
        return target in TRANSITIONS[state]

    for _ in range(80):
        what = draw.choice(
            ["arrive"] * 4
            + ["send"] * 4
            + ["land"] * 2
            + [
                "attach",
                "attached",
                "failed",
                "leave",
                "release",
                "detached",
                "postpone",
                "resume",
                "died",
                "restore",
                "drop",
                "restored",
                "sending",
                "withdraw",
                "distrust",
                "trust",
                "worked",
            ]
            + ["close"] * (draw.random() < 0.05)
        )
        if what == "arrive":
            new = operation(next(numbers))
            demand(queue.arrive(new, 1.0), "a new number")
            ready.append(new)
            if ordered:
                demand(not queue.arrive(new, 1.0), "a number twice")
        elif what == "send" and ready:
            replay = draw.random() < 0.2
            sent = operation(500 + len(flights) + draw.randrange(400)) if replay else ready.pop(0)
            if sent.id in queue.in_flight:
                continue
            flights.append(InFlight(sent, queue, 5, replay))
            queue.sent(flights[-1])
        elif what == "land" and flights:
            flight = flights.pop(draw.randrange(len(flights)))
            queue.remove_in_flight(flight.operation.id)
            queue.remove_in_flight(flight.operation.id)
        elif what == "attach" and ordered:
            if _moves(queue.start_attaching, legal(State.ATTACHING)):
                state = State.ATTACHING
        elif what == "attached":
            queue.attached()
            state = State.ATTACHED if state is State.ATTACHING else state
        elif what == "failed":
            queue.attaching_failed()
            state = State.DETACHED if state is State.ATTACHING else state
        elif what == "leave":
            queue.leave()
            leaving = ordered
        elif what == "release":
            engine = draw.random() < 0.8
            wanted = None
            if leaving and not (flights or ready or sending or state is State.DETACHING):
                leaving = False
                if state is State.ATTACHED and engine:
                    wanted, state = "detach", State.DETACHING
                elif state is not State.CLOSED:
                    wanted = "detached"
            demand(queue.release(engine) == wanted, f"released, not {wanted}")
        elif what == "detached":
            demand(queue.detached() is (state is State.DETACHING), "whether it was let go of")
            state = State.DETACHED if state is State.DETACHING else state
        elif what == "postpone":
            taken = queue.postpone("lacking")
            if state in (State.CLOSED, State.POSTPONED):
                demand(taken is None, "postponed twice")
            else:
                demand(taken == flights, "what was taken back")
                leaving, state, sending = leaving or state is State.DETACHING, State.POSTPONED, False
                flights.clear()
                demand(queue.next_attempt() == attempts, "the number of attempts")
                attempts += 1
        elif what == "worked":
            queue.worked()
            attempts = 0
        elif what == "resume":
            queue.resume(queue.postponements - 1)
            demand(queue.state is state, "the pause of an earlier postponement ended a later one")
            queue.resume(queue.postponements)
            state = State.DETACHED if state is State.POSTPONED else state
        elif what == "died":
            blamed = {flights[0].operation.id} if flights and draw.random() < 0.5 else set()
            some = {each.id for each in ready[::2]} | {each.operation.id for each in flights}
            demand(queue.ready_among(some) == ready[::2], "which of them are ready")
            demand(queue.engine_died(blamed) == flights, "what the engine had")
            again = [flight.operation for flight in flights if not flight.replay]
            queue.put_back(again)
            ready[:0] = again
            leaving, sending = leaving or state is State.DETACHING, False
            state = state if state in (State.CLOSED, State.DETACHED) else State.DETACHED
            flights.clear()
            if any(each is not None for each in restores):
                deaths += not blamed
            restores.clear()
        elif what == "restore":
            restores.append(answered := asyncio.get_running_loop().create_future())
            queue.start_restoring(answered)
        elif what == "drop":
            restores.append(None)
            queue.start_dropping()
        elif what == "restored":
            queue.restored()
            oldest = restores.pop(0) if restores else None
            if oldest is not None:
                deaths = 0
                demand(oldest.done(), "the wait for the oldest RESTORE did not end")
            demand(not any(each is not None and each.done() for each in restores), "the wait for a later one ended")
        elif what == "sending":
            if sending:
                queue.stop_sending()
            else:
                queue.start_sending()
            sending = not sending
        elif what == "withdraw":
            stranger = operation(2000)
            demand(not queue.withdraw(stranger), "a stranger was withdrawn")
            if ready:
                gone = ready.pop(draw.randrange(len(ready)))
                demand(queue.withdraw(gone), "what waits cannot be withdrawn")
        elif what == "distrust":
            number = draw.randrange(20)
            queue.distrust(number)
            distrusted = number if distrusted is None else min(number, distrusted)
        elif what == "trust":
            await queue.trust()
            distrusted = None
        elif what == "close":
            reason = Closed("closed", "server")
            demand(queue.close(reason) == ready, "what waited when it was closed")
            ready.clear()
            state, closed = State.CLOSED, reason
        running = bool(flights or ready or sending or state is State.DETACHING)
        facts = {
            "state": state,
            "closed": closed if state is State.CLOSED else None,
            "sending": sending,
            "running": running,
            "postponed": "lacking" if state is State.POSTPONED else None,
            "restoring": any(each is not None for each in restores),
            "dropped": not restores,
            "may_send": not sending and state in (State.DETACHED, State.ATTACHED),
            "must_attach": ordered and state is not State.ATTACHED,
            "restore_deaths": deaths,
            "idle": not running and state is not State.ATTACHED and not restores,
            "distrusts": distrusted is not None,
            "head": ready[0] if ready else None,
        }
        found = {name: getattr(queue, name) for name in facts}
        demand(found == facts, f"after {what}: {found}, not {facts}")
        demand(
            list(queue.in_flight.values()) == flights and list(queue.order.ready) == ready, f"its lists after {what}"
        )
        again = [each.operation.number for each in flights if not each.replay] + [each.number for each in ready]
        for number in (0, 5, 12, 30):
            agrees = (distrusted is None or number < distrusted) and all(number < each for each in again)
            demand(queue.agrees_with(number) is agrees, f"whether it agrees with {number} after {what}")
    late = operation(next(numbers) + 1)
    if ordered and state is not State.CLOSED:
        queue.arrive(late, 1.0)
        demand(
            not queue.running or bool(ready or flights or sending or state is State.DETACHING), "it waits for a number"
        )
        demand(
            not queue.idle and queue.withdraw(late) and not queue.order.holds(late.number), "an early one is withdrawn"
        )


def _moves(move: Callable[[], None], legal: bool) -> bool:
    try:
        move()
    except RuntimeError:
        demand(not legal, "a legal change of state is refused")
        return False
    demand(legal, "an illegal change of state is made")
    return True
