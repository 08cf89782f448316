"""The results of one job as panels read them: each part is read once, on first use."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from app import results
from app.results import JobChoice, Layout, Sheet
from app.specs import KINDS, Scalar
from app.store.database.engine import Database
from app.store.files.store import FileStore
from app.store.reading.queries import Reading

MAX_ROWS = 50_000
"""Largest number of rows that a plot reads of a table; a unit's table has no more."""
MAX_CASES = 2000

Row = Mapping[str, Scalar]


class JobResults:
    """Tables, cases, measurements and files of one job."""

    def __init__(self, job: Mapping[str, Any], database: Database, reading: Reading, files: FileStore) -> None:
        self.job = job
        self.id: int = job["id"]
        self._database = database
        self._reading = reading
        self._files = files

    @cached_property
    def tables(self) -> Mapping[str, Mapping[str, Any]]:
        """The tables that the job's units reported, by name: `columns`, `rows` (their number), `units`, `url`."""
        return {table["name"]: table for table in results.list_tables(self._database, self.id)}

    @cached_property
    def artifacts(self) -> Mapping[str, Mapping[str, Any]]:
        """The job's files, by name: `kind`, `media_type`, `size`, `url`."""
        return {artifact["name"]: artifact for artifact in self._reading.artifacts(self.id)}

    @cached_property
    def sheet(self) -> Sheet:
        """The job's first cases with every metric, at most `MAX_CASES`; `is_cut` if there are more."""
        return results.table(self._database, JobChoice(jobs=[self.id]), Layout(columns=["all"]), first=MAX_CASES)

    def metric(self, name: str) -> Sheet:
        """Return all cases of the job with one metric, which the sheet has."""
        if not self.sheet.is_cut:
            return self.sheet
        return results.metric_table(self._database, JobChoice(jobs=[self.id]), [name])

    @property
    def grid(self) -> Mapping[str, Sequence[Scalar]]:
        """The values of each coordinate along which the job's spec has a list."""
        kind, spec = KINDS.get(self.job["kind"]), self.job["spec"]
        fields = {} if kind is None else kind.axes
        return {name: values for field, name in fields.items() if isinstance(values := spec.get(field), list)}

    @cached_property
    def measurements(self) -> Sequence[Mapping[str, Any]]:
        """The job's first measurements, in the shape of the API's rows."""
        rows: Sequence[Mapping[str, Any]] = self._reading.measurements(self.id, limit=MAX_ROWS)["rows"]
        return rows

    @property
    def table_columns(self) -> Sequence[str]:
        """The metrics that people look at first, in the order of their plots; none of a kind that this version does not
        know."""
        kind = KINDS.get(self.job["kind"])
        return () if kind is None else sorted(kind.table_columns, key=lambda name: name != kind.first_plotted)

    def has(self, table: str) -> bool:
        """Return True if a unit reported this table, with at least one row."""
        return table in self.tables and bool(self.tables[table]["rows"])

    def rows(self, table: str, *, last: bool = False) -> list[Row]:
        """Return the first rows of a table, of the first unit that reported it or of the last, since rows of several
        processes on top of each other would be no correct plot; an empty list if there is no such table."""
        if table not in self.tables:
            return []
        unit = (max if last else min)(self.tables[table]["units"])
        excerpt = results.Excerpt(unit=unit, limit=MAX_ROWS, columns=["all"])
        sheet = results.result_table(self._database, self.id, table, excerpt)
        names = sheet.names()
        return [dict(zip(names, row, strict=True)) for row in sheet.rows]

    def sweep_sheet(self, columns: Sequence[str], rows: Sequence[str]) -> Sheet | None:
        """Return the finished cases of the job's sweep; None if it belongs to none."""
        if self.job["sweep_id"] is None:
            return None
        choice = JobChoice(sweep=self.job["sweep_id"], kind=self.job["kind"])
        return results.table(self._database, choice, Layout(columns=columns, rows=rows), first=MAX_CASES)

    def head(self, name: str, limit: int) -> bytes:
        """Return the first bytes of a file, `limit` at most. Raises NotFound."""
        artifact = self._reading.artifact(self.id, name)
        return self._files.open(artifact["sha256"]).head(limit)
