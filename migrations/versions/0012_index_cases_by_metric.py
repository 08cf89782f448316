"""An index that has a case's measurements by metric, for histories."""

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index("ix_measurement_case_key", "measurement")
    op.create_index("ix_measurement_case", "measurement", ["case_key", "metric", "phase"])
