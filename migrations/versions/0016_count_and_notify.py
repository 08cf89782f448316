"""Numbers for /metrics that only grow, and webhooks."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
IS_OPEN = sa.text("state IN ('waiting', 'pending')")


def upgrade() -> None:
    op.create_table(
        "tally",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("outcome", sa.String(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", "kind", "outcome"),
    )
    op.create_table(
        "webhook",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("job_id", ID, nullable=True),
        sa.Column("sweep_id", ID, nullable=True),
        sa.Column("url", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("message_id", sa.String(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("due_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("error", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["sweep_id"], ["sweep.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_webhook_job_id", "webhook", ["job_id"], unique=True)
    op.create_index("ix_webhook_sweep_id", "webhook", ["sweep_id"], unique=True)
    op.create_index("ix_webhook_open", "webhook", ["id"], sqlite_where=IS_OPEN, postgresql_where=IS_OPEN)
