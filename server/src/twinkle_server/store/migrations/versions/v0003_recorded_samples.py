"""Sampling operations whose sequences a training request may name; their results are kept for it."""

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Make the table."""
    op.execute("""
        CREATE TABLE recorded (
            lane VARCHAR NOT NULL,
            number INTEGER NOT NULL,
            tenant VARCHAR NOT NULL,
            session VARCHAR NOT NULL,
            used FLOAT NOT NULL,
            PRIMARY KEY (lane, number)
        )
    """)
    op.execute("CREATE INDEX recorded_used ON recorded (used)")


def downgrade() -> None:
    """Forget what was recorded."""
    op.execute("DROP TABLE recorded")
