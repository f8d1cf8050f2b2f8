"""The supervisor of the runtime with engines of a script, on the simulated clock."""

import asyncio
import random
from typing import Any
from unittest import mock

from service_simulation.reference import demand
from service_simulation.virtual import Clock

from twinkle_server.engine import messages
from twinkle_server.engine.messages import LinkClosed, Message
from twinkle_server.runtime import supervision
from twinkle_server.runtime.supervision import PAUSES, EngineFailed, Supervisor
from twinkle_server.settings import Times

TIMES = Times(start=20.0, deadline=10.0, drain=5.0, silent=3.0, stopped=8.0)
INFO = {"name": "m", "context": 8, "vocabulary": 9, "losses": ["a"], "paths": [{"x": 1}]}
LOST = {
    "start": "the engine was not ready within 20 s",
    "pass": "a pass took longer than 10 s",
    "stop": "the engine's process was stopped for longer than 8 s",
}


class ScriptedChild:
    """An engine that says what a part of the simulation lets it say.

    Attributes:
        sent: messages of the service.
        over: how its process ended.
        killed: when the service killed it.
        free: whether it can take more messages now.
    """

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[Message | None] = asyncio.Queue()
        self.sent: list[Message] = []
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.last_words = "its last words"
        self.pid = 77
        self.killed: float | None = None
        self.free = asyncio.Event()
        self.free.set()

    def put(self, message: Message) -> None:
        """See `supervision.Child`, like the other methods that the service calls."""
        if self.over.done():
            raise LinkClosed("the engine closed the socket")
        self.sent.append(message)

    async def room(self) -> None:
        await self.free.wait()

    async def receive(self) -> Message:
        message = await self.inbox.get()
        if message is None:
            raise LinkClosed("the engine closed the socket")
        return message

    def say(self, kind: str, body: bytes = b"", /, **head: Any) -> None:
        """Send a message to the service."""
        self.inbox.put_nowait(Message(kind, head, body))

    def die(self, why: str = "exit status 1") -> None:
        if not self.over.done():
            self.over.set_result(why)
        self.inbox.put_nowait(None)

    def kill(self) -> None:
        self.killed = self.killed or asyncio.get_running_loop().time()
        self.die("killed by SIGKILL")

    async def wait(self) -> str:
        return await self.over


class _Listener:
    def __init__(self) -> None:
        self.waiting = 0
        self.ups: list[Any] = []
        self.downs: list[tuple[set[int], str]] = []
        self.heard: list[Message] = []

    def engine_up(self, child: Any, info: Any) -> None:
        self.ups.append((child, info))

    async def engine_down(self, blamed: set[int], why: str) -> None:
        self.downs.append((set(blamed), why))
        await asyncio.sleep(0)

    def message(self, message: Message) -> None:
        if message.type == "bad":
            raise RuntimeError("what the engine says is nonsense")
        self.heard.append(message)


