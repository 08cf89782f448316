"""All that release 0.1.0's databases lack."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0010"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON().with_variant(sa.Text(), "postgresql")
CLAIMABLE = sa.text("state = 'queued'")
IS_OPEN = sa.text("state IN ('waiting', 'pending')")


def upgrade() -> None:
    _describe_jobs_and_workers()
    _index_cases_by_metric()
    _keep_objects_and_tokens()
    _count_and_notify()
    _share_devices_fairly()


def _describe_jobs_and_workers() -> None:
    op.add_column("job", sa.Column("note", sa.String(), nullable=True))
    op.add_column("job", sa.Column("submitted_by", sa.String(), nullable=True))
    op.create_index("ix_job_submitted_by_id", "job", ["submitted_by", "id"])
    op.add_column("baseline", sa.Column("set_by", sa.String(), nullable=True))
    op.add_column("worker", sa.Column("schema_number", sa.Integer(), nullable=True))
    op.add_column("worker", sa.Column("unfit", JSON, nullable=True))
    op.add_column("job", sa.Column("waiting_reason", sa.String(), nullable=True))


def _index_cases_by_metric() -> None:
    op.drop_index("ix_measurement_case_key", "measurement")
    op.create_index("ix_measurement_case", "measurement", ["case_key", "metric", "phase"])


def _keep_objects_and_tokens() -> None:
    op.create_table(
        "stored_object",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("attempt_id", ID, nullable=True),
        sa.Column("sha256", sa.String(), nullable=True),
        sa.Column("size", sa.BigInteger(), nullable=True),
        sa.Column("removing", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_index("ix_stored_object_sha256", "stored_object", ["sha256"])
    op.create_table(
        "api_token",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("scope", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )


def _count_and_notify() -> None:
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
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["sweep_id"], ["sweep.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_webhook_job_id", "webhook", ["job_id"], unique=True)
    op.create_index("ix_webhook_sweep_id", "webhook", ["sweep_id"], unique=True)
    op.create_index("ix_webhook_open", "webhook", ["id"], sqlite_where=IS_OPEN, postgresql_where=IS_OPEN)


def _share_devices_fairly() -> None:
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
