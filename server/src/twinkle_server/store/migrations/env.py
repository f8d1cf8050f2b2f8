"""Run by alembic with the connection and the transaction that `schema` passes."""

from alembic import context

from twinkle_server.store.tables import metadata

if hasattr(context, "config"):  # set while alembic runs, not on a plain import
    connection = context.config.attributes["connection"]
    context.configure(connection=connection, target_metadata=metadata, transactional_ddl=False)
    context.run_migrations()
