"""Models that are made again a while later, because what that takes is not to be had at the moment."""

import asyncio
import logging

from twinkle_server.runtime.dispatch import Dispatcher
from twinkle_server.runtime.tracks import Track

_log = logging.getLogger(__name__)
PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Seconds before a model is made again, by how often in a row that did not go."""


class Postponing:
    """Takes lanes out of the engine, and lets them be tried again; nothing of them is lost meanwhile.

    Args:
        dispatcher: has the lanes.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def put_off(self, track: Track, why: str) -> None:
        """Take back what the engine has of a model, let it forget the rest, and make the model again later."""
        if track.closed is not None or track.postponed is not None or self._dispatcher.child is None:
            return  # without an engine there is nothing to be forgotten, and the model is made again anyway
        _log.warning("model %s is made again later: %s", track.name, why)
        track.postponed = why
        if track.pump is not None:
            track.pump.cancel()
            track.pump = None
        flights = list(track.flying.values())
        for flight in flights:
            self._dispatcher.land(flight.operation.id)
        track.order.ready.extendleft(flight.operation for flight in reversed(flights) if not flight.replay)
        self._dispatcher.forget_there(track)

    def forgotten(self, track: Track) -> None:
        """Say that the engine has forgotten a model that was put off: what it still answered to is behind it."""
        pause = PAUSES[min(track.postponements, len(PAUSES) - 1)]
        track.postponements += 1
        asyncio.get_running_loop().call_later(pause, self._again, track)

    def _again(self, track: Track) -> None:
        track.postponed = None
        self._dispatcher.kick(track)
        self._dispatcher.let_go(track)
