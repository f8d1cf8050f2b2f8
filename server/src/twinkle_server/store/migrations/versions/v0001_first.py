"""The first schema."""

from alembic import op

revision = "0001"
down_revision = None

_TABLES = (
    "meta", "lease", "tenants", "keys", "sessions", "models", "samplers", "operations", "payloads", "results",
    "checkpoints", "audit", "usage",
)  # fmt: skip
_STATEMENTS = (
    """
    CREATE TABLE audit (
        id INTEGER NOT NULL,
        time FLOAT NOT NULL,
        tenant VARCHAR NOT NULL,
        event VARCHAR NOT NULL,
        details JSON,
        PRIMARY KEY (id)
    )
    """,
    "CREATE INDEX audit_by_time ON audit (time)",
    "CREATE INDEX audit_of_tenant ON audit (tenant, time)",
    """
    CREATE TABLE checkpoints (
        id INTEGER NOT NULL,
        tenant VARCHAR NOT NULL,
        run VARCHAR NOT NULL,
        kind VARCHAR NOT NULL,
        name VARCHAR NOT NULL,
        folder VARCHAR NOT NULL,
        size INTEGER NOT NULL,
        digest VARCHAR NOT NULL,
        base VARCHAR NOT NULL,
        rank INTEGER NOT NULL,
        train_attn BOOLEAN NOT NULL,
        train_mlp BOOLEAN NOT NULL,
        train_unembed BOOLEAN NOT NULL,
        has_optimizer BOOLEAN NOT NULL,
        public BOOLEAN NOT NULL,
        metadata JSON,
        project VARCHAR,
        created FLOAT NOT NULL,
        expires FLOAT,
        deleted FLOAT,
        PRIMARY KEY (id)
    )
    """,
    "CREATE INDEX checkpoints_by_folder ON checkpoints (folder)",
    "CREATE INDEX checkpoints_expiry ON checkpoints (expires) WHERE deleted IS NULL AND expires IS NOT NULL",
    "CREATE INDEX checkpoints_of_tenant ON checkpoints (tenant, created, id)",
    "CREATE UNIQUE INDEX checkpoints_path ON checkpoints (run, kind, name) WHERE deleted IS NULL",
    """
    CREATE TABLE keys (
        id VARCHAR NOT NULL,
        tenant VARCHAR NOT NULL,
        name VARCHAR NOT NULL,
        role VARCHAR NOT NULL,
        prefix VARCHAR NOT NULL,
        hash VARCHAR NOT NULL,
        quotas JSON,
        created FLOAT NOT NULL,
        revoked FLOAT,
        PRIMARY KEY (id)
    )
    """,
    "CREATE UNIQUE INDEX keys_name ON keys (name) WHERE revoked IS NULL",
    "CREATE UNIQUE INDEX keys_prefix ON keys (prefix)",
    """
    CREATE TABLE lease (
        id INTEGER NOT NULL,
        epoch INTEGER NOT NULL,
        host VARCHAR NOT NULL,
        pid INTEGER NOT NULL,
        started INTEGER NOT NULL,
        boot VARCHAR NOT NULL,
        since FLOAT NOT NULL,
        released BOOLEAN NOT NULL,
        PRIMARY KEY (id)
    )
    """,
    """
    CREATE TABLE meta (
        name VARCHAR NOT NULL,
        value VARCHAR NOT NULL,
        PRIMARY KEY (name)
    )
    """,
    """
    CREATE TABLE operations (
        id INTEGER NOT NULL,
        request VARCHAR NOT NULL,
        tenant VARCHAR NOT NULL,
        lane VARCHAR NOT NULL,
        number INTEGER NOT NULL,
        kind VARCHAR NOT NULL,
        tokens INTEGER NOT NULL,
        digest BLOB NOT NULL,
        status VARCHAR NOT NULL,
        attempts INTEGER NOT NULL,
        error VARCHAR,
        category VARCHAR,
        epoch INTEGER,
        payload VARCHAR,
        result VARCHAR,
        dropped BOOLEAN NOT NULL,
        created FLOAT NOT NULL,
        finished FLOAT,
        read FLOAT,
        PRIMARY KEY (id),
        CONSTRAINT operations_request UNIQUE (request),
        CONSTRAINT operations_number UNIQUE (lane, number)
    )
    """,
    "CREATE INDEX operations_finished ON operations (finished) WHERE finished IS NOT NULL",
    "CREATE INDEX operations_kept ON operations (finished) WHERE finished IS NOT NULL AND dropped = 0",
    "CREATE INDEX operations_pending ON operations (lane, number) WHERE status = 'pending'",
    "CREATE INDEX operations_queued ON operations (tenant) WHERE status = 'pending'",
    "CREATE INDEX operations_read ON operations (read) WHERE read IS NOT NULL AND dropped = 0",
    "CREATE INDEX operations_replayed ON operations (lane, number) WHERE payload IS NOT NULL",
    """
    CREATE TABLE payloads (
        operation INTEGER NOT NULL,
        data BLOB NOT NULL,
        PRIMARY KEY (operation)
    )
    """,
    """
    CREATE TABLE results (
        operation INTEGER NOT NULL,
        data BLOB NOT NULL,
        PRIMARY KEY (operation)
    )
    """,
    """
    CREATE TABLE sessions (
        id VARCHAR NOT NULL,
        tenant VARCHAR NOT NULL,
        status VARCHAR NOT NULL,
        created FLOAT NOT NULL,
        last_heartbeat FLOAT NOT NULL,
        ended FLOAT,
        reason VARCHAR,
        detail VARCHAR,
        sdk VARCHAR,
        tags JSON,
        metadata JSON,
        project VARCHAR,
        display_name VARCHAR,
        PRIMARY KEY (id)
    )
    """,
    "CREATE INDEX sessions_by_heartbeat ON sessions (status, last_heartbeat)",
    "CREATE INDEX sessions_of_tenant ON sessions (tenant, created, id)",
    """
    CREATE TABLE tenants (
        id VARCHAR NOT NULL,
        created FLOAT NOT NULL,
        PRIMARY KEY (id)
    )
    """,
    """
    CREATE TABLE usage (
        tenant VARCHAR NOT NULL,
        day VARCHAR NOT NULL,
        kind VARCHAR NOT NULL,
        tokens INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        PRIMARY KEY (tenant, day, kind)
    )
    """,
    """
    CREATE TABLE models (
        id VARCHAR NOT NULL,
        tenant VARCHAR NOT NULL,
        session VARCHAR NOT NULL,
        number INTEGER NOT NULL,
        base VARCHAR NOT NULL,
        rank INTEGER NOT NULL,
        seed INTEGER,
        train_attn BOOLEAN NOT NULL,
        train_mlp BOOLEAN NOT NULL,
        train_unembed BOOLEAN NOT NULL,
        metadata JSON,
        project VARCHAR,
        status VARCHAR NOT NULL,
        reason VARCHAR,
        created FLOAT NOT NULL,
        last_request FLOAT NOT NULL,
        detached FLOAT,
        snapshot_number INTEGER,
        snapshot_folder VARCHAR,
        snapshot_digest VARCHAR,
        snapshot_size INTEGER,
        snapshot_at FLOAT,
        PRIMARY KEY (id),
        CONSTRAINT models_number UNIQUE (session, number),
        FOREIGN KEY(session) REFERENCES sessions (id)
    )
    """,
    "CREATE INDEX models_by_status ON models (status, detached)",
    "CREATE INDEX models_of_tenant ON models (tenant, created, id)",
    """
    CREATE TABLE samplers (
        id VARCHAR NOT NULL,
        tenant VARCHAR NOT NULL,
        session VARCHAR NOT NULL,
        number INTEGER NOT NULL,
        base VARCHAR NOT NULL,
        path VARCHAR,
        folder VARCHAR,
        inflight VARCHAR,
        clones INTEGER NOT NULL,
        created FLOAT NOT NULL,
        ended FLOAT,
        PRIMARY KEY (id),
        CONSTRAINT samplers_number UNIQUE (session, number),
        FOREIGN KEY(session) REFERENCES sessions (id)
    )
    """,
    "CREATE INDEX samplers_by_folder ON samplers (folder)",
    "CREATE INDEX samplers_inflight ON samplers (inflight)",
)


def upgrade() -> None:
    """Create the tables."""
    for statement in _STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    """Drop all tables."""
    for table in reversed(_TABLES):
        op.drop_table(table)
