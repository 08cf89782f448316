"""Exports: a job, a sweep or a comparison as one HTML file that needs no server, no network and no script.

It has tables, plots as SVG, verdicts, environment and spec. Its content security policy forbids it to load anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version as package_version
from typing import Annotated, Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, Response
from markupsafe import Markup
from pydantic import Field

from app import results
from app.api.compare import SHOWN_TO_PEOPLE, ComparedQuery
from app.api.parameters import JobId, StrictQuery, SweepId, Text
from app.api.services import CurrentServices, Services
from app.layout import case_text
from app.metrics import headline, readable
from app.results.samples import samples_of
from app.specs._base import flat
from app.states import FINISHED_STATES
from app.web import plots, svg
from app.web.panels import JobResults, panels_of
from app.web.templates import STATIC, page_text, table

router = APIRouter(tags=["results"])

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'none'; base-uri 'none'"
STYLES = ("colours.css", "export.css")
"""The files of `static` that an export's style is made of."""
MAX_ROWS = 10_000
SHOWN_ROWS = 1000
"""Rows of the table of results, unless the client asks for others."""
SHOWN_OF_TABLES = 30
"""Rows of each table that units reported."""
MAX_TABLES = 40
MAX_MAPS = 4
MAX_JOBS = 200
"""Largest number of jobs of a sweep whose environments are read."""
MAX_CASES = 24
"""Most cases whose distributions or ratios stand beside each other."""


class ExportQuery(StrictQuery):
    """The options of the export of a job or a sweep."""

    rows: Annotated[int, Field(ge=1, le=MAX_ROWS)] = SHOWN_ROWS
    """The most rows of the table of results."""
    metric: Text | None = None
    """The metric that is drawn; by default the kind's main metric."""


HTML: dict[int | str, dict[str, Any]] = {200: {"content": {"text/html": {}}, "description": "The file."}}


@router.get("/jobs/{job_id}/export", response_class=HTMLResponse, responses=HTML, summary="A job as one HTML file")
async def job(
    request: Request, services: CurrentServices, job_id: JobId, query: Annotated[ExportQuery, Query()]
) -> Response:
    """Returns one HTML file to share, with results, plots, the tables that units reported, verdict, environment and
    spec. It opens without the server, and has no script.
    """
    return await run_sync(lambda: _job(request, services, job_id, query), limiter=services.tables)


@router.get(
    "/sweeps/{sweep_id}/export", response_class=HTMLResponse, responses=HTML, summary="A sweep as one HTML file"
)
async def sweep(
    request: Request, services: CurrentServices, sweep_id: SweepId, query: Annotated[ExportQuery, Query()]
) -> Response:
    """Returns one HTML file, as for a job: results and plots of all points, verdicts, environments, base and grid."""
    return await run_sync(lambda: _sweep(request, services, sweep_id, query), limiter=services.tables)


@router.get("/compare/export", response_class=HTMLResponse, responses=HTML, summary="A comparison as one HTML file")
async def compare(request: Request, services: CurrentServices, query: Annotated[ComparedQuery, Query()]) -> Response:
    """Returns one HTML file, as for a job: the table and the sentences of `GET /compare`, with plots of ratios and
    distributions."""
    query.check()
    return await run_sync(lambda: _compare(request, services, query), limiter=services.tables)


def _file(request: Request, name: str, path: str, **values: Any) -> Response:
    """Return the file, under the name by which it is saved. `path` is the page that shows the same."""
    text = page_text(
        "export.html",
        style=Markup("".join((STATIC / name).read_text(encoding="utf-8") for name in STYLES)),  # noqa: S704  # our own
        policy=POLICY,
        source=str(request.base_url).rstrip("/") + path,
        made_at=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        version=package_version("flopwatch"),
        **values,
    )
    headers = {"Content-Disposition": f'inline; filename="{name}"', "Content-Security-Policy": POLICY}
    return HTMLResponse(text, headers=headers)


