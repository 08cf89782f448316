"""Run by Alembic: upgrades on the connection, and in the transaction, that app.store.database.migrating hands over."""

from typing import Any, Literal

from alembic import context
from alembic.autogenerate.api import AutogenContext
from sqlmodel import SQLModel
from sqlmodel.sql.sqltypes import AutoString

from app.store.column_types import StoredJson, UtcDateTime


def plain_type(kind: str, item: Any, _context: AutogenContext) -> str | Literal[False]:
    """Types of ours, in revisions to come, as SQLAlchemy's: a revision must not change when the code does."""
    if kind == "type" and isinstance(item, UtcDateTime):
        return "sa.DateTime(timezone=True)"
    if kind == "type" and isinstance(item, StoredJson):
        return 'sa.JSON().with_variant(sa.Text(), "postgresql")'
    if kind == "type" and isinstance(item, AutoString):
        return "sa.String()"
    return False


connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=SQLModel.metadata,
    render_item=plain_type,
    # SQLite cannot alter most things in place: tables are copied, which is why foreign keys are off meanwhile.
    render_as_batch=connection.dialect.name == "sqlite",
    transactional_ddl=True,
)
context.run_migrations()
