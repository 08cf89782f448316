"""Changes what people wrote about a job: its name, labels and note. Its spec and results stay as they are."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import delete, insert, update

from app.errors import Conflict, InvalidRequest
from app.store import tables
from app.store.database.engine import Database
from app.store.public import row_of
from app.store.records import MAX_LABELS

_job = tables.job.c


def describe_job(database: Database, job_id: int, changes: Mapping[str, Any]) -> None:
    """Change the job's `name` and `note`, where None removes them, and `labels`: {key: value, or None to remove it}.
    Raises NotFound, Conflict if it is being deleted, and InvalidRequest for more than MAX_LABELS labels."""
    with database.write() as connection:
        job = row_of(connection, tables.job, job_id)
        if job.deleting:
            raise Conflict(f"Job {job_id} is being deleted.")
        values = {name: changes[name] for name in ("name", "note") if name in changes}
        if "labels" in changes:
            merged = {**(job.labels or {}), **changes["labels"]}
            labels = {key: value for key, value in merged.items() if value is not None}
            if len(labels) > MAX_LABELS:
                detail = f"The job would have {len(labels)} labels; {MAX_LABELS} is the most: remove some."
                raise InvalidRequest.at("/labels", detail)
            values["labels"] = labels
            connection.execute(delete(tables.job_label).where(tables.job_label.c.job_id == job_id))
            if labels:
                rows = [{"job_id": job_id, "key": key, "value": value} for key, value in labels.items()]
                connection.execute(insert(tables.job_label), rows)
        connection.execute(update(tables.job).where(_job.id == job_id).values(**values, version=_job.version + 1))
