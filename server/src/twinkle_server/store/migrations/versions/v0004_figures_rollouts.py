"""Add figures of training operations and steps, recorded rollouts, and an index of failed operations."""

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Create the tables and the index; nothing is known of earlier operations."""
    op.execute(
        """
        CREATE TABLE figures (
            operation INTEGER NOT NULL,
            tenant VARCHAR NOT NULL,
            run VARCHAR NOT NULL,
            number INTEGER NOT NULL,
            kind VARCHAR NOT NULL,
            time FLOAT NOT NULL,
            data VARCHAR NOT NULL,
            PRIMARY KEY (operation)
        )
        """
    )
    op.execute(
        """
        CREATE TABLE steps (
            run VARCHAR NOT NULL,
            step INTEGER NOT NULL,
            tenant VARCHAR NOT NULL,
            number INTEGER NOT NULL,
            time FLOAT NOT NULL,
            data VARCHAR NOT NULL,
            PRIMARY KEY (run, step)
        )
        WITHOUT ROWID
        """
    )
    op.execute(
        """
        CREATE TABLE rollouts (
            id INTEGER NOT NULL,
            tenant VARCHAR NOT NULL,
            run VARCHAR NOT NULL,
            number INTEGER NOT NULL,
            time FLOAT NOT NULL,
            size INTEGER NOT NULL,
            about JSON,
            data BLOB NOT NULL,
            PRIMARY KEY (id)
        )
        """
    )
    op.execute("CREATE INDEX rollouts_of_run ON rollouts (run, id)")
    op.execute("CREATE INDEX rollouts_by_time ON rollouts (time)")
    op.execute("CREATE INDEX operations_failed ON operations (finished) WHERE status = 'failed'")


def downgrade() -> None:
    """Drop them."""
    op.execute("DROP INDEX operations_failed")
    for table in ("figures", "steps", "rollouts"):
        op.execute(f"DROP TABLE {table}")
