"""Keep which Python files users have uploaded, and which jobs name them; let sweeps search for what fits."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("sweep", sa.Column("fit", sa.JSON(), nullable=True))
    op.create_table(
        "code_file",
        sa.Column("sha256", sa.String(), primary_key=True),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("put_at", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_table(
        "job_code",
        sa.Column("job_id", ID, sa.ForeignKey("job.id", ondelete="CASCADE"), primary_key=True, autoincrement=False),
        sa.Column("sha256", sa.String(), sa.ForeignKey("code_file.sha256"), primary_key=True),
    )
    op.create_index("ix_job_code_sha256", "job_code", ["sha256"])


def downgrade() -> None:
    raise NotImplementedError("restore the backup that was made before")
