"""/tables: measurements of many jobs as one table."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import Field

from app.api.parameters import Id, StrictQuery, Text
from app.api.services import CurrentServices

router = APIRouter(prefix="/tables", tags=["results"])

Format = Literal["json", "csv", "markdown", "latex", "html"]

MEDIA_TYPES: dict[Format, str] = {
    "json": "application/json",
    "csv": "text/csv; charset=utf-8",
    "markdown": "text/markdown; charset=utf-8",
    "latex": "application/x-latex; charset=utf-8",
    "html": "text/html; charset=utf-8",
}

# Readable without the style sheet, too: the page is made to be saved and pasted from.
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
    """Which jobs, and how to lay their measurements out."""

    kind: Text | None = None
    sweep: Id | None = None
    job: list[Id] = Field(default=[], max_length=1000)
    """A job's id; repeat it for several."""
    rows: list[Text] = Field(default=[], max_length=100)
    """Coordinates that make the rows, repeated or separated by commas; by default the kind's own."""
    columns: list[Text] = Field(default=[], max_length=100)
    """Metrics that make the columns, repeated or separated by commas; by default the kind's own."""
    format: Format = "json"


@router.get("", summary="A table of measurements")
def table(services: CurrentServices, query: Annotated[TableQuery, Query()]) -> Response:
    """One row per case, one column per metric."""
    # pandas takes half a second to import, which the server's start should not.
    from app.store import results

    frame = results.table(
        services.database,
        kind=query.kind,
        sweep=query.sweep,
        jobs=query.job,
        rows=_split(query.rows),
        columns=_split(query.columns),
    )
    text = results.render(frame, query.format)
    if query.format == "html":
        text = HTML_PAGE.format(table=text)
    return Response(text, media_type=MEDIA_TYPES[query.format])


def _split(names: list[str]) -> list[str] | None:
    return [name.strip() for text in names for name in text.split(",") if name.strip()] or None
