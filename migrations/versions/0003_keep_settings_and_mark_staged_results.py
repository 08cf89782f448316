"""Add settings of the whole service, and mark attempts that have written results before their end."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "setting",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("value", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.add_column("attempt", sa.Column("staged", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.create_index("ix_attempt_staged", "attempt", ["id"], sqlite_where=sa.text("staged"))


def downgrade() -> None:
    raise NotImplementedError("restore the backup that was made before")
