"""How the passes of an operation were composed, so that a replay composes them in the same way.

Operations of before have none: their passes are composed anew.
"""

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Make the table."""
    op.execute("""
        CREATE TABLE compositions (
            operation INTEGER NOT NULL,
            data BLOB NOT NULL,
            PRIMARY KEY (operation)
        )
    """)


def downgrade() -> None:
    """Remove it."""
    op.execute("DROP TABLE compositions")
