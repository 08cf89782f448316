"""/tables: measurements of many jobs as one table."""

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from app import results
from app.api.parameters import EACH_ONCE, Coordinate, Cursor, Id, Label, Moment, StrictQuery, Text, documented
from app.api.schemas import Table
from app.api.services import CurrentServices, slow
from flopwatch.table_options import DEFAULT_STATISTIC, Format, Statistic

router = APIRouter(prefix="/tables", tags=["results"])

MEDIA_TYPES: dict[Format, str] = {
    "json": "application/json",
    "csv": "text/csv; charset=utf-8",
    "markdown": "text/markdown; charset=utf-8",
    "latex": "application/x-latex; charset=utf-8",
    "html": "text/html; charset=utf-8",
}


def in_every_format(model: Any) -> dict[str, Any]:
    """Return the /openapi.json entry of a table that `written` writes; `model` is the shape of its JSON."""
    texts = (media_type.partition(";")[0] for format_, media_type in MEDIA_TYPES.items() if format_ != "json")
    return {"model": model, "content": {text: {"schema": {"type": "string"}} for text in texts}}


# People save this page and paste from it, so it must be readable without the style sheet, too.
HTML_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Results · Flopwatch</title>
<link rel="icon" href="/static/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="/static/colours.css">
<link rel="stylesheet" href="/static/style.css">
</head>
<body>
<main class="results">
{table}</main>
</body>
</html>
"""


def _not_blank(text: str) -> str:
    if not text.strip():
        raise PydanticCustomError("blank", "is blank: write a title, or leave it out")
    return text


MAX_LIMIT = 100_000
Caption = Annotated[str, Field(max_length=2000), documented(r"\S"), AfterValidator(_not_blank)]
LatexLabel = Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9:._-]+$")]


class TextQuery(StrictQuery):
    """The rows that a table shows, and its style."""

    where: list[Coordinate] = Field(default=[], max_length=20)
    """`column=value`: only these rows; of measurements, those with this coordinate. Repeat it for another column, or
    for another value of the same one."""
    rename: Annotated[list[Coordinate], EACH_ONCE] = Field(default=[], max_length=100)
    """`column=name`: call this column otherwise, in every format; in a pivoted table a metric, or the pivot's
    coordinate. Repeat it for several."""
    caption: Caption | None = None
    """The table's title, in Markdown, LaTeX and HTML."""
    latex_label: LatexLabel | None = None
    """The label by which LaTeX's `\\ref` refers to the table."""

    def styled(self, sheet: results.Sheet) -> results.Sheet:
        """Return the sheet with its title, and with the names that the reader wants."""
        named = results.renamed(sheet, self.rename)  # type: ignore[arg-type]  # pairs, once validated
        return replace(named, caption=self.caption, latex_label=self.latex_label)


class ChoiceQuery(StrictQuery):
    """The finished jobs that a table shows: those of `job` and `sweep` together, filtered by the other parameters."""

    kind: list[Text] = Field(default=[], max_length=100)
    """Jobs of this kind. A table of several kinds names each: repeat it."""
    sweep: list[Id] = Field(default=[], max_length=1000)
    """A sweep's id; repeat it for several. The table has the latest job of each point."""
    job: list[Id] = Field(default=[], max_length=1000)
    """A job's id; repeat it for several. Beside `sweep`: these jobs, too."""
    label: list[Label] = Field(default=[], max_length=20)
    """`key=value` or `key:value`; repeat it for jobs that have several labels."""
    since: Moment | None = None
    """Jobs that finished since then: `90min`, `12h`, `7d` or `2w` ago, a date (`2026-03-01`) or a time
    (`2026-03-01T14:00:00Z`). UTC, if it names no time zone."""
    until: Moment | None = None
    """Jobs that finished before then; written like `since`."""

    def choice(self) -> results.JobChoice:
        return results.JobChoice(
            kind=self.kind[0] if len(self.kind) == 1 else self.kind or None,  # several may share the table
            sweep=self.sweep,
            jobs=self.job,
            labels=self.label,  # type: ignore[arg-type]  # pairs, once validated
            since=self.since,  # type: ignore[arg-type]  # times, once validated
            until=self.until,  # type: ignore[arg-type]
        )


