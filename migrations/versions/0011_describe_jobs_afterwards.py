"""A note on a job, who submitted it, and who set a baseline."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("note", sa.String(), nullable=True))
    op.add_column("job", sa.Column("submitted_by", sa.String(), nullable=True))
    op.create_index("ix_job_submitted_by_id", "job", ["submitted_by", "id"])
    op.add_column("baseline", sa.Column("set_by", sa.String(), nullable=True))
