"""alembic runs this: it takes the connection, and the transaction, that it is given (see `schema`)."""

from alembic import context

from twinkle_server.store.tables import metadata

if hasattr(context, "config"):  # alembic is at work; whoever imports the module to read it is not
    connection = context.config.attributes["connection"]
    context.configure(connection=connection, target_metadata=metadata, transactional_ddl=False)
    context.run_migrations()
