"""Searches one of a job's own tables by words and by values of columns; the matching rows are shown sorted, page by
page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlencode

from pydantic import Field

from app import results
from app.api.parameters import StrictQuery, Text
from app.errors import FieldError, InvalidRequest, NotFound
from app.results.sheet import Column
from app.store.database.engine import Database
from app.web.panels._results import JobResults
from app.web.parameters import NONE_IF_EMPTY

PAGE = 50
"""Rows of a page."""
MAX_CHOICES, MAX_CHOICE_CHARACTERS = 16, 32
"""A column with more values, or with longer ones, has no filter; words find its rows."""
STACK, SITE = "stack", "site"
"""The column with a stack of calls, "innermost < … < outermost", and the column with its innermost call."""
MAX_ROW = 2**31
MAX_FILTERS = 10
"""Largest number of columns that can be filtered by value."""


class View(StrictQuery):
    """The part of a table that a reader asks for; a form sends every field, the empty ones too."""

    table: Annotated[Text | None, NONE_IF_EMPTY] = None
    """The table's name; by default the first one's."""
    of: Annotated[Text | None, NONE_IF_EMPTY] = None
    """The table for which `sort` and `only` were chosen, if it is another one: columns that `table` lacks are
    ignored."""
    q: Annotated[Text | None, NONE_IF_EMPTY] = None
    """Words to search for: only rows whose texts contain all of them."""
    only: Annotated[list[Text], Field(default_factory=list, max_length=MAX_FILTERS)]
    """`column:value`: only rows with this value; empty: all."""
    sort: Annotated[Text | None, NONE_IF_EMPTY] = None
    """A column to sort by; `-column` sorts in descending order."""
    after: Annotated[int, Field(ge=0, le=MAX_ROW)] = 0
    """Rows to leave out at the beginning."""


@dataclass(frozen=True)
class ColumnFilter:
    """A column with few values, by one of which a reader may filter."""

    column: str
    values: Sequence[str]
    chosen: str | None


@dataclass(frozen=True)
class TablePage:
    """The part of a table that a page shows."""

    view: View
    """The request, with the table's name filled in."""
    tables: Sequence[str]
    """Names of all tables of the job."""
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    matching: int
    """Number of rows that match."""
    total: int
    filters: Sequence[ColumnFilter]
    address: str
    """The page's address without its query."""
    url: str
    """The address of the table in the API."""

    def link(self, **changed: Any) -> str:
        """Return the address of the same view with some fields changed, from its beginning."""
        fields = {**self.view.model_dump(exclude_defaults=True, exclude={"after", "of"}), **changed}
        return f"{self.address}?{urlencode({key: value for key, value in fields.items() if value}, doseq=True)}"

    def sorting(self, column: str) -> str:
        """Return the address of the view sorted by a column; if it already is, in the opposite order."""
        return self.link(sort=column if self.view.sort == f"-{column}" else f"-{column}")

    @property
    def previous(self) -> str:
        """The address of the page before this one."""
        return self.link(after=max(0, self.view.after - PAGE))

    @property
    def next(self) -> str | None:
        """The address of the page after this one; None if this is the last."""
        end = self.view.after + len(self.rows)
        return self.link(after=end) if end < self.matching else None

    def order(self, column: str) -> str:
        """Return the value of aria-sort of a column."""
        return {column: "ascending", f"-{column}": "descending"}.get(self.view.sort or "", "none")


def table_page(database: Database, job: JobResults, view: View) -> TablePage:
    """Return a view of one of a job's tables.

    Raises:
        NotFound: the job has no such table.
        InvalidRequest: there is no such column to sort or filter by.
    """
    name = view.table or next(iter(job.tables), "")
    if name not in job.tables:
        raise NotFound(f"Job {job.id} has no table {name!r}; it has: {', '.join(job.tables) or 'none'}.")
    is_of_another = view.of not in (None, name)
    if is_of_another:
        view = without_others(view, [column["name"] for column in job.tables[name]["columns"]])
    sheet = results.result_table(database, job.id, name, results.Excerpt(sort=view.sort, columns=["all"]))
    columns = sheet.names()
    hidden = {SITE} if STACK in columns else set()
    shown = [index for index, column in enumerate(sheet.columns) if column.in_text and column.name not in hidden]
    texts = [index for index in shown if sheet.columns[index].type == "string"]
    wanted = dict(chosen_values(view.only, columns))
    filters = column_filters(sheet, texts, wanted)
    if is_of_another:  # a value that only the other table has is ignored, too
        wanted = {
            column_filter.column: column_filter.chosen
            for column_filter in filters
            if column_filter.chosen and column_filter.chosen in column_filter.values
        }
    words = (view.q or "").lower().split()
    matching = [
        row
        for row in sheet.rows
        if all(str(row[columns.index(name)]) == value for name, value in wanted.items())
        and contains_words(row, texts, words)
    ]
    return TablePage(
        view=view.model_copy(update={"table": name, "only": [f"{key}:{value}" for key, value in wanted.items()]}),
        tables=list(job.tables),
        columns=[sheet.columns[index] for index in shown],
        rows=[[row[index] for index in shown] for row in matching[view.after : view.after + PAGE]],
        matching=len(matching),
        total=len(sheet.rows),
        filters=filters,
        address=f"/ui/jobs/{job.id}/explore",
        url=job.tables[name]["url"],
    )


def without_others(view: View, columns: Sequence[str]) -> View:
    """Return the view without settings for other columns than these, since they were chosen for another table."""
    sort = view.sort if view.sort is not None and view.sort.removeprefix("-") in columns else None
    only = [text for text in view.only if text.partition(":")[0] in columns]
    return view.model_copy(update={"sort": sort, "only": only})


def column_filters(sheet: results.Sheet, texts: Sequence[int], wanted: Mapping[str, str]) -> list[ColumnFilter]:
    """Return the columns to filter by, of those with these indices: the ones in use, then others with few values."""
    filters = []
    for index in texts:
        name = sheet.columns[index].name
        values = sorted({str(row[index]) for row in sheet.rows if row[index] is not None})
        is_short = 1 < len(values) <= MAX_CHOICES and max(map(len, values)) <= MAX_CHOICE_CHARACTERS
        if is_short and len(values) < len(sheet.rows):
            filters.append(ColumnFilter(name, values, wanted.get(name)))
    kept = sorted(filters, key=lambda column_filter: column_filter.chosen is None)[:MAX_FILTERS]
    return [column_filter for column_filter in filters if column_filter in kept]


def chosen_values(only: Sequence[str], columns: Sequence[str]) -> list[tuple[str, str]]:
    """Return (column, value) of each `column:value`; empty ones are ignored.

    Raises:
        InvalidRequest: one names no column of the table.
    """
    pairs = []
    for text in filter(None, only):
        name, colon, value = text.partition(":")
        if not colon or name not in columns:
            detail = f"{text!r} must be written column:value; there is {', '.join(columns)}."
            raise InvalidRequest(detail, errors=(FieldError("/only", detail),))
        pairs.append((name, value))
    return pairs


def contains_words(row: Sequence[Any], texts: Sequence[int], words: Sequence[str]) -> bool:
    """Return True if the texts of a row have all of these words, whatever their case."""
    if not words:
        return True
    text = " ".join(str(row[index]) for index in texts if row[index] is not None).lower()
    return all(word in text for word in words)
