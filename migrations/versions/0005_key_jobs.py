"""Let jobs have a key, of which at most one is queued or running."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("unique_key", sa.String(), nullable=True))
    where = sa.text("state IN ('queued', 'running') AND unique_key IS NOT NULL")
    op.create_index("ix_job_unique_key", "job", ["unique_key"], unique=True, sqlite_where=where, postgresql_where=where)


def downgrade() -> None:
    op.drop_index("ix_job_unique_key", "job")
    op.drop_column("job", "unique_key")
