"""What keeps a worker from claiming, the number of its specs' schema, and what a claimed job waits for."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(sa.Text(), "postgresql")


def upgrade() -> None:
    op.add_column("worker", sa.Column("schema_number", sa.Integer(), nullable=True))
    op.add_column("worker", sa.Column("unfit", JSON, nullable=True))
    op.add_column("job", sa.Column("waiting_reason", sa.String(), nullable=True))
