"""Index what is pruned by age; keep what workers had apart from the workers; note which answers are still awaited.

Each start of an agent is a row of `worker`, and few rows differ in what the agent had: `known_host` has these once.
"""

from __future__ import annotations

import hashlib
import json
import logging
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

logger = logging.getLogger(__name__)


def upgrade() -> None:
    connection = op.get_bind()
    known_host = op.create_table(
        "known_host",
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("kinds", sa.JSON(), nullable=False),
        sa.Column("capabilities", sa.JSON(), nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("last_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("key"),
    )
    rows = _known_hosts(connection)
    if rows:
        op.bulk_insert(known_host, rows)
    op.create_index("ix_worker_state", "worker", ["state", "registered_at", "id"])
    op.create_index("ix_worker_registered_at", "worker", ["registered_at", "id"])
    op.create_index("ix_job_finished_at", "job", ["finished_at"])
    op.create_index("ix_idempotency_key_created_at", "idempotency_key", ["created_at"])
    op.add_column("idempotency_key", sa.Column("awaited", sa.Boolean(), server_default=sa.false(), nullable=False))


def downgrade() -> None:
    raise NotImplementedError("restore the backup that was made before")


def _known_hosts(connection: sa.Connection) -> list[dict[str, Any]]:
    """Return a row for each different host that workers registered, as app.store.queue.hosts writes them.

    Rows of workers that cannot be read are left out: what they had is unknown anyway.
    """
    workers = connection.execute(
        sa.text(
            "SELECT kinds, capabilities, devices, max(last_seen_at) FROM worker GROUP BY kinds, capabilities, devices"
        )
    )
    found: dict[str, dict[str, Any]] = {}
    for *lists, seen in workers:
        try:
            kinds, capabilities, devices = map(_items, lists)
            last_seen_at = datetime.fromisoformat(seen)
        except (ValueError, TypeError, RecursionError) as error:
            logger.warning("what a worker had is unknown, for its row cannot be read: %s", error)
            continue
        has = {"kinds": kinds, "capabilities": capabilities, "gpus": _gpus(devices)}
        key = hashlib.sha256(json.dumps(has, sort_keys=True).encode()).hexdigest()
        if key not in found or found[key]["last_seen_at"] < last_seen_at:
            found[key] = {"key": key, **has, "last_seen_at": last_seen_at}
    return list(found.values())


def _items(stored: str) -> list[Any]:
    items = json.loads(stored)
    if not isinstance(items, list):
        raise TypeError(f"{stored[:40]} is no list")
    return items


def _gpus(devices: list[Any]) -> int:
    uuids = [str(device.get("uuid")) for device in devices if isinstance(device, dict) and device.get("type") == "cuda"]
    whole = sum(not uuid.startswith("MIG-") for uuid in uuids)
    return max(whole, min(len(uuids), 1))