class TableQuery(ChoiceQuery, TextQuery):
    """The jobs that a table shows, and the layout of their measurements."""

    rows: list[Text] = Field(default=[], max_length=100)
    """Coordinates that make the rows, repeated or separated by commas; by default the kind's own."""
    columns: list[Text] = Field(default=[], max_length=100)
    """Metrics that make the columns, named as their columns and repeated or separated by commas; `all` for every one;
    by default the kind's own."""
    statistic: Statistic = DEFAULT_STATISTIC
    """The statistic of each case's samples; if several processes measured a case, of the processes' own statistics. A
    median comes with its 95 % interval, a mean with the standard deviation."""
    pivot: Text | None = None
    """The coordinate whose values become columns, for each metric in `columns`, by default for the kind's main
    metric."""
    relative_to: Annotated[list[Coordinate], EACH_ONCE] = Field(default=[], max_length=20)
    """`coordinate=value` of the reference rows; an additional column (`step_ms_speedup`) relates all other rows to
    them. Repeat it for a reference that needs several coordinates. It applies to each metric in `columns`, by default
    to the kind's main metric."""
    best: bool = False
    """Set the best cell of each column in bold, in Markdown, LaTeX and HTML; where the pivot is a choice, such as
    `implementation`, that of each row."""
    separate: bool = False
    """Put what stands after `±`, or in brackets, into columns of its own, in Markdown, LaTeX and HTML, too: the
    standard deviation beside a mean, the ends of the interval beside a median."""
    links: bool = False
    """Show the job of each row, with its address, in Markdown, LaTeX and HTML, too."""
    sort: Text | None = None
    """A column to sort by; `-column` sorts in descending order. Unknown values come last."""
    limit: Annotated[int, Field(ge=1, le=MAX_LIMIT)] | None = None
    """The largest number of rows; by default all."""
    after: Cursor | None = None
    """`next` of the previous page."""
    format: Format = "json"

    def layout(self) -> results.Layout:
        return results.Layout(
            rows=split(self.rows),
            columns=split(self.columns),
            statistic=self.statistic,
            pivot=self.pivot,
            relative_to=dict(self.relative_to),  # type: ignore[arg-type]  # pairs, once validated
            where=self.where,  # type: ignore[arg-type]  # pairs, once validated
            best=self.best,
            separate=self.separate,
            links=self.links,
        )


@router.get("", responses={200: in_every_format(Table)}, summary="A table of measurements")
@slow
def get_table(services: CurrentServices, request: Request, query: Annotated[TableQuery, Query()]) -> Response:
    """Returns a table with one row per case and one column per metric; in JSON, `missing` says why cells have no
    numbers.

    422 if the table would have more than 200 000 measurements or 10 000 jobs: choose fewer jobs.
    """
    after = int(query.after or 0)
    choice, layout = query.choice(), query.layout()
    sheet = results.table(services.database, choice, layout, sort=query.sort, limit=query.limit, after=after)
    links_to = str(request.base_url) if query.links else None
    return written(query.styled(sheet), query.format, base_url=links_to)


def written(sheet: results.Sheet, format_: Format, *, base_url: str | None = None) -> Response:
    """Return a table of results in one of the formats; HTML as a whole page. `base_url` is the server's, for links to
    jobs."""
    text = results.render(sheet, format_, base_url=base_url)
    if format_ == "html":
        text = HTML_PAGE.format(table=text)
    return Response(text, media_type=MEDIA_TYPES[format_])


def split(names: list[str]) -> list[str] | None:
    """Return names that were repeated or separated by commas; None if there are none."""
    return [name.strip() for text in names for name in text.split(",") if name.strip()] or None
