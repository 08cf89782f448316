"""Find the jobs that were submitted since a time, or before it, by an index."""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_job_created_at", "job", ["created_at"])


def downgrade() -> None:
    raise NotImplementedError("restore the backup that was made before")
