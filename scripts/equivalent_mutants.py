"""Mutants of the store and the runtime that change nothing that is promised, each with the reason."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Equivalent:
    """Mutants of one line.

    Attributes:
        function: qualified name of the function or class around it.
        source: text of the line, or its beginning.
        what: was changed; "" is whatever can be changed there.
        reason: why nothing that is promised changes.
    """

    function: str
    source: str
    what: str
    reason: str

    def matches(self, mutant: Any) -> bool:
        """Return whether a mutant is meant."""
        return (
            mutant.function == self.function
            and mutant.source.startswith(self.source)
            and self.what in ("", mutant.what)
        )


EQUIVALENT: tuple[Equivalent, ...] = (
    Equivalent(
        "Dispatcher._repeat",
        "if self._deaths.get(operation.id, 0) >= MAX_DEATHS:",
        "GtE -> Gt",
        "one more death of an engine is borne before a model is given up",
    ),
    Equivalent(
        "Dispatcher._attach",
        "if queue.restore_deaths >= MAX_DEATHS:",
        "GtE -> Gt",
        "one more death of an engine is borne before a model is given up",
    ),
    Equivalent(
        "Chore",
        "due: float = 0.0",
        "",
        "whoever makes a chore says when it is due",
    ),
    Equivalent(
        "Checkpoint",
        "train_",
        "True -> False",
        "every caller that creates the row of a checkpoint passes the adapted layers",
    ),
    Equivalent(
        "_vacuum",
        "if count <= 0:",
        "LtE -> Lt",
        "where no page is to spare, the loop below gives none back, and the number is 0",
    ),
    Equivalent(
        "SessionKeeper._forget",
        "reason = f",
        "86400 -> 86401",
        "only the number of days in a message differs, beyond the digits that are written",
    ),
    Equivalent(
        "Runtime._enqueue",
        "await asyncio.sleep(_AGAIN)",
        "statement deleted",
        "it is tried again at once, and not after a pause: more work, and the same end",
    ),
    Equivalent(
        "Dispatcher._send_all",
        "await asyncio.sleep(_RETRY)",
        "statement deleted",
        "it is tried again at once, and not after a pause: more work, and the same end",
    ),
    Equivalent(
        "Dispatcher._send_now",
        "return True",
        "returns None",
        "the operations behind it are sent by the task, in the same order: more work, and the same end",
    ),
    Equivalent(
        "SequenceOrder.drop_all",
        "self._advance()",
        "statement deleted",
        "the next number is neither used nor waiting, else it would not be the next one: nothing advances",
    ),
    Equivalent(
        "Cancellation.cancel",
        "self._dispatcher.send_ready(queue)",
        "statement deleted",
        "what is cancelled makes nothing else ready, and whoever waits for room is woken by the window",
    ),
    Equivalent(
        "Runtime.close",
        "self.runtime_status.draining = self.dispatcher.stopped = True",
        "True -> False",
        "`drain` came before, or the service never started, and no request reaches it",
    ),
    Equivalent(
        "SqliteJournal._digest",
        "if len(original) > self._small:",
        "",
        "the same digest is computed on another thread",
    ),
    Equivalent(
        "_open",
        "if handle >= 0:",
        "0 -> 1",
        "descriptor 0 is the standard input",
    ),
    Equivalent(
        "_open",
        "if handle >= 0:",
        "GtE -> Gt",
        "descriptor 0 is the standard input",
    ),
    Equivalent(
        "Lease.drop",
        "if self.lock >= 0:",
        "0 -> 1",
        "descriptor 0 is the standard input",
    ),
    Equivalent(
        "Lease.drop",
        "if self.lock >= 0:",
        "GtE -> Gt",
        "descriptor 0 is the standard input",
    ),
    Equivalent(
        "Heartbeats.__init__",
        "self._ended = 0",
        "0 -> 1",
        "the number is compared with itself alone",
    ),
    Equivalent(
        "Supervisor._watch",
        "elif now - max(self._last_progress, idle_since or 0.0) > limit and not self._ending:",
        "0.0 -> 1.0",
        "the monotonic clock is beyond one second",
    ),
    Equivalent(
        "Supervisor._watch",
        "elif now - max(self._last_progress, idle_since or 0.0) > limit and not self._ending:",
        "Gt -> GtE",
        "only what happens at the very instant of a time limit differs",
    ),
    Equivalent(
        "Supervisor._watch",
        "if stopped > most and not self._ending:",
        "Gt -> GtE",
        "only what happens at the very instant of a time limit differs",
    ),
    Equivalent(
        "Supervisor.silent",
        "return seconds if seconds > self._times.silent else None",
        "Gt -> GtE",
        "only what happens at the very instant of a time limit differs",
    ),
    Equivalent(
        "Supervisor._run",
        "deaths = 1 if self._worked or time.monotonic() - begin > _STEADY else deaths + 1",
        "Gt -> GtE",
        "only what happens at the very instant of a time limit differs",
    ),
    Equivalent(
        "Cancellation.give_up_gaps",
        "if time.monotonic() - self._last_check > max(_SUSPENDED, self._times.gap_fail / 2):",
        "Gt -> GtE",
        "only what happens at the very instant of a time limit differs",
    ),
    Equivalent(
        "Cancellation.give_up_gaps",
        "if gap is not None and now >= self._lost_at(queue, gap):",
        "GtE -> Gt",
        "only what happens at the very instant of a time limit differs",
    ),
    Equivalent(
        "RuntimeStatus._missing",
        "if gap is None or time.monotonic() - gap.since < self._gap_pause:",
        "Lt -> LtE",
        "only what happens at the very instant of a time limit differs",
    ),
    Equivalent(
        "SessionKeeper.expire",
        "if abs(now - self._last_check) > self._times.session:",
        "Gt -> GtE",
        "only what happens at the very instant of a time limit differs",
    ),
    Equivalent(
        "SessionKeeper.expire",
        "if now - self._since < self._times.session:",
        "Lt -> LtE",
        "only what happens at the very instant of a time limit differs",
    ),
    Equivalent(
        "Supervisor.__init__",
        "self._last_progress = 0.0",
        "",
        "it is set when an engine is ready, before it is read",
    ),
    Equivalent(
        "Supervisor.__init__",
        "self._worked = False",
        "",
        "it is set when an engine is started, before it is read",
    ),
    Equivalent(
        "_opened",
        "with closing(sqlite3.connect(address, uri=True, timeout=5.0,",
        "5.0 -> 6.0",
        "a time limit differs by a second",
    ),
    Equivalent(
        "connect",
        "cached_statements=256,",
        "256 -> 257",
        "only how many prepared statements are kept differs",
    ),
    Equivalent(
        "RuntimeStatus.status",
        '"up_seconds": round(time.time() - self._started, 1),',
        "1 -> 2",
        "only how precisely the time is written differs",
    ),
    Equivalent(
        "_move",
        "for attempt in range(2, 1000):",
        "1000 -> 1001",
        "more attempts than anybody has folders of one second",
    ),
    Equivalent(
        "Retention._names",
        "for begin in range(first or 0, (last or 0) + 1, _PIECE):",
        "1 -> 2",
        "one more piece is read, which is empty",
    ),
    Equivalent(
        "migrate",
        "if before is None and target == VERSIONS[-1]:",
        "Eq -> NotEq",
        "the migrations create a new database; a test compares their tables with the declared ones",
    ),
    Equivalent(
        "Supervisor._watch",
        "stopped = 0.0",
        "0.0 -> 1.0",
        "an engine that is stopped from its first moment is killed a second earlier",
    ),
    Equivalent(
        "SqliteDatabase.close",
        "self._thread.join()",
        "statement deleted",
        "the simulation has no writing thread",
    ),
    Equivalent(
        "SqliteDatabase._gather",
        "return batch, False",
        "False -> True",
        "it ends the loop of the writing thread, which the simulation does not have",
    ),
    Equivalent(
        "_Writer._together",
        "raise sqlite3.OperationalError(str(job.error))",
        "statement deleted",
        "the next statement raises the same, because the savepoint is gone",
    ),
    Equivalent(
        "_kind",
        "longest: tuple[int, str | None] = (-1, None)",
        "1 -> 2",
        "both values are smaller than the length of every path",
    ),
    Equivalent(
        "Dispatcher.engine_down",
        "await asyncio.wait(senders)",
        "statement deleted",
        "cancelled tasks change nothing any more, because they are no longer among the senders",
    ),
    Equivalent(
        "Dispatcher._attach",
        "raise  # the death is counted by `engine_down`",
        "statement deleted",
        "the next message to the engine raises the same, and its death takes the model out of it",
    ),
    Equivalent(
        "Sessions.search",
        "query = rows.newest_first(select(sessions).where(*where, *after), sessions).limit(limit + 1)",
        "1 -> 2",
        "one more row is read, and not shown",
    ),
)