async def supervise(clock: Clock, draw: random.Random) -> None:
    """An engine that dies is started again, later each time; one that hangs, or is stopped, is ended."""
    children: list[ScriptedChild] = []
    starts: list[tuple[float, bool]] = []
    refuse: list[bool] = []
    passed: list[Any] = []

    async def start_child(first: bool) -> Any:
        starts.append((clock.now, first))
        if refuse and refuse.pop():
            raise OSError(12, "Cannot allocate memory")
        children.append(ScriptedChild())
        return children[-1]

    listener = _Listener()
    supervisor = Supervisor(start_child, listener, TIMES)
    supervisor.passed = passed.append
    stopped = [False]
    with mock.patch.object(supervision, "is_stopped", lambda pid: stopped[0] and pid == 77):
        await supervisor.drain()
        demand(supervisor.pid is None and supervisor.silent is None and not supervisor.up, "before its start")
        supervisor = Supervisor(start_child, listener, TIMES)
        supervisor.passed = passed.append
        await supervisor.wait_ready()
        task = supervisor.start()
        await asyncio.sleep(0.01)
        if draw.random() < 0.25:
            await _never_ready(supervisor, listener, children, starts, draw, clock)
            return
        waiting = asyncio.create_task(supervisor.wait_ready())
        await asyncio.sleep(19.0)
        demand(not waiting.done() and not supervisor.up and not listener.ups, "it is ready before it says so")
        demand(supervisor.pid == 77 and supervisor.silent is None, "its process")
        await _ready(supervisor, listener, children)
        await asyncio.sleep(0.01)
        demand(waiting.done() and waiting.exception() is None, "nobody is told that it is ready")
        deaths = 0
        for restarts in range(1, draw.choice([4, 9])):
            child, since, before, downs = children[-1], starts[-1][0], len(starts), len(listener.downs)
            end = draw.choice(["die", "die", "die at once", "pass", "stop", "bad", "late"])
            worked, blamed, why, over = await _live(end, supervisor, listener, child, passed, stopped, draw, clock)
            deaths = 1 if worked or over - since > 60.0 else deaths + 1
            demand(listener.downs[-1] == (blamed, why), f"{listener.downs[-1]}, not {(blamed, why)}")
            demand(supervisor.restarts == restarts and not supervisor.up and supervisor.silent is None, "it is gone")
            words = supervisor.troubled or ""
            demand(why in words and (why != "the engine died" or "exit status 1" in words or end == "bad"), words)
            pause = PAUSES[min(deaths - 1, len(PAUSES) - 1)]
            refused = pause > 0.0 and draw.random() < 0.2
            refuse[:] = [True] if refused else []
            await asyncio.sleep(max(0.0, over + pause - 0.005 - clock.now))
            demand(pause == 0.0 or len(starts) == before, "it is started again too early")
            await asyncio.sleep(0.02)
            demand(len(starts) == before + 1 and not starts[-1][1], f"it is not started {pause} s after its death")
            if refused:
                demand("could not be started" in (supervisor.troubled or ""), f"{supervisor.troubled}")
                demand(len(listener.downs) == downs + 1, "the end of an engine that never was is told")
                supervisor.restarts -= 1
                await asyncio.sleep(PAUSES[min(deaths, len(PAUSES) - 1)] + 0.01)
                deaths += 1
                demand(len(starts) == before + 2, "it is not started after a start failed")
            await _ready(supervisor, listener, children)
        await _end(supervisor, listener, children, starts, task, stopped, draw, clock)


async def _ready(supervisor: Supervisor, listener: _Listener, children: list[ScriptedChild]) -> None:
    ups = len(listener.ups)
    children[-1].say(messages.READY, info=INFO)
    await asyncio.sleep(0.001)
    demand(len(listener.ups) == ups + 1 and supervisor.up and supervisor.troubled is None, "it is not up")
    child, info = listener.ups[-1]
    demand(child is children[-1] and info.losses == ("a",) and info.paths == ({"x": 1},), f"{info}")


async def _never_ready(
    supervisor: Supervisor, listener: _Listener, children: Any, starts: Any, draw: random.Random, clock: Clock
) -> None:
    """The first engine ends before it is ready: no other one is started."""
    begin, dies = clock.now, draw.random() < 0.5
    if dies:
        await asyncio.sleep(1.0)
        children[-1].die()
    try:
        await supervisor.wait_ready()
        demand(False, "it is ready")
    except EngineFailed as error:
        end = "exit status 1" if dies else "killed by SIGKILL"
        demand(f"before it was ready ({end}):\nits last words" in str(error), f"{error}")
    demand(clock.now - begin < (1.1 if dies else 20.1), "how long it may take")
    await asyncio.sleep(100.0)
    demand(len(starts) == 1 and starts[0][1] and not listener.ups, f"{starts}")
    demand(dies or LOST["start"] in (supervisor.troubled or ""), f"{supervisor.troubled}")
    await supervisor.stop()


