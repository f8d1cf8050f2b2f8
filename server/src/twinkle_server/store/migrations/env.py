"""alembic runs this: it takes the connection, and the transaction, that it is given (see `schema`)."""

from alembic import context

from twinkle_server.store.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, transactional_ddl=False)
context.run_migrations()
