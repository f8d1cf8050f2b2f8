"""Add folders named by rows, recorded sampling operations, and compositions of passes.

Upkeep distinguishes folders that a row once named from others. Results of recorded sampling operations are kept longer.
Older operations have no composition.
"""

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Create the tables, and fill `folders` with the folders that rows name."""
    op.execute("CREATE TABLE folders (folder VARCHAR NOT NULL, named FLOAT NOT NULL, PRIMARY KEY (folder))")
    op.execute(
        """
        INSERT OR IGNORE INTO folders (folder, named)
        SELECT folder, created FROM checkpoints
        UNION ALL SELECT folder, created FROM samplers WHERE folder IS NOT NULL
        UNION ALL SELECT snapshot_folder, coalesce(snapshot_at, created) FROM models WHERE snapshot_folder IS NOT NULL
        """
    )
    op.execute(
        """
        CREATE TABLE recorded (
            lane VARCHAR NOT NULL,
            number INTEGER NOT NULL,
            tenant VARCHAR NOT NULL,
            session VARCHAR NOT NULL,
            used FLOAT NOT NULL,
            PRIMARY KEY (lane, number)
        )
        """
    )
    op.execute("CREATE INDEX recorded_used ON recorded (used)")
    op.execute("CREATE TABLE compositions (operation INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (operation))")


def downgrade() -> None:
    """Drop the tables."""
    for table in ("folders", "recorded", "compositions"):
        op.execute(f"DROP TABLE {table}")
