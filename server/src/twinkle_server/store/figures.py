"""Figures of runs by optimizer step, and recorded rollouts.

The journal writes a row of `figures` for each training operation, in the transaction of its outcome. `Figures.fold`
adds them up into `steps` later, so that the size of a run is bounded and an operation costs only an insertion.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, Final, NamedTuple

import orjson
from sqlalchemy import Connection, delete, func, select

from twinkle_server.errors import NotFound
from twinkle_server.operations import STEPS
from twinkle_server.ports import Database
from twinkle_server.store.database import driver
from twinkle_server.store.tables import figures, rollouts, steps

_TOGETHER: Final = 16
"""Maximum number of runs whose steps one transaction writes."""
_PUT_STEP: Final = "INSERT INTO steps (run, step, tenant, number, time, data) VALUES (?, ?, ?, ?, ?, ?)"
_PUT_ROLLOUT: Final = """
    INSERT INTO rollouts (tenant, run, number, time, size, about, data) VALUES (?, ?, ?, ?, ?, ?, ?)
"""
_DROP_SURPLUS: Final = """
    DELETE FROM rollouts WHERE run = ? AND id <= (
        SELECT id FROM rollouts WHERE run = ? ORDER BY id DESC LIMIT 1 OFFSET ?
    )
"""
_OPEN: Final = 100
"""Maximum number of rows of a step that is not complete; beyond it, they become one row."""
MOST: Final = 4096
"""Maximum number of rows of `steps` of a run; beyond it, pairs of rows in the older half become one."""
_LAST: Final = ("lr", "grad_norm", "skipped")
"""Figures of an optimizer step, of which a sum has no meaning. A native call that has one of them has ended a step."""
Data = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """The figures of one optimizer step of a run, or of several old ones.

    Attributes:
        step: number of the (last) optimizer step, from 1.
        number: of its operation.
        time: of its end, UTC seconds.
        count: number of optimizer steps in the sums.
        data: sums, see `engine.recording.Recorded`, and `lr`, `grad_norm` and `skipped` of the last step.
    """

    step: int
    number: int
    time: float
    count: int = 1
    data: Data = field(default_factory=dict)


class Figures:
    """The tables `figures` and `steps`."""

    def __init__(self, database: Database, most: int = MOST) -> None:
        """Use a database.

        Args:
            database: with both tables.
            most: maximum number of rows of a run.
        """
        self._database = database
        self._most = most

    async def fold(self) -> int:
        """Across tenants: add up the operations of complete steps; return how many rows this has removed."""
        folds = await self._database.read(_plan)
        for start in range(0, len(folds), _TOGETHER):
            await self._database.write(partial(self._apply, folds[start : start + _TOGETHER]))
        return sum(len(fold.done) for fold in folds)

    async def steps(self, tenant: str, run: str, after: int = 0, newest: int | None = None) -> list[Step]:
        """Return the complete steps of a tenant's run after a step, in order.

        Args:
            tenant: the owner.
            run: the model.
            after: number of a step.
            newest: return only steps that are this close to the last folded one, or newer.
        """
        done = select(steps).where(steps.c.tenant == tenant, steps.c.run == run)
        tail = select(figures).where(figures.c.tenant == tenant, figures.c.run == run).order_by(figures.c.number)

        def work(connection: Connection) -> list[Step]:
            last = _last(connection, run)
            first = after if newest is None else max(after, last - newest)
            newer = done.where(steps.c.step > first).order_by(steps.c.step)
            found = [_step(row) for row in connection.execute(newer)]
            return found + [entry for entry in _grouped(connection.execute(tail), last)[0] if entry.step > first]

        return await self._database.read(work)

    async def forget(self, before: float) -> int:
        """Across tenants: delete runs whose last step ended before a time; return the number of rows."""

        def work(connection: Connection) -> int:
            count = 0
            for table in (figures, steps):
                newest = select(table.c.run).group_by(table.c.run).having(func.max(table.c.time) < before)
                count += connection.execute(delete(table).where(table.c.run.in_(newest))).rowcount
            return count

        return await self._database.write(work)

    def _apply(self, folds: "Sequence[_Fold]", connection: Connection) -> None:
        """Across tenants: write the steps of some runs, and remove their operations."""
        raw = driver(connection)
        for fold in folds:
            raw.executemany(_PUT_STEP, [_row(fold.run, fold.tenant, entry) for entry in fold.steps])
            raw.executemany("DELETE FROM figures WHERE operation = ?", [(operation,) for operation in fold.done])
            if fold.merged is not None:
                raw.execute("UPDATE figures SET data = ? WHERE operation = ?", fold.merged)
            every = max(1, self._most // 16)
            if fold.steps and fold.steps[-1].step // every != (fold.steps[0].step - 1) // every:
                self._thin(connection, fold.run)

    def _thin(self, connection: Connection, run: str) -> None:
        """Across tenants: merge pairs of a run's older steps if there are too many rows."""
        count = connection.execute(select(func.count()).select_from(steps).where(steps.c.run == run)).scalar_one()
        if count <= self._most:
            return
        older = connection.execute(select(steps).where(steps.c.run == run).order_by(steps.c.step).limit(count // 2))
        rows = older.all()
        entries = [_step(row) for row in rows[: len(rows) // 2 * 2]]
        pairs = zip(entries[::2], entries[1::2], strict=True)
        connection.execute(delete(steps).where(steps.c.run == run, steps.c.step <= entries[-1].step))
        driver(connection).executemany(_PUT_STEP, [_row(run, rows[0].tenant, _pair(*pair)) for pair in pairs])


class _Operation(NamedTuple):
    """A row of `figures`."""

    operation: int
    tenant: str
    run: str
    number: int
    kind: str
    time: float
    data: str


_ALL: Final = f"SELECT {', '.join(_Operation._fields)} FROM figures ORDER BY number"
"""All rows; those of a run are in the order in which they ran."""


@dataclass(slots=True)
class _Fold:
    """What to write for one run.

    Attributes:
        run: its model.
        tenant: its owner.
        steps: complete steps.
        done: operations whose rows are no longer needed.
        merged: figures of all operations of the step that is not complete, and the operation whose row gets them.
    """

    run: str
    tenant: str
    steps: list[Step]
    done: list[int]
    merged: tuple[str, int] | None = None


def _plan(connection: Connection) -> list[_Fold]:
    """Across tenants: return what to write for each run that has complete steps, or many rows of an open one."""
    runs: dict[str, list[_Operation]] = {}
    for row in driver(connection).execute(_ALL):
        entry = _Operation(*row)
        runs.setdefault(entry.run, []).append(entry)
    folds = (_fold(run, rows, _last(connection, run)) for run, rows in runs.items())
    return [fold for fold in folds if fold.done]


def _fold(run: str, rows: list[_Operation], last: int) -> _Fold:
    found, rest = _grouped(rows, last)
    whole, opened = rows[: len(rows) - rest], rows[len(rows) - rest :]
    fold = _Fold(run, rows[0].tenant, found, [row.operation for row in whole])
    if rest > _OPEN:
        merged: Data = reduce(add, (orjson.loads(row.data) for row in opened), {})
        fold.merged = orjson.dumps(merged).decode(), opened[-1].operation
        fold.done += [row.operation for row in opened[:-1]]
    return fold


def _last(connection: Connection, run: str) -> int:
    """Across tenants: return the number of a run's last row of `steps`."""
    return int(
        connection.execute(select(func.coalesce(func.max(steps.c.step), 0)).where(steps.c.run == run)).scalar_one()
    )


def _grouped(rows: Iterable[Any], last: int) -> tuple[list[Step], int]:
    """Return the complete steps that operations form, and the number of operations after the last of them."""
    found: list[Step] = []
    data: Data = {}
    open_rows = 0
    for row in rows:
        figures_of_row = orjson.loads(row.data)
        data = add(data, figures_of_row) if data else figures_of_row
        open_rows += 1
        if row.kind in STEPS or not figures_of_row.keys().isdisjoint(_LAST):
            found.append(Step(last + len(found) + 1, row.number, row.time, 1, data))
            data, open_rows = {}, 0
    return found, open_rows


def _pair(first: Step, second: Step) -> Step:
    return Step(second.step, second.number, second.time, first.count + second.count, add(first.data, second.data))


def _row(run: str, tenant: str, entry: Step) -> tuple[Any, ...]:
    data = entry.data if entry.count == 1 else {**entry.data, "count": entry.count}
    return run, entry.step, tenant, entry.number, entry.time, orjson.dumps(data).decode()


def _step(row: Any) -> Step:
    data = orjson.loads(row.data)
    return Step(row.step, row.number, row.time, data.pop("count", 1), data)


def add(first: Mapping[str, Any], second: Mapping[str, Any]) -> Data:
    """Return the figures of two operations together.

    Numbers are added; of lists (sum, count, maximum), the maximum is taken of the third values. Of the figures of an
    optimizer step, the second's replace the first's.
    """
    total: Data = dict(first)
    for name, value in second.items():
        before = total.get(name)
        if before is None or name in _LAST:
            total[name] = value
        elif isinstance(value, dict):
            total[name] = add(before, value)
        elif isinstance(value, list):
            total[name] = [before[0] + value[0], before[1] + value[1], *map(max, before[2:], value[2:])]
        elif value is not None:
            total[name] = before + value
    return total


@dataclass(frozen=True, slots=True)
class Kept:
    """A recorded row of a training operation.

    Attributes:
        tenant: its owner.
        run: the model that was trained.
        number: of the operation.
        time: at which it was recorded, UTC seconds.
        about: see `engine.recording.Recorder`.
        data: see `engine.recording.Rollout`.
        id: of its row; 0 before it is written.
    """

    tenant: str
    run: str
    number: int
    time: float
    about: dict[str, Any]
    data: bytes
    id: int = 0


class RolloutTable:
    """The table `rollouts`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, rows: Sequence[Kept], keep: Mapping[str, int]) -> None:
        """Across tenants: add rows in one transaction, and delete the oldest ones of their runs.

        Args:
            rows: the rows.
            keep: number of newest rows that are kept, by run.
        """
        values = [
            (row.tenant, row.run, row.number, row.time, len(row.data), orjson.dumps(row.about).decode(), row.data)
            for row in rows
        ]

        def work(connection: Connection) -> None:
            raw = driver(connection)
            raw.executemany(_PUT_ROLLOUT, values)
            raw.executemany(_DROP_SURPLUS, [(run, run, keep[run]) for run in {row.run for row in rows}])

        if values:
            await self._database.write(work)

    async def of_run(self, tenant: str, run: str, limit: int) -> list[Kept]:
        """Return the rows of a tenant's run, newest first, without their data."""
        query = select(*(column for column in rollouts.c if column.name != "data"))
        own = query.where(rollouts.c.tenant == tenant, rollouts.c.run == run).order_by(rollouts.c.id.desc())
        return await self._database.read(
            lambda connection: [_kept(row, b"") for row in connection.execute(own.limit(limit))]
        )

    async def get(self, tenant: str, run: str, row: int) -> Kept:
        """Return a row of a tenant's run.

        Raises:
            NotFound: the tenant has no such row, or it is no longer kept.
        """
        query = select(rollouts).where(rollouts.c.tenant == tenant, rollouts.c.run == run, rollouts.c.id == row)
        found = await self._database.read(lambda connection: connection.execute(query).one_or_none())
        if found is None:
            raise NotFound(f"rollout {row} of this run does not exist; only the newest ones are kept")
        return _kept(found, bytes(found.data))

    async def remove(self, tenant: str, run: str) -> int:
        """Delete the rows of a tenant's run, and return their number."""
        query = delete(rollouts).where(rollouts.c.tenant == tenant, rollouts.c.run == run)
        return await self._database.write(lambda connection: connection.execute(query).rowcount)

    async def trim(self, most: int, before: float) -> int:
        """Across tenants: delete rows older than a time, and the oldest ones beyond `most` bytes; return the number."""
        totals = (
            "SELECT max(id) FROM (SELECT id, sum(size) OVER (ORDER BY id DESC) AS total FROM rollouts) WHERE total > ?"
        )

        def work(connection: Connection) -> int:
            count = connection.execute(delete(rollouts).where(rollouts.c.time < before)).rowcount
            last = driver(connection).execute(totals, (most,)).fetchone()[0]
            if last is not None:
                count += connection.execute(delete(rollouts).where(rollouts.c.id <= last)).rowcount
            return count

        return await self._database.write(work)


def _kept(row: Any, data: bytes) -> Kept:
    return Kept(row.tenant, row.run, row.number, row.time, dict(row.about or {}), data, row.id)
