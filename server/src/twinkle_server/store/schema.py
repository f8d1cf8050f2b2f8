"""Versions of the schema: a new file gets the newest one, an older file is migrated, a newer one is refused.

The tables of a new file are created from `tables`, which a test compares with the migrations. Alembic is imported only
for migrations, because the import takes longer than the rest of the start.
"""

from pathlib import Path
from typing import Final

from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from twinkle_server.errors import StoreError
from twinkle_server.store.tables import metadata

FOLDER: Final = Path(__file__).parent / "migrations"
VERSIONS: Final = ("0001", "0002", "0003", "0004")
"""All versions, oldest first; each is a file `migrations/versions/v<version>_*.py`."""
_VERSION_TABLE: Final = """
    CREATE TABLE alembic_version (
        version_num VARCHAR(32) NOT NULL,
        CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
    )
"""


def version(connection: Connection) -> str | None:
    """Return the version of a database; None if it is empty."""
    try:
        number = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    except OperationalError:
        return None
    return None if number is None else str(number)


def migrate(connection: Connection, target: str | None = VERSIONS[-1]) -> str | None:
    """Migrate a database to a version, within the connection's current transaction.

    Args:
        connection: that may write.
        target: the version; a downgrade loses data that the older version cannot hold. None is an empty database.

    Returns:
        The previous version.

    Raises:
        StoreError: the version of the database is unknown.
    """
    before = version(connection)
    if before == target:
        return before
    if before is not None and before not in VERSIONS:
        raise StoreError(
            f"the database has version {before!r}, which is newer than {VERSIONS[-1]!r} of this program; "
            f"install the twinkle-server that wrote it, or a newer one"
        )
    if before is None and target == VERSIONS[-1]:
        _create(connection, target)
        return None
    order = [None, *VERSIONS]
    _run(connection, target or "base", down=order.index(target) < order.index(before))
    return before


def _create(connection: Connection, target: str) -> None:
    metadata.create_all(connection, checkfirst=False)
    connection.exec_driver_sql(_VERSION_TABLE)
    connection.exec_driver_sql("INSERT INTO alembic_version VALUES (?)", (target,))


def _run(connection: Connection, target: str, down: bool) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(FOLDER).replace("%", "%%"))
    config.attributes["connection"] = connection
    (command.downgrade if down else command.upgrade)(config, target)
