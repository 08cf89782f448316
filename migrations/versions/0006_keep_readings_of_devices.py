"""Keep what a worker's devices did at its last heartbeat."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("worker", sa.Column("readings", sa.JSON(), nullable=True))


def downgrade() -> None:
    raise NotImplementedError("restore the backup that was made before")
