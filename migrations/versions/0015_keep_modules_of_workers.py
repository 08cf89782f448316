"""The Python modules that uploaded code can import on each worker."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("worker", sa.Column("modules", sa.JSON().with_variant(sa.Text(), "postgresql"), nullable=True))
