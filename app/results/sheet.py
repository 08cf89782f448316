"""The plain form of every table of results, from which all formats are rendered. Standard library only.

A table of measurements has coordinates, metrics and a verdict on each row; a table that a unit reported has values.
Both become a Sheet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from app.columns import ColumnType
from flopwatch.table_options import Statistic

Role = Literal["coordinate", "metric", "gain", "value"]


@dataclass(slots=True)
class Cell:
    """One metric of one case. `value` is None if `outcome` is not "ok", or if the number is not finite.

    Only the module that makes a table sets `mark` and `best`, before anybody sees it. The class is not frozen all the
    same, since a table has tens of thousands of cells, and a frozen one takes three times as long to make.
    """

    value: float | None
    spread: float | None
    """The number after ±, as `app.summaries.Summary` has it; only beside a mean or a median."""
    n: int | None
    """Number of samples or processes that the cell summarises."""
    outcome: str | None
    """ok | oom | unsupported | timeout | …; None: not measured."""
    job: int | None = field(default=None, compare=False)
    """The job that measured it."""
    validity: str | None = field(default=None, compare=False)
    """The verdict on it, in tables whose rows have several cases."""
    mark: str = field(default="", compare=False)
    """The sign of a note on this number, in tables whose rows have several cases."""
    best: bool = field(default=False, compare=False)
    """True if formats for people set it in bold: nobody knows a better one in its column."""
    low: float | None = None
    """The interval of a median."""
    high: float | None = None
    least: float | None = None
    """The range of what a median summarises, if that is too few for an interval."""
    greatest: float | None = None
    of_time: tuple[float, float] | None = field(default=None, compare=False)
    """Of a rate without an interval, that which follows from its time's."""

    @property
    def ends(self) -> tuple[float, float]:
        """Between which numbers the value lies, as far as what it summarises shows; a mean within two standard errors.
        The value must be known."""
        assert self.value is not None
        if self.of_time is not None:
            return self.of_time
        if self.low is not None and self.high is not None:
            return self.low, self.high
        if self.least is not None and self.greatest is not None:
            return self.least, self.greatest
        error = 2 * (self.spread or 0.0) / math.sqrt(self.n or 1)
        return self.value - error, self.value + error

    def overlaps(self, other: Cell) -> bool:
        """Return True if the intervals of both values, which must be known, overlap: nobody can tell them apart."""
        return self.ends[0] <= other.ends[1] and other.ends[0] <= self.ends[1]


NOT_MEASURED = Cell(None, None, None, None)


@dataclass(frozen=True)
class Column:
    """A column of a sheet. `unit` is the unit of its values, None if they have none."""

    name: str
    type: ColumnType
    unit: str | None = None
    role: Role = "value"
    """People see all digits of a coordinate and four of a value. The cells of a metric, and of a gain (how many times
    better than a reference a row is), are Cells, all others scalars."""
    in_text: bool = True
    """True if formats for people show it; JSON and CSV have every column."""
    group: str | None = None
    """The name that several columns share, such as the metric that a pivot spreads over them; `name` includes it."""
    head: str | None = None
    """The text that distinguishes a column from the others of its group."""
    literal: Sequence[str] = ()
    """Those parts of its name that a reader chose: they stand in all formats as they are, without a unit."""
    mixed: bool = False
    """True if each row has a unit of its own, so that the numbers have no decimals in common."""
    links: bool = False
    """True if its cells are ids of jobs, which HTML links to their pages."""


@dataclass(frozen=True)
class Sheet:
    """A table of results. `rows` have a scalar or a Cell for each column."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    missing: Sequence[str] | None = None
    """The reasons why cells have no numbers, each once; None for a table that a unit reported."""
    next: str | None = None
    """The cursor of the page after these rows."""
    is_cut: bool = False
    """True if these are only the first rows, and the rest was not read."""
    statistic: Statistic | None = None
    """The statistic of the metrics: a mean comes with a standard deviation, a median with its interval. None: they have
    neither."""
    traces: bool = False
    """True if rows have several cases, so that JSON and CSV say of each metric which job measured it, and the verdict.
    """
    notes: Sequence[str] = ()
    """Sentences that formats for people have below the table."""
    marks: Sequence[str] = ()
    """For each row the signs of the notes on it ("†"), which formats for people put behind its first cell; or none."""
    sources: Sequence[Any] = ()
    """For each row what it was made of, while a table is made; empty in a finished one."""
    separate: bool = False
    """True if formats for people have spreads in columns of their own, as CSV and JSON do."""
    caption: str | None = None
    """The table's title, in formats for people."""
    latex_label: str | None = None
    """The label by which LaTeX's \\ref refers to the table."""
    lead: Sequence[str] = ()
    """Sentences that formats for people have above the table: what it shows."""
    about: Mapping[str, Any] | None = None
    """Facts about the table as a whole, which JSON has beside columns and rows."""

    def column(self, name: str) -> list[Any]:
        """Return the values of one column, from the first row to the last. Raises KeyError."""
        places = [index for index, column in enumerate(self.columns) if column.name == name]
        if not places:
            raise KeyError(name)
        return [row[places[0]] for row in self.rows]

    def names(self, role: Role | None = None) -> list[str]:
        """Return the names of all columns, or of the columns with this role."""
        return [column.name for column in self.columns if role in (None, column.role)]

    def part(self, start: int, end: int | None) -> Sheet:
        """Return a sheet with the rows from number `start` on, before number `end`."""
        return replace(self, rows=self.rows[start:end], marks=self.marks[start:end], sources=self.sources[start:end])
