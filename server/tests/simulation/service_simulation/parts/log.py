"""The operation log, and what it deletes."""

import json
import random
from dataclasses import replace
from typing import Any
from unittest import mock

from service_simulation.parts.support import (
    opened,
    refused,
    rows_of,
)
from service_simulation.reference import demand
from service_simulation.virtual import Clock

from twinkle_server.errors import BadRequest, Gone, LeaseLost, NotFound, SequenceConflict
from twinkle_server.operations import Outcome, Snapshot, Submission
from twinkle_server.settings import Limits, Times
from twinkle_server.store import Store, models, recorded, retention
from twinkle_server.store.records import Model, Session


async def keep_log(clock: Clock, draw: random.Random) -> None:
    """Operations come in once, end once, and what is not needed any more goes, and nothing else."""
    times = Times(read_result=50.0, kept_result=500.0, kept_record=300.0)
    with (
        opened(draw, limits=Limits(small_bytes=40), times=times) as store,
        mock.patch.object(retention, "_BATCH", 2),
        mock.patch.object(retention, "_PIECE", 3),
        mock.patch.object(recorded, "_AT_ONCE", 2),
        mock.patch.object(retention, "_PAGES", 2),
        mock.patch.object(retention, "_SPARE", 1),
    ):
        log = _Log(store, clock, draw)
        await log.begin()
        for _ in range(40):
            await log.step()
        await log.check()
        await _give_back(store)
        await _refuse_old_numbers(store)
        store.journal.context = replace(store.journal.context, epoch=99)
        for work in (
            store.journal.submit(Submission("ada", log.models[0], "forward", b"late", 900)),
            store.journal.finish([Outcome(1, b"x")]),
            store.journal.blame([1]),
            store.journal.snapshotted(Snapshot(log.models[0], 5, "snapshots/z", "", 1)),
        ):
            await refused(work, LeaseLost, "another process now serves")


async def _refuse_old_numbers(store: Store) -> None:
    """A number that a snapshot covers, and whose row was deleted, is not accepted again; the next one is."""
    name = "s:train:2"
    model = Model(name, "ada", "s", 2, "base", 8, 1.0, 1.0)
    await store.database.write(lambda connection: models.add(connection, model))
    await store.journal.snapshotted(Snapshot(name, 5, "snapshots/old", "d", 1))
    for number in (0, 5):
        old = Submission("ada", name, "forward", b"old", number)
        await refused(store.journal.submit(old), Gone, f"the result of sequence number {number} of")
    accepted, _ = await store.journal.submit(Submission("ada", name, "forward", b"new", 6))
    demand(accepted.fresh, "the next number is not accepted")


async def _give_back(store: Store) -> None:
    """Free pages are given back to the file system, all but one, and at most two at a time."""
    for size in (1, 2, 3, 5):
        await store.database.write(lambda connection: connection.exec_driver_sql("CREATE TABLE blobs (data BLOB)"))
        await store.database.write(
            lambda connection, size=size: connection.exec_driver_sql(
                "INSERT INTO blobs VALUES (zeroblob(?))", (4096 * size,)
            )
        )
        await store.database.write(lambda connection: connection.exec_driver_sql("DROP TABLE blobs"))
        free = rows_of(store, "PRAGMA freelist_count")[0][0]
        while True:
            wanted = max(0, min(free - 1, 2))
            given = await store.database.write(retention._vacuum)
            left = rows_of(store, "PRAGMA freelist_count")[0][0]
            demand(
                (given, left) == (wanted, free - wanted), f"{given} of {free} pages were given back, {left} are left"
            )
            free = left
            if not given:
                break


