"""Device time by user, and an index that has the next job of each user."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

CLAIMABLE = sa.text("state = 'queued'")


def upgrade() -> None:
    op.create_table(
        "device_use",
        sa.Column("hour", sa.DateTime(timezone=True), nullable=False),
        sa.Column("submitted_by", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("ran_s", sa.Float(), nullable=False),
        sa.Column("device_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("hour", "submitted_by", "kind", "device"),
    )
    op.create_table(
        "fair_share",
        sa.Column("submitted_by", sa.String(), nullable=False),
        sa.Column("device_s", sa.Float(), nullable=False),
        sa.Column("summed_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("submitted_by"),
    )
    op.create_index(
        "ix_job_claimable_by_user",
        "job",
        ["submitted_by", sa.text("priority DESC"), "id", "kind", "device_type", "devices"],
        sqlite_where=CLAIMABLE,
        postgresql_where=CLAIMABLE,
    )
