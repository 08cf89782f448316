"""Let jobs have a key, of which at most one is queued or running; let claims pass over jobs in the index alone."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("unique_key", sa.String(), nullable=True))
    where = sa.text("state IN ('queued', 'running') AND unique_key IS NOT NULL")
    op.create_index("ix_job_unique_key", "job", ["unique_key"], unique=True, sqlite_where=where, postgresql_where=where)

    for name, condition, *passed_over in (
        ("ix_job_claimable", "state = 'queued'", "kind", "device_type", "devices"),
        ("ix_job_deviceless", "state = 'queued' AND device_type = 'none'", "kind"),
    ):
        op.drop_index(name, "job")
        where = sa.text(condition)
        columns: list[str | sa.TextClause] = [sa.text("priority DESC"), "id", *passed_over]
        op.create_index(name, "job", columns, sqlite_where=where, postgresql_where=where)


def downgrade() -> None:
    raise NotImplementedError("restore the backup that was made before")
