"""Run by Alembic: upgrades on the connection, and in the transaction, that app.store.database.migrating hands over.

Alembic runs this file and the revisions by their paths, so they import nothing of ours: its name depends on how
Flopwatch runs (flopwatch/packages.py).
"""

from alembic import context
from sqlmodel import SQLModel

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=SQLModel.metadata,
    render_item=context.config.attributes.get("render_item"),
    # SQLite cannot alter most things in place: tables are copied, which is why foreign keys are off meanwhile.
    render_as_batch=connection.dialect.name == "sqlite",
    transactional_ddl=True,
)
context.run_migrations()
