"""Keep the values of a job's metrics, by which lists of jobs are sorted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("metrics", sa.JSON(), nullable=True))


def downgrade() -> None:
    raise NotImplementedError("restore the backup that was made before")
