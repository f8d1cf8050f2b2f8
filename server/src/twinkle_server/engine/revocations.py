"""Looks from time to time whether plugins that this engine uses were revoked, on a thread of its own."""

import logging
import threading
import time
from collections.abc import Callable

from twinkle import registry

_log = logging.getLogger(__name__)


class RevocationWatch:
    """Drops plugins that policy or revocation lists forbid.

    Args:
        every: seconds from one look to the next.
        dropped: called on that thread after plugins were dropped.
    """

    def __init__(self, every: float, dropped: Callable[[], object]) -> None:
        self._every = every
        self._dropped = dropped
        self._known: list[str] = []

    def start(self) -> None:
        """Look now and from time to time, while the process lives."""
        threading.Thread(target=self._run, name="revocations", daemon=True).start()

    def look(self) -> None:
        """Drop what is forbidden now; what is wrong with a list is logged once, and the last good list counts."""
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
            except Exception:  # whatever it is, code that is revoked later must still be dropped
                _log.exception("cannot check for revoked plugins; retrying")
            time.sleep(self._every)
