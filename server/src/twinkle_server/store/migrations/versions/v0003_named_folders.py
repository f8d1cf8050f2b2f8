"""The folders that rows have named, so that upkeep can tell them from folders that no row ever named."""

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Make the table, with the folders that rows name."""
    op.execute("CREATE TABLE folders (folder VARCHAR NOT NULL, named FLOAT NOT NULL, PRIMARY KEY (folder))")
    op.execute(
        """
        INSERT OR IGNORE INTO folders (folder, named)
        SELECT folder, created FROM checkpoints
        UNION ALL SELECT folder, created FROM samplers WHERE folder IS NOT NULL
        UNION ALL SELECT snapshot_folder, coalesce(snapshot_at, created) FROM models WHERE snapshot_folder IS NOT NULL
        """
    )


def downgrade() -> None:
    """Remove it."""
    op.execute("DROP TABLE folders")