async def _live(
    end: str,
    supervisor: Supervisor,
    listener: _Listener,
    child: ScriptedChild,
    passed: list[Any],
    stopped: list[bool],
    draw: random.Random,
    clock: Clock,
) -> tuple[bool, set[int], str, float]:
    """Let an engine work, and end; return whether it worked, whom to blame, why, and when it was gone."""
    downs = len(listener.downs)
    worked, blamed = False, set[int]()
    if end == "die at once":
        child.die()
        await asyncio.sleep(0.001)
        return False, set(), "the engine died", clock.now
    if draw.random() < 0.7:
        child.say(messages.ALIVE)
        await asyncio.sleep(2.9)
        demand(supervisor.silent is None, "it is silent too early")
        await asyncio.sleep(0.2)
        demand(supervisor.silent is not None and 3.0 < supervisor.silent < 3.2, f"silent for {supervisor.silent}")
        child.say(messages.ALIVE)
        await asyncio.sleep(0.001)
        demand(supervisor.silent is None, "it is silent, although it was heard of")
    for number in range(draw.choice([0, 1, 3])):
        child.say(messages.BEGIN, ids=[number, number + 10])
        await asyncio.sleep(1.0)
        blamed = {number, number + 10}
        if draw.random() < 0.7:
            heard = len(listener.heard)
            child.say(messages.DONE, id=number)
            await asyncio.sleep(0.001)
            demand([each.head for each in listener.heard[heard:]] == [{"id": number}], "what was done is not told")
            blamed.discard(number)
        if draw.random() < 0.5:
            passes = len(passed)
            child.say(messages.PASSED, kind="pass", tokens=number)
            await asyncio.sleep(0.001)
            demand(passed[passes:] == [{"kind": "pass", "tokens": number}], "a pass is not counted")
            worked = True
    listener.waiting = 0
    await asyncio.sleep(draw.choice([0.0, 30.0, 70.0]))  # it may be idle for as long as it likes
    demand(len(listener.downs) == downs, "an idle engine is ended")
    if end == "die":
        child.die()
        await asyncio.sleep(0.001)
        return worked, blamed, "the engine died", clock.now
    if end == "bad":
        child.say("bad")
        await asyncio.sleep(0.001)
        demand(child.killed is not None, "an engine that talks nonsense goes on")
        return worked, blamed, "the engine died", clock.now
    await asyncio.sleep(0.37)
    listener.waiting, begin = 1, clock.now
    if end == "late":  # signs of life say nothing of the work; answers do
        for _ in range(6):
            await asyncio.sleep(4.0)
            child.say(messages.SNAPSHOTTED, folder="f")
        await asyncio.sleep(0.001)
        demand(len(listener.downs) == downs, "an engine that works is ended")
        begin = clock.now
    stopped[0] = end == "stop"
    limit, why = (8.0, LOST["stop"]) if end == "stop" else (10.0, LOST["pass"])
    if end == "stop" and draw.random() < 0.5:
        await asyncio.sleep(6.0)
        stopped[0] = False
        await asyncio.sleep(1.5)
        child.say(messages.SNAPSHOTTED, folder="f")
        await asyncio.sleep(0.001)
        stopped[0], begin = True, clock.now
    while child.killed is None:
        await asyncio.sleep(0.05)
        child.say(messages.ALIVE)
        demand(clock.now - begin < limit + 2.3, f"{end}: it is not ended within {clock.now - begin:.1f} s")
    demand(child.killed - begin > limit - 1.1, f"{end}: it was ended after {child.killed - begin:.1f} s")
    stopped[0], listener.waiting = False, 0
    await asyncio.sleep(0.001)
    return worked, blamed, why, child.killed


async def _end(
    supervisor: Supervisor,
    listener: _Listener,
    children: Any,
    starts: Any,
    task: Any,
    stopped: Any,
    draw: random.Random,
    clock: Clock,
) -> None:
    child, before, begin = children[-1], len(starts), clock.now
    how = draw.choice(["drained", "dies", "never", "stop", "closed"])
    if how == "stop":
        await supervisor.stop()
        demand(task.done() and child.killed is not None and len(starts) == before, "it is not ended")
        return
    if how == "closed":
        child.over.set_result("exit status 1")
    listener.waiting, stopped[0] = 1, True
    draining = asyncio.create_task(supervisor.drain())
    await asyncio.sleep(1.0)
    demand(how == "closed" or [each.type for each in child.sent[-1:]] == [messages.DRAIN], "it is not asked to end")
    if how == "drained":
        child.say(messages.DRAINED)
    elif how == "dies":
        child.die()
    await asyncio.sleep(0.01)
    demand(draining.done() is (how != "never"), f"{how}: whether the drain is over")
    await asyncio.wait([draining])
    demand(draining.exception() is None, f"{draining.exception()}")
    demand(clock.now - begin <= (5.1 if how == "never" else 1.1), f"the drain took {clock.now - begin} s")
    await asyncio.sleep(25.0)
    demand(len(starts) == before and (child.killed is None or how == "dies"), "an engine that ends is ended by force")
    await supervisor.stop()
    demand(task.done() and child.killed is not None, "it is not ended")
    waiting = asyncio.create_task(supervisor.wait_ready())
    await asyncio.wait([waiting])
