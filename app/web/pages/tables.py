"""/ui/tables: measurements of many jobs as one table: choose, pivot, relate, export."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError, create_model

from app import results
from app.api.parameters import StrictQuery
from app.api.services import CurrentServices, Services
from app.api.tables import TableQuery
from app.errors import InvalidRequest
from app.specs import KINDS
from app.store.reading import members
from app.web import separated
from app.web.templates import Entry, render, table
from flopwatch.table_options import FORMATS, Statistic
from flopwatch.text.values import value_text

router = APIRouter()
NAVIGATION = Entry("Tables", "/ui/tables", order=40)

ROWS_PER_PAGE = 100
SUGGESTED = 5
"""Number of sweeps, the newest, that the page suggests before jobs are chosen."""
MAX_JOBS_FOR_METRICS = 50
"""Largest number of jobs whose metrics the form offers."""
JOB_PARAMETERS = ("kind", "sweep", "job", "label", "since", "until")
"""Parameters that choose jobs; the others lay the table out."""
PAIRS = ("label", "relative_to", "where", "rename")
LISTS = ("kind", "sweep", "job", "rows", "columns", *PAIRS)
"""Parameters that take several values; the form takes them, but for pairs, in one field, separated by commas or
spaces."""
LABELS = "labels"
"""The form's field for several comma-separated labels; addresses have one `label` for each."""
KEPT = (*JOB_PARAMETERS, "where", "rename")
"""Parameters that the form which lays the table out has no field for, and keeps."""
PAGE_PARAMETERS = ("panel", "after")
"""Parameters of the page itself, which exports and commands leave out."""


_FORM_FIELDS: dict[str, Any] = {
    name: (list[str], []) if name in LISTS else (str | None, None)
    for name in (*TableQuery.model_fields, LABELS, "panel")
    if name != "format"
}
FormQuery: Any = create_model("FormQuery", __base__=StrictQuery, **_FORM_FIELDS)
"""The parameters of `GET /tables` as a form sends them: also empty, and several values in one."""


@router.get("/tables")
def tables(request: Request, services: CurrentServices, _form: Annotated[FormQuery, Query()]) -> Response:
    parameters = parameters_of(request)
    panel = parameters.pop("panel", None) is not None
    query = read_query(parameters)
    chosen = any(parameters.get(name) for name in JOB_PARAMETERS)
    # Before the table is read: what ends in between must be in the next one.
    counts = [services.reading.sweep(sweep)["counts"] for sweep in query.sweep] if panel else []
    content = read_table(services, query) if chosen else {}
    layout = [(name, value) for name, value in pairs(parameters) if name not in PAGE_PARAMETERS]
    return render(
        request,
        "table_panel.html" if panel else "tables.html",
        kinds=sorted(KINDS),
        statistics=get_args(Statistic),
        parameters=parameters,
        labels=separated.joined(parameters.get("label", ())),
        query=query,
        chosen=chosen,
        choosing=[(name, value) for name, value in layout if name in KEPT],
        suggested=[] if chosen else services.reading.sweeps(limit=SUGGESTED)[0],
        exports=[(name, "/tables?" + urlencode([*layout, ("format", name)])) for name in FORMATS],
        curl=f"curl '{str(request.base_url).rstrip('/')}/tables?{urlencode([*layout, ('format', 'markdown')])}'",
        panel=panel,
        unfinished=any(of_states["queued"] or of_states["running"] for of_states in counts),
        this="/ui/tables?" + urlencode(layout),
        page_address=lambda after: "/ui/tables?" + urlencode([*layout, *([("after", after)] if after else [])]),
        **{**NO_TABLE, **content},
    )


NO_TABLE: dict[str, Any] = {
    "table": "",
    "sheet": None,
    "problem": None,
    "coordinates": {},
    "metrics": {},
    "first": 0,
    "after": None,
}


def parameters_of(request: Request) -> dict[str, Any]:
    """Return the parameters of the request that are not empty, those that take several values as lists."""
    parameters: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if not value.strip():
            continue
        if name == LABELS:
            try:
                parameters.setdefault("label", []).extend(separated.split(value))
            except ValueError as wrong:
                raise InvalidRequest.at("/labels", str(wrong)) from wrong
        elif name in LISTS:
            parts = [value] if name in PAIRS else re.split(r"[\s,]+", value.strip())
            parameters.setdefault(name, []).extend(part for part in parts if part)
        else:
            parameters[name] = value.strip()
    return parameters


def read_query(parameters: Mapping[str, Any]) -> TableQuery:
    """Validate the parameters as `GET /tables` does, so that both refuse the same."""
    try:
        return TableQuery.model_validate(parameters)
    except ValidationError as invalid:
        raise RequestValidationError(
            [{**error, "loc": ("query", *error["loc"])} for error in invalid.errors()]
        ) from None


def read_table(services: Services, query: TableQuery) -> dict[str, Any]:
    """Return a page of the table or, if there is no table of these jobs, the problem, so that the form stays."""
    after = int(query.after or 0)
    # Without an order of its own, the table's beginning is that of the first jobs, so that only those are read.
    simple = not (query.pivot or query.relative_to or query.where or query.best or query.sort or after)
    extent: dict[str, Any] = {"first": ROWS_PER_PAGE} if simple else {"limit": ROWS_PER_PAGE, "after": after}
    layout = replace(query.layout(), links=True)
    try:
        sheet = results.table(services.database, query.choice(), layout, sort=query.sort, **extent)
        shown = table(query.styled(sheet))
    except InvalidRequest as problem:
        return {"problem": problem}
    following = str(len(sheet.rows)) if simple and sheet.is_cut else sheet.next
    return {
        "table": shown,
        "sheet": sheet,
        "coordinates": offered_coordinates(sheet, query),
        "metrics": members.metrics(services.database, next(iter(query.sweep), None), query.job[:MAX_JOBS_FOR_METRICS]),
        "first": after,
        "after": following,
    }


def offered_coordinates(sheet: results.Sheet, query: TableQuery) -> dict[str, list[str]]:
    """Return the coordinates that could be pivoted, or related to, with their values."""
    names = [name for name in sheet.names("coordinate") if name != "job"]
    values = {name: list(dict.fromkeys(value_text(value) for value in sheet.column(name))) for name in names}
    for name in filter(None, (query.pivot, *(name for name, _ in _references(query)))):
        values.setdefault(name, [])
    for name, value in _references(query):
        if value not in values[name]:
            values[name].append(value)
    return values


def _references(query: TableQuery) -> Iterable[tuple[str, str]]:
    # The validator has turned them into pairs.
    return query.relative_to  # type: ignore[return-value]


def pairs(parameters: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the parameters one by one, those with several values repeated."""
    return [
        (name, str(part))
        for name, value in parameters.items()
        for part in (value if isinstance(value, list) else [value])
    ]
