"""Without the index of a tenant's waiting operations: the service counts those in memory, and each row paid for it."""

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Remove it."""
    op.execute("DROP INDEX operations_queued")


def downgrade() -> None:
    """Make it again."""
    op.execute("CREATE INDEX operations_queued ON operations (tenant) WHERE status = 'pending'")
