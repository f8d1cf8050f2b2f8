"""Which sessions were heard of: told from memory, so that nobody is held up by a disk that is busy."""

import time

from twinkle_server.store.sessions import Sessions


class Heartbeats:
    """Asks the table once for each session, and writes when it was heard of from time to time.

    Whoever ends a session tells (`forget`), and a start of the service expires no session before it could be heard of:
    so what a crash leaves unwritten harms nobody.

    Args:
        sessions: their table.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._active: dict[str, str] = {}
        self._unwritten: dict[str, float] = {}
        self._ended = 0

    async def hear(self, tenant: str, session: str) -> None:
        """Note that a session lives.

        Raises:
            Gone: the tenant has none of that id, or it has ended.
        """
        if self._active.get(session) == tenant:
            self._unwritten[session] = time.time()
            return
        ended = self._ended
        await self._sessions.heartbeat(tenant, session, time.time())
        if ended == self._ended:  # else it may be this one that has ended meanwhile
            self._active[session] = tenant

    def forget(self, session: str) -> None:
        """Ask the table again; the session has ended."""
        self._ended += 1
        self._active.pop(session, None)
        self._unwritten.pop(session, None)

    async def write(self) -> None:
        """Write when sessions were heard of."""
        heard, self._unwritten = self._unwritten, {}
        if not heard:
            return
        try:
            await self._sessions.heard([(self._active[session], session, at) for session, at in heard.items()])
        except BaseException:
            self._unwritten = {name: at for name, at in heard.items() if name in self._active} | self._unwritten
            raise

    def since_written(self, session: str) -> bool:
        """Return whether a session was heard of after the last `write` began."""
        return session in self._unwritten
