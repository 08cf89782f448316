"""Keep units, result tables and case keys; carry the results of 0001 over (see migrations/rows_0002.py).

SQLite can change most of a table only by making a new one. Measurements may be millions, so one statement fills their
new table from the old one and from a table that gives the new form of each distinct case of each job.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

from migrations import rows_0002 as rows

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

PAGE = 500
"""Number of jobs that are read at once."""
REBUILT = ("sweep", "job", "measurement", "artifact")

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    connection = op.get_bind()
    highest_ids = _highest_ids(connection)
    _create_unit()
    _create_result_table()
    _rebuild_sweep()
    _rebuild_job()
    _rebuild_artifact(connection)
    _create_case_map(connection)
    for job, sweep_id in _jobs(connection):
        _carry_job(connection, job, sweep_id)
    _carry_sweeps(connection)
    _rebuild_measurement(connection)
    op.drop_table("case_map")
    _keep_highest_ids(connection, highest_ids)


def downgrade() -> None:
    raise NotImplementedError("0001 has no place for units and keys: restore the backup that was made before")


def _job_id() -> sa.Column[Any]:
    return sa.Column("job_id", ID, sa.ForeignKey("job.id", ondelete="CASCADE"), nullable=False)


def _id() -> sa.Column[Any]:
    return sa.Column("id", ID, primary_key=True, autoincrement=True, nullable=False)


def _create_unit() -> None:
    op.create_table(
        "unit",
        _id(),
        _job_id(),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("unit_index", sa.Integer(), nullable=False),
        sa.Column("title", sa.String(), nullable=False),
        sa.Column("side", sa.String(), nullable=True),
        sa.Column("outcome", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=True),
        sa.Column("partial", sa.Boolean(), nullable=False),
        sa.Column("environment", sa.JSON(), nullable=True),
        sa.Column("validity", sa.JSON(), nullable=True),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_unit_job_attempt_index", "unit", ["job_id", "attempt", "unit_index"], unique=True)


def _create_result_table() -> None:
    op.create_table(
        "result_table",
        _id(),
        _job_id(),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("unit_index", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("columns", sa.JSON(), nullable=False),
        sa.Column("row_count", sa.Integer(), nullable=False),
        sa.Column("partial", sa.Boolean(), nullable=False),
        sa.Column("rows", sa.LargeBinary(), nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_result_table_job_name", "result_table", ["job_id", "attempt", "name", "unit_index"], unique=True
    )


def _rebuild(name: str, columns: Sequence[sa.Column[Any]], selection: str) -> None:
    """Make the table anew and fill it from `selection`, which gives every column's value in order."""
    op.create_table(f"new_{name}", *columns, sqlite_autoincrement=True)
    names = ", ".join(f'"{column.name}"' for column in columns)
    op.execute(sa.text(f"INSERT INTO new_{name} ({names}) {selection}"))
    op.drop_table(name)
    op.rename_table(f"new_{name}", name)