def _job(request: Request, services: Services, job_id: int, query: ExportQuery) -> Response:
    found, _version = services.reading.job(job_id)
    sheet = None
    if found["state"] in FINISHED_STATES:
        sheet = results.table(services.database, jobs=[job_id], first=query.rows)
    panels = [] if sheet is None else _panels(services, found)
    figures = []
    if sheet is not None and (not panels or query.metric is not None or len(sheet.rows) == 1):
        figures = _figures(services, sheet, [job_id], query.metric)  # otherwise the kind's own figures show it
    units = services.reading.units(job_id)
    tables = results.list_tables(services.database, job_id)
    case = case_text(found["summary"] or {})
    return _file(
        request,
        f"flopwatch-job-{job_id}.html",
        f"/ui/jobs/{job_id}",
        title=f"Job {job_id}: {found['name'] or found['kind']}",
        what=", ".join(filter(None, (found["kind"], case))),
        job=found,
        results=_results(sheet),
        figures=figures,
        panels=panels,
        tables=[(own["name"], own["rows"], _reported(services, job_id, own["name"])) for own in tables[:MAX_TABLES]],
        shown_rows=SHOWN_OF_TABLES,
        tables_left_out=max(0, len(tables) - MAX_TABLES),
        units=units if len(units) > 1 else [],
        environment=_facts([found["environment"]]),
        spec=_pretty(found["spec"]),
    )


def _sweep(request: Request, services: Services, sweep_id: int, query: ExportQuery) -> Response:
    found = services.reading.sweep(sweep_id)
    sheet = results.table(services.database, sweep=sweep_id, first=query.rows)
    jobs, following = services.reading.jobs(sweep=sweep_id, limit=MAX_JOBS)
    verdicts: dict[str, int] = {}
    for one in jobs:
        if one["validity"] is not None:
            verdict = str(one["validity"].get("verdict", "unknown"))
            verdicts[verdict] = verdicts.get(verdict, 0) + 1
    return _file(
        request,
        f"flopwatch-sweep-{sweep_id}.html",
        f"/ui/sweeps/{sweep_id}",
        title=f"Sweep {sweep_id}" + (f": {found['name']}" if found["name"] else ""),
        what=", ".join(f"{count} {state}" for state, count in found["counts"].items() if count),
        sweep=found,
        results=_results(sheet),
        figures=_figures(services, sheet, [], query.metric),
        verdicts=verdicts,
        of_jobs=len(jobs) if following is not None else None,
        environment=_facts([one["environment"] for one in jobs]),
        spec=_pretty({name: found[name] for name in ("base", "grid", "exclude")}),
    )


def _compare(request: Request, services: Services, query: ComparedQuery) -> Response:
    sheet = query.sheet(services.database, SHOWN_TO_PEOPLE if query.limit is None else query.limit)
    about: Mapping[str, Any] = sheet.about or {}
    ids = [query.job] if query.job is not None else [*query.baseline, *query.candidate]
    jobs = [services.reading.job(number)[0] for number in ids]
    name = "-".join(str(number) for number in ids[:4])
    return _file(
        request,
        f"flopwatch-compare-{name}.html",
        "/ui/compare?" + "&".join(f"job={number}" for number in ids),
        title="Comparison of " + ", ".join(f"job {number}" for number in ids[:9]),
        what=about.get("sentence") or "",
        jobs=jobs,
        results=_results(sheet),
        figures=_of_comparison(sheet, about),
        environment=_facts([one["environment"] for one in jobs]),
        spec=_pretty({f"job {one['id']}": one["spec"] for one in jobs}),
    )


def _results(sheet: results.Sheet | None) -> dict[str, Any]:
    if sheet is None:
        return {"table": "", "missing": [], "is_cut": False, "rows": 0}
    return {
        "table": table(sheet),
        "missing": list(sheet.missing or ()),
        "is_cut": sheet.is_cut,
        "rows": len(sheet.rows),
    }


def _reported(services: Services, job_id: int, name: str) -> Markup:
    sheet = results.result_table(services.database, job_id, name, limit=SHOWN_OF_TABLES)
    return Markup(results.render(sheet, "html"))  # noqa: S704  # its cells are escaped


