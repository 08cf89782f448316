"""Keep what a worker's devices did at its last heartbeat; find the latest job of each point of a sweep by an index."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("worker", sa.Column("readings", sa.JSON(), nullable=True))
    where = sa.text("sweep_id IS NOT NULL")
    op.create_index("ix_job_sweep_point", "job", ["sweep_id", "point"], sqlite_where=where, postgresql_where=where)


def downgrade() -> None:
    raise NotImplementedError("restore the backup that was made before")
