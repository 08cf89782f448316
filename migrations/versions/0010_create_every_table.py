"""Create every table.

Development versions used the numbers up to 0009 (see app/store/database/migrating.py).
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = None
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime(timezone=True)
JSON = sa.JSON().with_variant(sa.Text(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "baseline",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "code_file",
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("put_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("sha256"),
    )
    op.create_table(
        "idempotency_key",
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("route", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("resource_id", ID, nullable=False),
        sa.Column("response", JSON, nullable=False),
        sa.Column("awaited", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("key", "route"),
    )
    op.create_index("ix_idempotency_key_created_at", "idempotency_key", ["created_at"])

    op.create_table(
        "known_host",
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("kinds", JSON, nullable=False),
        sa.Column("capabilities", JSON, nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("last_seen_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("key"),
    )
    op.create_table(
        "setting",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("value", JSON, nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "sweep",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("name", sa.String(), nullable=True),
        sa.Column("labels", JSON, nullable=False),
        sa.Column("base", JSON, nullable=False),
        sa.Column("grid", JSON, nullable=False),
        sa.Column("exclude", JSON, nullable=False),
        sa.Column("options", JSON, nullable=False),
        sa.Column("fit", JSON, nullable=True),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "worker",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("hostname", sa.String(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("kinds", JSON, nullable=False),
        sa.Column("capabilities", JSON, nullable=False),
        sa.Column("devices", JSON, nullable=False),
        sa.Column("versions", JSON, nullable=False),
        sa.Column("readings", JSON, nullable=True),
        sa.Column("beat", sa.Integer(), nullable=False),
        sa.Column("registered_at", TIME, nullable=False),
        sa.Column("last_seen_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_worker_registered_at", "worker", ["registered_at", "id"])
    op.create_index("ix_worker_state", "worker", ["state", "registered_at", "id"])

    op.create_table(
        "job",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=True),
        sa.Column("labels", JSON, nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("spec", JSON, nullable=False),
        sa.Column("summary", JSON, nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("timeout_s", sa.Float(), nullable=True),
        sa.Column("device_type", sa.String(), nullable=False),
        sa.Column("devices", sa.Integer(), nullable=False),
        sa.Column("exclusive_host", sa.Boolean(), nullable=False),
        sa.Column("requirements", JSON, nullable=False),
        sa.Column("progress", JSON, nullable=False),
        sa.Column("error", JSON, nullable=True),
        sa.Column("worker_id", sa.String(), nullable=True),
        sa.Column("sweep_id", ID, nullable=True),
        sa.Column("point", JSON, nullable=True),
        sa.Column("environment", JSON, nullable=True),
        sa.Column("validity", JSON, nullable=True),
        sa.Column("metrics", JSON, nullable=True),
        sa.Column("unique_key", sa.String(), nullable=True),
        sa.Column("deleting", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("started_at", TIME, nullable=True),
        sa.Column("finished_at", TIME, nullable=True),
        sa.Column("cancel_requested_at", TIME, nullable=True),
        sa.ForeignKeyConstraint(["sweep_id"], ["sweep.id"], ondelete="SET NULL"),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_job_claimable",
        "job",
        [sa.text("priority DESC"), "id", "kind", "device_type", "devices"],
        sqlite_where=sa.text("state = 'queued'"),
        postgresql_where=sa.text("state = 'queued'"),
    )
    op.create_index("ix_job_created_at", "job", ["created_at"])
    op.create_index(
        "ix_job_deviceless",
        "job",
        [sa.text("priority DESC"), "id", "kind"],
        sqlite_where=sa.text("state = 'queued' AND device_type = 'none'"),
        postgresql_where=sa.text("state = 'queued' AND device_type = 'none'"),
    )
    op.create_index(
        "ix_job_deleting",
        "job",
        ["id"],
        sqlite_where=sa.text("deleting"),
        postgresql_where=sa.text("deleting"),
    )
    op.create_index("ix_job_finished_at", "job", ["finished_at"])
    op.create_index("ix_job_kind_id", "job", ["kind", "id"])
    op.create_index("ix_job_state_id", "job", ["state", "id"])
    op.create_index("ix_job_sweep_id", "job", ["sweep_id"])
    op.create_index(
        "ix_job_sweep_point",
        "job",
        ["sweep_id", "point"],
        sqlite_where=sa.text("sweep_id IS NOT NULL"),
        postgresql_where=sa.text("sweep_id IS NOT NULL"),
    )
    op.create_index(
        "ix_job_unique_key",
        "job",
        ["unique_key"],
        unique=True,
        sqlite_where=sa.text("state IN ('queued', 'running') AND unique_key IS NOT NULL"),
        postgresql_where=sa.text("state IN ('queued', 'running') AND unique_key IS NOT NULL"),
    )

    op.create_table(
        "artifact",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("job_id", ID, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("unit_index", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("media_type", sa.String(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_artifact_job_name", "artifact", ["job_id", "attempt", "name"], unique=True)
    op.create_index("ix_artifact_sha256", "artifact", ["sha256"])

    op.create_table(
        "attempt",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("job_id", ID, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("token", sa.String(), nullable=False),
        sa.Column("worker_id", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("beat", sa.Integer(), nullable=False),
        sa.Column("error", JSON, nullable=True),
        sa.Column("log", sa.Text(), nullable=True),
        sa.Column("staged", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("finished_at", TIME, nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_attempt_job_number", "attempt", ["job_id", "number"])
    op.create_index(
        "ix_attempt_running",
        "attempt",
        ["id"],
        sqlite_where=sa.text("state = 'running'"),
        postgresql_where=sa.text("state = 'running'"),
    )
    op.create_index(
        "ix_attempt_staged",
        "attempt",
        ["id"],
        sqlite_where=sa.text("staged"),
        postgresql_where=sa.text("staged"),
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

    op.create_table(
        "event",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("job_id", ID, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("type", sa.String(), nullable=False),
        sa.Column("data", JSON, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_event_job_id", "event", ["job_id", "id"])

    op.create_table(
        "job_code",
        sa.Column("job_id", ID, autoincrement=False, nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], ondelete="CASCADE"),
        sa.ForeignKeyConstraint(
            ["sha256"],
            ["code_file.sha256"],
        ),
        sa.PrimaryKeyConstraint("job_id", "sha256"),
    )
    op.create_index("ix_job_code_sha256", "job_code", ["sha256"])

    op.create_table(
        "job_label",
        sa.Column("job_id", ID, autoincrement=False, nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("value", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "key"),
    )
    op.create_index("ix_job_label_key_value", "job_label", ["key", "value", "job_id"])

    op.create_table(
        "measurement",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("job_id", ID, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("unit_index", sa.Integer(), nullable=False),
        sa.Column("case", JSON, nullable=False),
        sa.Column("case_key", sa.String(), nullable=False),
        sa.Column("device_key", sa.String(), nullable=False),
        sa.Column("validity", sa.String(), nullable=True),
        sa.Column("phase", sa.String(), nullable=True),
        sa.Column("metric", sa.String(), nullable=False),
        sa.Column("unit", sa.String(), nullable=False),
        sa.Column("outcome", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=True),
        sa.Column("partial", sa.Boolean(), nullable=False),
        sa.Column("n", sa.Integer(), nullable=True),
        sa.Column("mean", sa.Float(), nullable=True),
        sa.Column("std", sa.Float(), nullable=True),
        sa.Column("median", sa.Float(), nullable=True),
        sa.Column("min", sa.Float(), nullable=True),
        sa.Column("max", sa.Float(), nullable=True),
        sa.Column("p05", sa.Float(), nullable=True),
        sa.Column("p25", sa.Float(), nullable=True),
        sa.Column("p75", sa.Float(), nullable=True),
        sa.Column("p95", sa.Float(), nullable=True),
        sa.Column("median_low", sa.Float(), nullable=True),
        sa.Column("median_high", sa.Float(), nullable=True),
        sa.Column("samples", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_measurement_case_key", "measurement", ["case_key", "device_key"])
    op.create_index("ix_measurement_job_id", "measurement", ["job_id"])

    op.create_table(
        "result_table",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("job_id", ID, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("unit_index", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("columns", JSON, nullable=False),
        sa.Column("row_count", sa.Integer(), nullable=False),
        sa.Column("partial", sa.Boolean(), nullable=False),
        sa.Column("rows", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_result_table_job_name", "result_table", ["job_id", "attempt", "name", "unit_index"], unique=True
    )

    op.create_table(
        "unit",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("job_id", ID, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("unit_index", sa.Integer(), nullable=False),
        sa.Column("title", sa.String(), nullable=False),
        sa.Column("side", sa.String(), nullable=True),
        sa.Column("outcome", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=True),
        sa.Column("partial", sa.Boolean(), nullable=False),
        sa.Column("environment", JSON, nullable=True),
        sa.Column("validity", JSON, nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_unit_job_attempt_index", "unit", ["job_id", "attempt", "unit_index"], unique=True)
