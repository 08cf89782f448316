"""Searches one of a job's own tables by words; the matching rows are shown sorted, page by page."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlencode

from pydantic import Field

from app import results
from app.api.parameters import StrictQuery, Text
from app.errors import NotFound
from app.results.sheet import Column
from app.store.database.engine import Database
from app.web.panels._results import JobResults
from app.web.parameters import NONE_IF_EMPTY

PAGE = 50
"""Rows of a page."""
STACK, SITE = "stack", "site"
"""The column with a stack of calls, "innermost < … < outermost", and the column with its innermost call."""
MAX_ROW = 2**31


class View(StrictQuery):
    """The part of a table that a reader asks for; a form sends every field, the empty ones too."""

    table: Annotated[Text | None, NONE_IF_EMPTY] = None
    """The table's name; by default the first one's."""
    q: Annotated[Text | None, NONE_IF_EMPTY] = None
    """Words to search for: only rows whose texts contain all of them."""
    sort: Annotated[Text | None, NONE_IF_EMPTY] = None
    """A column to sort by; `-column` sorts in descending order. One that the table lacks is ignored: it was chosen for
    another table."""
    after: Annotated[int, Field(ge=0, le=MAX_ROW)] = 0
    """Rows to leave out at the beginning."""


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
    address: str
    """The page's address without its query."""
    url: str
    """The address of the table in the API."""

    def link(self, **changed: Any) -> str:
        """Return the address of the same view with some fields changed, from its beginning."""
        fields = {**self.view.model_dump(exclude_defaults=True, exclude={"after"}), **changed}
        return f"{self.address}?{urlencode({key: value for key, value in fields.items() if value})}"

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
    """Return a view of one of a job's tables. Raises NotFound if the job has no such table."""
    name = view.table or next(iter(job.tables), "")
    if name not in job.tables:
        raise NotFound(f"Job {job.id} has no table {name!r}; it has: {', '.join(job.tables) or 'none'}.")
    known = [column["name"] for column in job.tables[name]["columns"]]
    sort = view.sort if view.sort is not None and view.sort.removeprefix("-") in known else None
    sheet = results.result_table(database, job.id, name, results.Excerpt(sort=sort, columns=["all"]))
    hidden = {SITE} if STACK in known else set()
    shown = [index for index, column in enumerate(sheet.columns) if column.in_text and column.name not in hidden]
    texts = [index for index in shown if sheet.columns[index].type == "string"]
    words = (view.q or "").lower().split()
    matching = [row for row in sheet.rows if contains_words(row, texts, words)]
    return TablePage(
        view=view.model_copy(update={"table": name, "sort": sort}),
        tables=list(job.tables),
        columns=[sheet.columns[index] for index in shown],
        rows=[[row[index] for index in shown] for row in matching[view.after : view.after + PAGE]],
        matching=len(matching),
        total=len(sheet.rows),
        address=f"/ui/jobs/{job.id}/explore",
        url=job.tables[name]["url"],
    )


def contains_words(row: Sequence[Any], texts: Sequence[int], words: Sequence[str]) -> bool:
    """Return True if the texts of a row have all of these words, whatever their case."""
    text = " ".join(str(row[index]) for index in texts if row[index] is not None).lower()
    return all(word in text for word in words)
