"""Drop the index of a tenant's pending operations: the service counts them in memory."""

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Drop the index."""
    op.execute("DROP INDEX operations_queued")


def downgrade() -> None:
    """Create the index."""
    op.execute("CREATE INDEX operations_queued ON operations (tenant) WHERE status = 'pending'")
