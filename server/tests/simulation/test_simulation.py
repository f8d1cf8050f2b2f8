"""Simulations of the whole service under faults; `python scripts/simulate.py SEED --trace` replays one that fails."""

import random
import sqlite3
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest
from service_simulation.disk import _mixed
from service_simulation.parts.driving import Part, all_parts, drive
from service_simulation.reference import Event, History, Violation
from service_simulation.simulation import Report, simulate

FEW = 20
"""Seeds of which `make test` runs some and `make test-all` the rest; `make soak` runs `MANY` others."""
MANY = 3000


@cache
def history(seed: int) -> tuple[Report, str]:
    """Return the report of a seed's simulation, and its trace."""
    lines: list[str] = []
    return simulate(seed, lines.append), "\n".join(lines)


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(FEW))
def test_the_service_keeps_its_promises_under_faults(seed: int) -> None:
    assert history(seed)[0].operations > 0


@pytest.mark.parametrize("part", all_parts(), ids=lambda part: part.__name__)
def test_a_part_of_the_service_does_what_its_model_does(part: Part) -> None:
    drive(part, 0)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", range(1000, 1000 + MANY, 100))
def test_the_service_keeps_its_promises_under_faults_of_many_kinds(first: int) -> None:
    for seed in range(first, first + 100):
        simulate(seed, size=4 if seed % 4 == 0 else 1)


@pytest.mark.full
def test_a_seed_gives_the_same_history_again() -> None:
    lines: list[str] = []
    assert (simulate(7, lines.append), "\n".join(lines)) == history(7)
    assert history(3)[0].fingerprint != history(7)[0].fingerprint


def test_faults_of_all_kinds_happen_in_few_seeds() -> None:
    text = "\n".join(history(seed)[1] for seed in (0, 3, 7, 11))
    for what in (
        "service dies",
        "engine dies",
        "disk full",
        "a read of the database fails",
        "power failure",
        "the wall clock is set",
        "everything stood still",
        "stop",
    ):
        assert what in text, what


def test_the_reference_notices_an_operation_that_ran_twice_or_out_of_order() -> None:
    def read(applied: tuple[int, ...]) -> History:
        history = History("m", "ada")
        for number, kind, rows in ((0, "create", ()), (1, "train", (5,)), (2, "train", (6,)), (3, "step", ())):
            history.add(Event(number, kind, rows, ending="done"))  # type: ignore[arg-type]
        seen = History("s", "ada")
        seen.add(Event(0, "train", applied, ending="done"))
        seen.add(Event(1, "step", ending="done"))
        from dataclasses import replace

        history.add(Event(4, "read", ending="done", seen=replace(seen.after(1), steps=0)))
        return history

    read((5, 6)).check(())
    for wrong in ((6, 5), (5, 6, 6), (5,), (5, 6, 7)):
        with pytest.raises(Violation):
            read(wrong).check(())


@pytest.mark.parametrize("seed", range(40))
def test_a_torn_log_is_read_up_to_the_last_whole_commit(seed: int, tmp_path: Path) -> None:
    data, torn = tmp_path / "a.db", tmp_path / "b.db"
    with closing(sqlite3.connect(data, isolation_level=None)) as raw:
        raw.execute("PRAGMA journal_mode = WAL")
        raw.execute("CREATE TABLE numbers (n INTEGER)")
        raw.execute("INSERT INTO numbers VALUES (1)")
        log = tmp_path / "a.db-wal"
        before = log.read_bytes()
        raw.execute("BEGIN")
        raw.executemany("INSERT INTO numbers VALUES (?)", [(number,) for number in range(2, 2000)])
        raw.execute("COMMIT")
        after, pages = log.read_bytes(), data.read_bytes()
    torn.write_bytes(pages)
    (tmp_path / "b.db-wal").write_bytes(_mixed(random.Random(seed), before, after, 32))
    with closing(sqlite3.connect(torn)) as raw:
        assert raw.execute("SELECT count(*) FROM numbers").fetchone()[0] in (1, 1999)
        assert raw.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
