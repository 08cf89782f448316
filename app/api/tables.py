"""/tables: measurements of many jobs as one table."""

from __future__ import annotations

from typing import Annotated, Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import Field

from app.api.parameters import Id, Label, StrictQuery, Text
from app.api.services import CurrentServices
from app.layout import Format, Statistic
from app.store import results

router = APIRouter(prefix="/tables", tags=["results"])

MEDIA_TYPES: dict[Format, str] = {
    "json": "application/json",
    "csv": "text/csv; charset=utf-8",
    "markdown": "text/markdown; charset=utf-8",
    "latex": "application/x-latex; charset=utf-8",
    "html": "text/html; charset=utf-8",
}

# People save this page and paste from it, so it must be readable without the style sheet, too.
HTML_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Results · Flopwatch</title>
<link rel="icon" href="/static/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="/static/style.css">
</head>
<body>
<main class="results">
{table}</main>
</body>
</html>
"""


class TableQuery(StrictQuery):
    """The jobs that a table shows, and the layout of their measurements."""

    kind: Text | None = None
    sweep: Id | None = None
    job: list[Id] = Field(default=[], max_length=1000)
    """A job's id; repeat it for several."""
    label: list[Label] = Field(default=[], max_length=20)
    """`key:value`; repeat it for jobs that have several labels."""
    rows: list[Text] = Field(default=[], max_length=100)
    """Coordinates that make the rows, repeated or separated by commas; by default the kind's own."""
    columns: list[Text] = Field(default=[], max_length=100)
    """Metrics that make the columns, named as their columns and repeated or separated by commas; `all` for every one;
    by default the kind's own."""
    statistic: Statistic = "mean"
    """The statistic of each case's samples; if several processes measured a case, of the processes' own statistics.
    """
    format: Format = "json"


@router.get("", summary="A table of measurements")
async def table(services: CurrentServices, query: Annotated[TableQuery, Query()]) -> Response:
    """One row per case, one column per metric; in JSON `missing` tells why cells have no numbers."""
    labels: Any = query.label  # the validator has made pairs of them

    def make() -> Response:
        sheet = results.table(
            services.database,
            kind=query.kind,
            sweep=query.sweep,
            jobs=query.job,
            labels=labels,
            rows=_split(query.rows),
            columns=_split(query.columns),
            statistic=query.statistic,
        )
        return written(sheet, query.format)

    return await run_sync(make, limiter=services.tables)


def written(sheet: results.Sheet, format_: Format) -> Response:
    """A table of results in one of the formats; HTML as a whole page."""
    text = results.render(sheet, format_)
    if format_ == "html":
        text = HTML_PAGE.format(table=text)
    return Response(text, media_type=MEDIA_TYPES[format_])


def _split(names: list[str]) -> list[str] | None:
    return [name.strip() for text in names for name in text.split(",") if name.strip()] or None
