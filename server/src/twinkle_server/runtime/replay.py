"""Lanes out of the log: read when something comes for them, and made again in an engine that does not have them."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from twinkle_server.engine import messages
from twinkle_server.engine.messages import Message
from twinkle_server.link import LinkClosed
from twinkle_server.operations import Operation
from twinkle_server.ports import Effects, Journal
from twinkle_server.runtime.child import Child
from twinkle_server.runtime.lanes import Lane
from twinkle_server.runtime.outcomes import Outcomes
from twinkle_server.runtime.tracks import Closed, Track

if TYPE_CHECKING:
    from twinkle_server.runtime.dispatch import Dispatcher

DEATHS = 6
"""Times in a row that engines die of the same before it is given up; chance alone does not do that."""
NEVER_MADE = Closed("this model was never made: its creation failed")


class Corrupted(Exception):
    """A model cannot be made again; says why."""


class Replay:
    """Reads lanes, and does again what an engine lost.

    Args:
        journal: the log.
        outcomes: what the engine did and the log does not say yet.
        effects: the rest of the store.
        dispatcher: sends.
    """

    def __init__(self, journal: Journal, outcomes: Outcomes, effects: Effects, dispatcher: "Dispatcher") -> None:
        self._journal = journal
        self._outcomes = outcomes
        self._effects = effects
        self._dispatcher = dispatcher
        self._loading: dict[str, asyncio.Task[Track]] = {}
        self._deaths: dict[int, int] = {}
        self._suspects = asyncio.Lock()
        self.opened: Callable[[Operation], None] = lambda operation: None

    async def load(self, lane: str, tenant: str) -> Track:
        """Read a lane; several who ask at once get the same."""
        if (loading := self._loading.get(lane)) is None:
            loading = self._loading[lane] = asyncio.create_task(self._load(lane, tenant))
            loading.add_done_callback(lambda _: self._loading.pop(lane, None))
        return await asyncio.shield(loading)

    async def _load(self, lane: str, tenant: str) -> Track:
        await self._outcomes.flush()
        closed = await self._effects.closed(tenant, lane)
        snapshot = await self._journal.snapshot(lane)
        behind = snapshot.number if snapshot else -1
        rows = await self._journal.after(lane, behind)
        track = Track(lane, tenant, ordered=True, order=Lane(behind + 1), closed=Closed(*closed) if closed else None)
        track.behind = behind
        track.seen = max((row.id for row in rows), default=0)
        if any(row.kind == "create" and row.status in ("failed", "cancelled") for row in rows):
            track.closed = track.closed or NEVER_MADE
        self._dispatcher.tracks[lane] = track
        for row in rows:
            if row.status == "pending":
                self.opened(row)
            self._dispatcher.arrive(track, row)
        return track

    async def attach(self, child: Child, track: Track) -> None:
        """Let the engine make a model again: its newest snapshot, then what was done after it, in order.

        Raises:
            Corrupted: something of that is lost.
            LinkClosed: the engine is gone.
        """
        await self._outcomes.flush()
        if track.restore_deaths >= DEATHS:
            raise Corrupted(f"the engine died {DEATHS} times while it read the newest snapshot")
        snapshot = await self._journal.snapshot(track.name)
        rows = await self._journal.after(track.name, snapshot.number if snapshot else -1)
        done = [row for row in rows if row.status == "done"]
        if snapshot or done:
            await self._effects.attached(track.tenant, track.name)
            await self._restore(child, track, snapshot.folder if snapshot else None)
        try:
            for row in done:
                await self._again(child, track, row)
        except LinkClosed:
            raise  # what killed it is counted first
        except Exception:
            for number in list(track.flying):
                self._dispatcher.land(number)
            raise
        track.attached = track.closed is None

    async def _restore(self, child: Child, track: Track, folder: str | None) -> None:
        """Let the engine read a snapshot; one that an engine died of is read while no other such is."""
        restore = Message(messages.RESTORE, {"lane": track.name, "folder": folder})
        async with self._suspects if track.restore_deaths else contextlib.nullcontext():
            restoring = track.restoring = asyncio.get_running_loop().create_future()
            child.put(restore)
            if track.restore_deaths:
                await restoring

    async def _again(self, child: Child, track: Track, operation: Operation) -> None:
        if self._deaths.get(operation.id, 0) >= DEATHS:
            raise Corrupted(f"the engine died {DEATHS} times while it did operation {operation.number} again")
        try:
            payload = operation.payload
            payload = await self._journal.payload(operation.id) if payload is None else payload
            composition = await self._journal.composition(operation.id)
        except LookupError as error:
            raise Corrupted(f"what operation {operation.number} asked for is lost") from error
        await self._dispatcher.fly_again(child, track, operation, payload, composition)

    def killed(self, operation: Operation) -> bool:
        """Whether the engine died while it did an operation again."""
        return operation.id in self._deaths

    def survived(self, operation: Operation) -> None:
        """Say that an operation was done again."""
        self._deaths.pop(operation.id, None)

    def engine_down(self, tracks: list[Track], blamed: set[int]) -> None:
        """Count what an engine was making again when it died."""
        for track in tracks:
            if track.restoring is not None:
                track.restoring = None
                track.restore_deaths += not blamed
            for number in blamed.intersection(track.flying):
                if track.flying[number].replay:
                    self._deaths[number] = self._deaths.get(number, 0) + 1