class _Log:
    """The log, and a model of it."""

    def __init__(self, store: Store, clock: Clock, draw: random.Random) -> None:
        self.store, self.journal, self.clock, self.draw = store, store.journal, clock, draw
        self.models = ["s:train:0", "s:train:1"]
        self.queues = [*self.models, "s:sample:0"]
        self.rows: dict[int, dict[str, Any]] = {}
        self.last = dict.fromkeys(self.queues, 0)
        self.covered: dict[str, int | None] = dict.fromkeys(self.queues)
        self.status = dict.fromkeys(self.models, "creating")
        self.used_at: dict[int, float] = {}
        self.was_recorded: dict[int, float] = {}

    async def begin(self) -> None:
        await self.store.sessions.create(Session("s", "ada", 1.0, 1.0))
        for number, name in enumerate(self.models):
            model = Model(name, "ada", "s", number, "base", 8, 1.0, 1.0)
            await self.store.database.write(lambda connection, model=model: models.add(connection, model))

    async def step(self) -> None:
        self.clock.now += self.draw.choice([0.0, 1.0, 30.0])
        what = self.draw.choice(
            ["submit"] * 5
            + [
                "again",
                "finish",
                "finish",
                "finish",
                "read",
                "snapshot",
                "blame",
                "purge",
                "record",
                "gone",
                "next",
                "refuse",
                "use",
            ]
        )
        await getattr(self, f"_{what}")()
        if self.draw.random() < 0.3:
            await self.check()

    def _pending(self) -> list[dict[str, Any]]:
        return [row for row in self.rows.values() if row["status"] == "pending"]

    async def _submit(self, number: int | None = -1, refusal: str | None = None, record: bool = False) -> None:
        queue = self.draw.choice(self.queues) if not record else "s:sample:0"
        kind: Any = (
            "sample" if queue == "s:sample:0" else self.draw.choice(["forward", "optim_step", "load", "create", "save"])
        )
        place = self.last[queue] if number == -1 else number
        if place is None:
            queue, kind = self.draw.choice(self.models), "unload"
        payload = b"x" * self.draw.choice([3, 40, 41])
        if kind in ("load", "create", "sample", "save"):
            field = "folder" if kind == "save" else "source"
            named = {field: f"checkpoints/f{len(self.rows)}"} if self.draw.random() < 0.8 else {}
            payload = json.dumps(named).encode().ljust(41 if kind == "sample" and self.draw.random() < 0.3 else 40)
        asked = Submission("ada", queue, kind, payload, place, 3, refusal)
        ran: list[int] = []

        def in_transaction(connection: Any) -> None:
            ran.append(1)
            if record:
                recorded.add(connection, "ada", "s", queue, place, self.clock.wall())

        accepted, operation = await self.journal.submit(asked, in_transaction)
        covered = self.covered[queue]
        wanted = (
            place
            if place is not None
            else max(
                [row["number"] for row in self.rows.values() if row["queue"] == queue]
                + [covered if covered is not None else -1],
                default=-1,
            )
            + 1
        )
        status = "failed" if refusal else "pending"
        demand(
            (
                operation.number,
                operation.status,
                operation.kind,
                operation.queue_id,
                operation.attempts,
                operation.tokens,
            )
            == (wanted, status, kind, queue, 0, 3),
            f"{operation}, not {wanted}",
        )
        demand(accepted.fresh and bool(ran) is (refusal is None), "whether what goes with it was written")
        demand(operation.payload == (payload if status == "pending" else None), "its payload")
        self.last[queue] = max(self.last[queue], wanted + 1)
        where = None if refusal else "row" if len(payload) <= 40 else "file"
        self.rows[operation.id] = {
            "id": operation.id,
            "request": accepted.request,
            "queue": queue,
            "number": wanted,
            "kind": kind,
            "status": status,
            "payload": payload,
            "where": where,
            "asked": asked,
            "error": refusal,
            "category": "user" if refusal else None,
            "attempts": 0,
            "created": self.clock.wall(),
            "finished": self.clock.wall() if refusal else None,
            "read": None,
            "result": None,
            "dropped": False,
            "composition": None,
        }
        if record:
            self.was_recorded[operation.id] = self.clock.wall()

    async def _next(self) -> None:
        await self._submit(None)

    async def _refuse(self) -> None:
        await self._submit(refusal="it is refused")

    async def _record(self) -> None:
        await self._submit(record=True)

    async def _use(self) -> None:
        wanted = [row["request"] for row in self.rows.values() if row["queue"] == "s:sample:0"][:6]
        since, now = self.clock.wall() - self.draw.choice([0.0, 40.0, 1e6]), self.clock.wall()
        order = {row["request"]: number for number, row in self.rows.items()}
        found: set[str] = set()
        for begin in range(0, len(wanted), 2):
            piece = wanted[begin : begin + 2]
            here = {each for each in piece if self.was_recorded.get(order[each], -1.0) >= since}
            found |= here
            if len(here) < len(piece):
                break
        demand(await self.store.recorded.use("ada", "s", wanted, since, now) == found, "which are recorded")
        for each in found:
            self.was_recorded[order[each]] = now
        demand(await self.store.recorded.use("bob", "s", wanted, 0.0, now) == set(), "foreign records")
        demand(await self.store.recorded.use("ada", "t", wanted, 0.0, now) == set(), "records of another session")

    async def _again(self) -> None:
        rows = [row for row in self.rows.values() if row["asked"].number is not None and row["error"] is None]
        if not rows:
            return
        row = self.draw.choice(rows)
        accepted, operation = await self.journal.submit(row["asked"])
        demand((accepted.request, accepted.fresh, operation.id) == (row["request"], False, row["id"]), "it came twice")
        other = replace(row["asked"], payload=b"something else")
        await refused(self.journal.submit(other), SequenceConflict, "was used for another request")
        foreign = replace(row["asked"], tenant="bob")
        await refused(self.journal.submit(foreign), NotFound, "does not exist")
        covered = self.covered[row["queue"]]
        if covered is not None and (
            missing := [
                number
                for number in range(covered + 1)
                if not any(each["number"] == number and each["queue"] == row["queue"] for each in self.rows.values())
            ]
        ):
            old = Submission("ada", row["queue"], "forward", b"old", missing[-1])
            await refused(self.journal.submit(old), Gone, "has expired")

    async def _finish(self) -> None:
        rows = self.draw.sample(self._pending(), min(len(self._pending()), self.draw.choice([1, 2])))
        outcomes, wanted = [], []
        for row in rows:
            how = self.draw.choice(["done", "done", "done", "failed", "cancelled", "refused"])
            result = b"y" * self.draw.choice([0, 40, 45])
            outcome = Outcome(row["id"], result, composition=self.draw.choice([None, "[1]"]))
            if how == "failed":
                outcome = Outcome(row["id"], None, "it failed", "unknown")
            elif how == "cancelled":
                outcome = Outcome(row["id"], None, self.draw.choice([None, "nobody waits"]), cancelled=True)
            elif how == "refused":

                def in_transaction(connection: Any) -> None:
                    raise BadRequest("there is no room")

                outcome.in_transaction = in_transaction
            elif self.draw.random() < 0.5:
                outcome.in_transaction = lambda connection: None
            outcomes.append(outcome)
            wanted.append((row, how, result))
        if not rows:
            return
        written = await self.journal.finish(outcomes)
        now = self.clock.wall()
        for (row, how, result), outcome in zip(wanted, written, strict=True):
            row["finished"] = now
            row["status"] = {"done": "done", "cancelled": "cancelled"}.get(how, "failed")
            if how == "done":
                row["result"] = result
                row["composition"] = outcomes[written.index(outcome)].composition
                demand(outcome.result == result and outcome.error is None, f"{outcome}")
            elif how == "refused":
                row["error"], row["category"] = "there is no room", "user"
                demand(
                    (outcome.error, outcome.category, outcome.result) == ("there is no room", "user", None),
                    f"{outcome}",
                )
            elif how == "failed":
                row["error"], row["category"] = "it failed", "unknown"
            else:
                row["error"] = outcome.error or "the request was cancelled"
                row["category"] = "user"
            if row["kind"] == "create" and how != "done" and self.status[row["queue"]] == "creating":
                self.status[row["queue"]] = "gone"
            if how != "done" or row["kind"] in ("sample", "unload"):
                row["where"] = row["composition"] = None
        again = await self.journal.finish([Outcome(wanted[0][0]["id"], None, "too late")])
        told = (again[0].error is None, again[0].cancelled, again[0].error)
        first = wanted[0][0]
        demand(
            told == (first["status"] == "done", first["status"] == "cancelled", first["error"]),
            f"it ended twice: {again}",
        )
        await refused(self.journal.finish([Outcome(10**6, b"z" * 30)]), LookupError, "does not exist")

    async def _read(self) -> None:
        if not self.rows:
            return
        row = self.draw.choice(list(self.rows.values()))
        await refused(self.journal.future(row["request"], "bob"), NotFound, "does not exist")
        await refused(self.journal.future("f" * 48, "ada"), NotFound, "does not exist")
        if row["dropped"]:
            await refused(self.journal.future(row["request"], "ada"), Gone, "has expired")
            return
        future = await self.journal.future(row["request"], "ada")
        found = (future.kind, future.status, future.queue_id, future.result, future.error)
        demand(found == (row["kind"], row["status"], row["queue"], row["result"], row["error"]), f"{future}, not {row}")
        if row["status"] != "pending":
            demand(row["category"] in (None, future.category), f"{future}")
            demand(self.journal.reads.get(row["id"], -1.0) <= self.clock.wall(), "when it was read")
            demand(row["id"] in self.journal.reads, "it is not noted that it was read")

    async def _snapshot(self) -> None:
        queue = self.draw.choice(self.models)
        if not self.last[queue]:
            return
        number = self.draw.randrange(self.last[queue])
        old = rows_of(self.store, "SELECT snapshot_folder FROM models WHERE id = ?", queue)[0][0]
        name = f"snapshots/n{len(self.rows)}x{self.draw.randrange(10**6)}"
        needless = await self.journal.snapshotted(Snapshot(queue, number, name, "d", 9))
        before = self.covered[queue]
        if self.status[queue] == "gone" or (before is not None and before > number):
            demand(needless == [name], f"{needless} is needed")
            return
        demand(needless == ([old] if old else []), f"{needless} is needed, not {old}")
        self.covered[queue] = number
        for row in self.rows.values():
            if row["queue"] == queue and row["number"] <= number and row["status"] != "pending":
                row["where"] = row["composition"] = None

    async def _blame(self) -> None:
        rows = self.draw.sample(list(self.rows.values()), min(2, len(self.rows)))
        await self.journal.blame([row["id"] for row in rows])
        for row in rows:
            row["attempts"] += row["status"] == "pending"

    async def _gone(self) -> None:
        if self.draw.random() < 0.3:
            queue = self.draw.choice(self.models)
            await self.store.models.gone("ada", queue, self.clock.wall(), "over")
            self.status[queue] = "gone"

    async def _purge(self) -> None:
        if self.draw.random() < 0.4:
            self.clock.now += self.draw.choice([60.0, 600.0, 8 * 86400.0])
        now = self.clock.wall()
        for operation, at in self.journal.reads.items():
            row = self.rows.get(operation)
            if row is not None and row["read"] is None:
                row["read"] = at
        before = rows_of(self.store, "PRAGMA freelist_count")[0][0]
        done = await self.store.retention.purge(now)
        free = rows_of(self.store, "PRAGMA freelist_count")[0][0]
        demand(
            free <= 1 and done.pages >= before - 1,
            f"{free} pages are free, {before} were, {done.pages} were given back",
        )
        self.was_recorded = {number: at for number, at in self.was_recorded.items() if at >= now - 300.0}
        results = payloads = gone = 0
        for number, row in list(self.rows.items()):
            over = (row["read"] is not None and row["read"] < now - 50.0) or (
                row["finished"] is not None and row["finished"] < now - 500.0
            )
            if over and not row["dropped"] and number not in self.was_recorded:
                row["dropped"], row["result"] = True, None
                row["error"] = None if row["error"] is None else row["error"][:300]
                results += 1
        for row in self.rows.values():
            if self.status.get(row["queue"]) == "gone" and row["where"] and row["status"] != "pending":
                row["where"] = row["composition"] = None
                payloads += 1
        for number, row in list(self.rows.items()):
            covered = self.covered[row["queue"]]
            free = (
                row["queue"] not in self.models
                or self.status[row["queue"]] == "gone"
                or (covered is not None and row["number"] <= covered)
            )
            old = row["finished"] is not None and row["finished"] < now - 7 * 86400.0
            if old and row["dropped"] and row["where"] is None and free:
                del self.rows[number]
                gone += 1
        demand(
            (done.results, done.payloads, done.operations) == (results, payloads, gone),
            f"{done}, not {(results, payloads, gone)}",
        )
        if before <= 1 and not (results or payloads or gone):
            demand(done.pages == 0, f"{done.pages} pages were given back of {before}")

    async def check(self) -> None:
        query = """SELECT id, request, tenant, lane, number, kind, tokens, status, attempts, error, category, dropped,
            created, finished, read, epoch FROM operations"""
        epoch = self.store.journal.context.epoch
        rows = {row[0]: row[1:] for row in rows_of(self.store, query)}
        wanted = {
            number: (
                row["request"],
                "ada",
                row["queue"],
                row["number"],
                row["kind"],
                3,
                row["status"],
                row["attempts"],
                row["error"],
                row["category"],
                int(row["dropped"]),
                row["created"],
                row["finished"],
                row["read"],
                epoch,
            )
            for number, row in self.rows.items()
        }
        demand(
            rows == wanted, f"the log: {[each for each in rows.items() if wanted.get(each[0]) != each[1]]} of {wanted}"
        )
        for table, key in (("payloads", "payload"), ("results", "result")):
            kept = {row[0]: bytes(row[1]) for row in rows_of(self.store, f"SELECT operation, data FROM {table}")}
            names = [row[0] for row in rows_of(self.store, f"SELECT {key} FROM operations WHERE {key} > ''")]
            files = {path.name for path in (self.store.data / table).iterdir()}
            demand(files == set(names) and len(files) == len(names), f"files of {table}: {files}, not {names}")
            listed = self.store.retention.payload_files() if key == "payload" else self.store.retention.result_files()
            demand(await listed == files, f"files of {table} that are named")
            if key == "payload":
                own = {number: row["payload"] for number, row in self.rows.items() if row["where"] == "row"}
            else:
                own = {
                    number: row["result"]
                    for number, row in self.rows.items()
                    if row["result"] is not None and len(row["result"]) <= 40
                }
            demand(kept == own, f"rows of {table}: {kept}, not {own}")
        for number, row in self.rows.items():
            if row["where"]:
                demand(await self.journal.payload(number) == row["payload"], "a payload")
            else:
                await refused(self.journal.payload(number), LookupError)
            demand(await self.journal.composition(number) == row["composition"], "how passes were composed")
        found = {row[0] for row in rows_of(self.store, "SELECT operation FROM compositions")}
        demand(found == {number for number, row in self.rows.items() if row["composition"] is not None}, "compositions")
        pending = [each.id for each in await self.journal.pending()]
        order = sorted(self._pending(), key=lambda row: (row["queue"], row["number"]))
        demand(pending == [row["id"] for row in order], "what is not over")
        for queue in self.queues:
            after = [each.number for each in await self.journal.after(queue, 2)]
            mine = sorted(row["number"] for row in self.rows.values() if row["queue"] == queue and row["number"] > 2)
            demand(after == mine, f"what came after in {queue}")
        sources = {
            str(next(iter(json.loads(row["payload"]).values()), ""))
            for row in self.rows.values()
            if row["where"] == "row"
            and (
                row["kind"] in ("load", "create") or (row["kind"] in ("sample", "save") and row["status"] == "pending")
            )
        } - {""}
        snapshots = {row[0] for row in rows_of(self.store, "SELECT snapshot_folder FROM models") if row[0]}
        needed = await self.store.retention.referenced()
        demand(needed == snapshots | sources, f"{needed} are needed, not {snapshots | sources}")
        status = dict(rows_of(self.store, "SELECT id, status FROM models"))
        demand(status == self.status, f"models are {status}, not {self.status}")