def _figures(
    services: Services, sheet: results.Sheet, jobs: Sequence[int], asked: str | None
) -> list[tuple[str, Markup]]:
    """Return plots of the table: a metric along its coordinates; for a job with one case, its samples over the
    steps."""
    units = {column.name: column.unit for column in sheet.columns if column.role == "metric"}
    metric = asked if asked in units else headline(list(units))
    if metric is None or not sheet.rows:
        return []
    unit = units[metric]
    points = plots.points_of(sheet, metric)
    values = plots.varying(points)
    if not values:
        return _samples(services, jobs, metric)
    axes = plots.axes_of(points)
    title = f"{readable(metric, unit)} by {readable(axes.x).lower()}"
    found = [(title, _drawn(plots.chart(points, axes, metric, unit), title))]
    rows = [name for name in axes.by if len(values[name]) > 1]
    if rows:
        y = max(rows, key=lambda name: len(values[name]))
        others = [name for name in rows if name != y]
        groups: dict[str, list[plots.Point]] = {}
        for point in points:
            groups.setdefault(case_text({name: point.place.get(name) for name in others}), []).append(point)
        for place, group in list(groups.items())[:MAX_MAPS]:
            title = f"{readable(metric, unit)}, {readable(y).lower()} × {readable(axes.x).lower()}"
            title += f": {place}" if place else ""
            found.append((title, _drawn(plots.heat_map(group, axes.x, y, metric, unit, points), title)))
    return found


def _panels(services: Services, job: Mapping[str, Any]) -> list[tuple[str, str, Markup]]:
    """Return the plots of the job's kind: title, how to read it, picture."""
    found = []
    for panel in panels_of(JobResults(job, services.database, services.reading, services.files)):
        if panel.draw is None or panel.folded:
            continue
        try:
            picture = _drawn(panel.draw(), panel.title)
        except (KeyError, TypeError, ValueError) as error:
            # A job of another version or of a plug-in may have a table of this name with other columns.
            picture = Markup("<p>What the job reported is not what this version draws: {}.</p>").format(repr(error))
        found.append((panel.title, panel.text, picture))
    return found


def _samples(services: Services, jobs: Sequence[int], metric: str) -> list[tuple[str, Markup]]:
    # A single number is in the table.
    samples = [one for one in samples_of(services.database, jobs, metric, []) if len(one.values) > 1]
    if not samples:
        return []
    title = f"{readable(metric, samples[0].unit)} over the steps"
    groups = [plots.Samples(one.side or "", one.case, one.values) for one in samples]
    return [(title, _drawn(plots.over_steps(groups, metric, samples[0].unit), title))]


def _of_comparison(sheet: results.Sheet, about: Mapping[str, Any]) -> list[tuple[str, Markup]]:
    """Return plots of a comparison: ratios with their intervals, and the processes of both sides."""
    names = sheet.names()
    if "finding" not in names:
        return []
    coordinates = sheet.names("coordinate")
    rows = [dict(zip(names, row, strict=True)) for row in sheet.rows]
    cases = [case_text({name: row[name] for name in coordinates if row[name] is not None}) for row in rows]
    several = len(set(cases)) > 1
    ratios = [
        plots.Ratio(
            ", ".join(filter(None, (row["metric"], case if several else ""))),
            row["ratio"],
            row["ratio_low"],
            row["ratio_high"],
            row["finding"],
        )
        for row, case in zip(rows, cases, strict=True)
        if row["ratio"] is not None
    ]
    found = []
    if ratios:
        title = "Candidate / baseline"
        found.append((title, _drawn(plots.ratios(ratios[:MAX_CASES]), title)))
    metric = about.get("headline")
    told = [one for one in about.get("distributions", ()) if rows[one["row"]]["metric"] == metric][:MAX_CASES]
    groups = [
        plots.Samples(side, cases[one["row"]] or "the case", (), processes=one[side])
        for side in ("baseline", "candidate")
        for one in told
    ]
    if groups and metric is not None:
        unit = rows[told[0]["row"]]["unit"]
        title = f"{readable(metric, unit)} of each process"
        found.append((title, _drawn(plots.distributions(groups, metric, unit, of="processes"), title)))
    return found


def _drawn(figure: plots.Figure, title: str) -> Markup:
    return Markup(svg.drawn(figure, title))  # noqa: S704  # its texts are escaped


def _facts(environments: Iterable[Mapping[str, Any] | None]) -> list[tuple[str, list[str]]]:
    """Return the facts of environments by name, each with its values: several where the jobs differ."""
    found: dict[str, list[str]] = {}
    for environment in environments:
        for name, value in flat(environment or {}).items():
            text = json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else plain(value)
            values = found.setdefault(name, [])
            if text not in values:
                values.append(text)
    return list(found.items())


def plain(value: Any) -> str:
    """Write a value of an environment."""
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)
