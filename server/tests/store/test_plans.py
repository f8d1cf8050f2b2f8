"""No statement that runs often reads a whole table."""

import re
from typing import Any

import pytest
from sqlalchemy import Connection

from twinkle_server.store import Store, statements

RARE = {"FOLDERS", "SOURCES", "OLD_SAMPLERS", "OLD_CHECKPOINTS"}
"""The sweeper's and the janitor's."""
NAMES = sorted(name for name in vars(statements) if name.isupper() and name not in RARE | {"COLUMNS"})


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", NAMES)
def test_a_busy_statement_finds_its_rows_by_an_index(store: Store, name: str) -> None:
    query = getattr(statements, name)
    values: Any = {"lane": "x"} if ":lane" in query else (None,) * query.count("?")

    def plan(connection: Connection) -> list[str]:
        return [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}", values)]

    scans = [
        line
        for line in store.database.write_now(plan)
        if re.match(r"SCAN (operations|payloads|results|models)\b", line)
    ]
    assert all("USING INDEX operations_pending" in line for line in scans), scans
