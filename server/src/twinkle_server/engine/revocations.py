"""Periodic check for revoked plugins, on a separate thread."""

import logging
import threading
import time
from collections.abc import Callable

from twinkle import registry

_log = logging.getLogger(__name__)


class RevocationWatch:
    """Drops plugins that the policy or a revocation list forbids.

    Args:
        every: interval in seconds.
        dropped: called on this thread after plugins were dropped.
    """

    def __init__(self, every: float, dropped: Callable[[], object]) -> None:
        self._every = every
        self._dropped = dropped
        self._known: list[str] = []

    def start(self) -> None:
        """Start the thread, which checks immediately and then periodically."""
        threading.Thread(target=self._run, name="revocations", daemon=True).start()

    def look(self) -> None:
        """Drop forbidden plugins; each problem of a list is logged once, and its last valid version is used."""
        dropped, problems = registry().drop_forbidden(self._every / 2)
        for problem in problems:
            if problem not in self._known:
                _log.warning("revocation list: %s", problem)
        self._known = problems
        for record in dropped:
            _log.error("plugin %s is disabled: %s; its patches stay active until a restart", record.name, record.reason)
        if dropped:
            self._dropped()

    def _run(self) -> None:
        while True:
            try:
                self.look()
            except Exception:  # the thread must survive any error, to drop plugins that are revoked later
                _log.exception("cannot check for revoked plugins; retrying")
            time.sleep(self._every)