def _rebuild_sweep() -> None:
    columns = [
        _id(),
        sa.Column("name", sa.String(), nullable=True),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("base", sa.JSON(), nullable=False),
        sa.Column("grid", sa.JSON(), nullable=False),
        sa.Column("exclude", sa.JSON(), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
    ]
    _rebuild("sweep", columns, "SELECT id, name, labels, base, grid, exclude, '{}', created_at FROM sweep ORDER BY id")


def _rebuild_job() -> None:
    columns = [
        _id(),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=True),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("summary", sa.JSON(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("timeout_s", sa.Float(), nullable=True),
        sa.Column("device_type", sa.String(), nullable=False),
        sa.Column("devices", sa.Integer(), nullable=False),
        sa.Column("exclusive_host", sa.Boolean(), nullable=False),
        sa.Column("requirements", sa.JSON(), nullable=False),
        sa.Column("progress", sa.JSON(), nullable=False),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.Column("worker_id", sa.String(), nullable=True),
        sa.Column("sweep_id", ID, sa.ForeignKey("sweep.id", ondelete="SET NULL"), nullable=True),
        sa.Column("point", sa.JSON(), nullable=True),
        sa.Column("environment", sa.JSON(), nullable=True),
        sa.Column("validity", sa.JSON(), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("cancel_requested_at", sa.DateTime(timezone=True), nullable=True),
    ]
    added = {"summary": "'{}'", "point": "NULL"}
    values = ", ".join(added.get(column.name, column.name) for column in columns)
    _rebuild("job", columns, f"SELECT {values} FROM job ORDER BY id")  # noqa: S608 - names of our own
    queued = "state = 'queued'"
    for name, condition in (
        ("ix_job_claimable", queued),
        ("ix_job_deviceless", f"{queued} AND device_type = 'none'"),
    ):
        where = sa.text(condition)
        op.create_index(name, "job", [sa.text("priority DESC"), "id"], sqlite_where=where, postgresql_where=where)
    op.create_index("ix_job_kind_id", "job", ["kind", "id"])
    op.create_index("ix_job_state_id", "job", ["state", "id"])
    op.create_index("ix_job_sweep_id", "job", ["sweep_id"])


def _rebuild_artifact(connection: sa.Connection) -> None:
    columns = [
        _id(),
        _job_id(),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("unit_index", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("media_type", sa.String(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
    ]
    _rebuild(
        "artifact",
        columns,
        "SELECT id, job_id, attempt, 0, name, kind, media_type, size, sha256, created_at FROM artifact ORDER BY id",
    )
    op.create_index("ix_artifact_job_name", "artifact", ["job_id", "attempt", "name"], unique=True)
    op.create_index("ix_artifact_sha256", "artifact", ["sha256"])
    # 0001 knew one artifact only: samples-0.csv.gz of the first replicate, samples-1.csv.gz of the second, ….
    named = connection.execute(sa.text("SELECT id, name FROM artifact WHERE name LIKE 'samples-%.csv.gz'")).all()
    numbers = [
        {"id": artifact_id, "unit_index": int(number)}
        for artifact_id, name in named
        if (number := name.removeprefix("samples-").removesuffix(".csv.gz")).isdecimal()
    ]
    if numbers:
        connection.execute(sa.text("UPDATE artifact SET unit_index = :unit_index WHERE id = :id"), numbers)


def _create_case_map(connection: sa.Connection) -> None:
    connection.execute(
        sa.text(
            "CREATE TEMPORARY TABLE case_map (job_id INTEGER, old_case TEXT, new_case TEXT, unit_index INTEGER, "
            "case_key TEXT, device_key TEXT, validity TEXT, whole TEXT, PRIMARY KEY (job_id, old_case)) WITHOUT ROWID"
        )
    )


def _jobs(connection: sa.Connection) -> Iterator[tuple[rows.OldJob, int | None]]:
    """Yield every job, with the id of its sweep."""
    query = sa.text(
        "SELECT id, kind, state, spec, progress, error, environment, validity, sweep_id, "
        "(SELECT state FROM attempt WHERE job_id = job.id AND number = job.attempt ORDER BY id DESC LIMIT 1) "
        "AS attempt_state FROM job WHERE id > :after ORDER BY id LIMIT :page"
    )
    after = 0
    while page := connection.execute(query, {"after": after, "page": PAGE}).all():
        for row in page:
            job = rows.OldJob(
                id=row.id,
                kind=row.kind,
                state=row.state,
                spec=rows.read_object(row.spec),
                progress=rows.read_object(row.progress),
                error=rows.read_object(row.error),
                environment=rows.read_object(row.environment),
                validity=rows.read_object(row.validity),
                recorded=row.attempt_state in ("succeeded", "failed", "cancelled"),
            )
            yield job, row.sweep_id
        after = page[-1].id


_CASES = sa.text('SELECT DISTINCT "case" FROM measurement WHERE job_id = :job_id')
_MAP = sa.text(
    "INSERT INTO case_map VALUES "
    "(:job_id, :old_case, :new_case, :unit_index, :case_key, :device_key, :validity, :whole)"
)
_UNIT = sa.text(
    "INSERT INTO unit (job_id, attempt, unit_index, title, outcome, reason, partial, environment, validity) "
    "SELECT id, attempt, :unit_index, :title, :outcome, :reason, state != 'succeeded', :environment, :validity "
    "FROM job WHERE id = :job_id"
)


def _carry_job(connection: sa.Connection, job: rows.OldJob, sweep_id: int | None) -> None:
    """Write the job's units and the new forms of its cases; bring the job's own columns up to date."""
    texts = connection.execute(_CASES, {"job_id": job.id}).scalars().all()
    cases = {text: rows.new_case(job, text) for text in texts}
    units = rows.new_units(job, list(cases.values()))
    verdicts = {unit["unit_index"]: (unit["validity"] or {}).get("verdict") for unit in units}
    known = (job.validity or {}).get("verdict")
    if cases:
        mapped = [
            {
                "job_id": job.id,
                "old_case": text,
                "new_case": case.case,
                "unit_index": case.unit_index,
                "case_key": case.case_key,
                "device_key": case.device_key,
                "validity": verdicts.get(case.unit_index) or known,
                "whole": case.whole,
            }
            for text, case in cases.items()
        ]
        connection.execute(_MAP, mapped)
    if units:
        connection.execute(
            _UNIT,
            [
                {
                    **unit,
                    "job_id": job.id,
                    "environment": _json_or_null(unit["environment"]),
                    "validity": _json_or_null(unit["validity"]),
                }
                for unit in units
            ],
        )
    _update_job(connection, job.id, "summary", rows.summary(job))
    _update_job(connection, job.id, "spec", rows.new_spec(job))
    _update_job(connection, job.id, "validity", rows.job_validity(job, units))


def _update_job(connection: sa.Connection, job_id: int, column: str, value: dict[str, Any] | None) -> None:
    if value is not None:
        statement = sa.text(f"UPDATE job SET {column} = :value WHERE id = :id")  # noqa: S608 - a name of our own
        connection.execute(statement, {"id": job_id, "value": json.dumps(value)})


def _carry_sweeps(connection: sa.Connection) -> None:
    """Give each sweep the options of its jobs, and each of these jobs its point."""
    jobs = sa.text("SELECT id, spec, priority, timeout_s, max_attempts FROM job WHERE sweep_id = :id ORDER BY id")
    for sweep_id, text in connection.execute(sa.text("SELECT id, grid FROM sweep")).all():
        members = connection.execute(jobs, {"id": sweep_id}).all()
        first = members[0] if members else None
        options = {
            "priority": first.priority if first else 0,
            "timeout_s": first.timeout_s if first else None,
            "max_attempts": first.max_attempts if first else 2,
        }
        connection.execute(
            sa.text("UPDATE sweep SET options = :options WHERE id = :id"),
            {"id": sweep_id, "options": json.dumps(options)},
        )
        grid = rows.read_object(text)
        if grid is None or not all(isinstance(values, list) for values in grid.values()):
            continue
        points = rows.Grid(grid)
        for member in members:
            spec = rows.read_object(member.spec)
            _update_job(connection, member.id, "point", None if spec is None else points.point(spec))


def _rebuild_measurement(connection: sa.Connection) -> None:
    statistics = ("mean", "std", "median", "min", "max", "p05", "p25", "p75", "p95")
    columns = [
        _id(),
        _job_id(),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("unit_index", sa.Integer(), nullable=False),
        sa.Column("case", sa.JSON(), nullable=False),
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
        *(sa.Column(name, sa.Float(), nullable=True) for name in statistics),
        sa.Column("samples", sa.LargeBinary(), nullable=True),
    ]
    mapped = {
        "unit_index": "map.unit_index",
        "case": "map.new_case",
        "case_key": "map.case_key",
        "device_key": "map.device_key",
        "validity": "map.validity",
        "phase": rows.new_phase("old.metric", "map.whole", "old.phase"),
    }
    values = ", ".join(mapped.get(column.name, f'old."{column.name}"') for column in columns)
    before = connection.execute(sa.text("SELECT count(*) FROM measurement")).scalar_one()
    _rebuild(
        "measurement",
        columns,
        # Rows come in the old table's order, so that SQLite writes the new one from beginning to end.
        f"SELECT {values} FROM measurement AS old CROSS JOIN case_map AS map "  # noqa: S608 - names of our own
        'ON map.job_id = old.job_id AND map.old_case = old."case" ORDER BY old.id',
    )
    after = connection.execute(sa.text("SELECT count(*) FROM measurement")).scalar_one()
    if after != before:
        raise RuntimeError(f"of {before} measurements {after} were carried over; nothing was changed")
    op.create_index("ix_measurement_case_key", "measurement", ["case_key", "device_key"])
    op.create_index("ix_measurement_job_id", "measurement", ["job_id"])


def _json_or_null(value: Any) -> str | None:
    return None if value is None else json.dumps(value)


def _highest_ids(connection: sa.Connection) -> dict[str, int]:
    """Return the highest id that each table ever gave, including ids of rows that are gone."""
    found = connection.execute(sa.text("SELECT name, seq FROM sqlite_sequence"))
    return {str(row.name): int(row.seq) for row in found}


def _keep_highest_ids(connection: sa.Connection, highest: dict[str, int]) -> None:
    """Keep new tables from giving an id twice, even if the rows with the highest ids are gone."""
    for name in REBUILT:
        connection.execute(sa.text("DELETE FROM sqlite_sequence WHERE name = :name"), {"name": name})
        if name in highest:
            connection.execute(
                sa.text("INSERT INTO sqlite_sequence (name, seq) VALUES (:name, :seq)"),
                {"name": name, "seq": highest[name]},
            )
