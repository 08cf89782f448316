"""Add baselines: named results that later ones are compared with."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "baseline",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "baseline_case",
        sa.Column("baseline", sa.String(), nullable=False),
        sa.Column("case_key", sa.String(), nullable=False),
        sa.Column("device_key", sa.String(), nullable=False),
        sa.Column("job_id", ID, autoincrement=False, nullable=False),
        sa.Column("title", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["baseline"], ["baseline.name"], ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], ondelete="RESTRICT"),
        sa.PrimaryKeyConstraint("baseline", "case_key", "device_key", "job_id"),
    )
    op.create_index("ix_baseline_case_job_id", "baseline_case", ["job_id"])


def downgrade() -> None:
    raise NotImplementedError("restore the backup that was made before")
