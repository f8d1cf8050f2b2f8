"""The session of a client: heartbeats keep it, and with it the models and other resources of the client."""

import threading
import weakref
from typing import Any

from twinkle.logging import get_logger
from twinkle_client.errors import Gone, NotFound, TwinkleClientError
from twinkle_client.http import Connection


class Heartbeats:
    """Sends heartbeats of a session from a daemon thread until it is stopped, collected, or the session has ended.

    Args:
        connection: to the service.
        session_id: the session.
        interval: seconds between heartbeats.
    """

    def __init__(self, connection: Connection, session_id: str, interval: float) -> None:
        self._stop = threading.Event()
        self.ended: Gone | None = None
        arguments = (weakref.ref(self), self._stop, connection, session_id, interval)
        self._thread = threading.Thread(target=_beat, args=arguments, name="twinkle-heartbeats", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop; no heartbeat is sent after this returns."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __del__(self) -> None:
        self._stop.set()


def _beat(
    owner: "weakref.ref[Heartbeats]", stop: threading.Event, connection: Connection, session_id: str, interval: float
) -> None:
    body: dict[str, Any] = {"session_id": session_id}
    while not stop.wait(interval):
        try:
            connection.run(connection.request("POST", "/session_heartbeat", body, retry_seconds=0.0, timeout=interval))
        except (Gone, NotFound) as error:
            get_logger().warning("the service has ended this session: %s", error)
            if (heartbeats := owner()) is not None:
                heartbeats.ended = Gone(str(error))
            return
        except TwinkleClientError as error:  # the next one may succeed; sessions outlive some lost heartbeats
            get_logger().debug("a heartbeat failed: %s", error)
