"""/jobs/{id}/plots and its like: every plot of the pages by its name, as a figure that a client can draw, or as one
HTML file.

A figure is the page's own (Plotly's JSON), with a `title`, a `caption` that says where its numbers come from, and the
colours of the light theme in place of the page's variables. `flopwatch.drawing` makes SVG and PNG of it.
"""

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from anyio.to_thread import run_sync
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import Field

from app import results
from app.api.parameters import NO_QUERY, Coordinate, Id, JobId, Json, StrictQuery, SweepId, Text
from app.api.schemas import NamedPlot, Page, Picture
from app.api.services import CurrentServices, Services, slow
from app.api.tables import split
from app.errors import FieldError, InvalidRequest, NotFound
from app.metrics import in_a_sentence, readable
from app.specs import KINDS
from app.specs._base import flat, with_paths
from app.specs._code import COORDINATES
from app.states import FINISHED_STATES, VERDICTS
from app.store.reading import members
from app.web import facts, history_plot
from app.web.pages import compare as compare_page
from app.web.pages import plots as panel
from app.web.pages.panels import results_of
from app.web.panels import JobResults, panels_of
from app.web.plots.drawing import Figure
from app.web.plots.points import Point, varying
from app.web.samples import over_steps
from app.web.standalone import whole_file
from app.web.templates import STATIC, embedded
from flopwatch.text.cases import case_text
from flopwatch.text.validity import verdict, why
from flopwatch.text.values import value_text

router = APIRouter(tags=["results"])

CHART, HEAT_MAP, SAMPLES, HISTORY = "chart", "heat-map", "samples", "history"
RATIOS, DISTRIBUTIONS = "ratios", "distributions"
TAKEN_BY: Mapping[str, Sequence[str]] = {
    "metric": (CHART, HEAT_MAP, HISTORY, DISTRIBUTIONS),
    "x": (CHART, HEAT_MAP),
    "y": (HEAT_MAP,),
    "group": (CHART,),
    "where": (CHART, HEAT_MAP, SAMPLES, HISTORY),
    "relative_to": (CHART, HEAT_MAP),
}
"""The plots that each parameter is for."""
BARS = "Error bars: the 95 % interval (of a median of fewer than six values: from the smallest to the largest)."
MOST_POINTS = 500
"""Largest number of points of a history, and of jobs of a sweep that a caption speaks of."""
MOST_JOBS = 9
"""Largest number of jobs that a caption lists."""


class PictureQuery(StrictQuery):
    """The choices that a page offers for a plot, and the form of the answer."""

    metric: Text | None = None
    """Of `chart`, `heat-map`, `distributions` and `history`: what is drawn; by default the kind's main metric."""
    x: Text | None = None
    """Of `chart` and `heat-map`: the coordinate along x."""
    y: Text | None = None
    """Of `heat-map`: the coordinate of the rows."""
    group: list[Text] = Field(default=[], max_length=panel.MAX_FILTERS)
    """Of `chart`: coordinates whose values make the series, repeated or separated by commas; by default all that
    vary."""
    where: list[Coordinate] = Field(default=[], max_length=panel.MAX_FILTERS)
    """Of `chart` and `heat-map`: `coordinate=value`, only these cases; repeat it for alternatives. Of `samples` and
    `history`, which are of one case: this case."""
    relative_to: list[Coordinate] = Field(default=[], max_length=panel.MAX_FILTERS)
    """Of `chart` and `heat-map`: `coordinate=value` of the reference cases; how many times better all others are is
    drawn."""
    format: Literal["json", "html"] = "json"
    """The figure in Plotly's terms, or one HTML file that draws it without a server."""

    def check(self, name: str) -> None:
        """Raise InvalidRequest for a parameter that the plot of this name does not take."""
        kind = re.sub(r"-\d+$", "", name)
        for parameter, plots in TAKEN_BY.items():
            if getattr(self, parameter) and kind not in plots:
                detail = f"is for {', '.join(plots)}: leave it out for {name}"
                raise InvalidRequest(
                    f"Query parameter {parameter!r} {detail}.", errors=(FieldError(f"/{parameter}", detail),)
                )

    def of(self, **chosen: Any) -> panel.PlotsQuery:
        """Return the query of the panel of plots."""
        relative, where = (["=".join(one) for one in pairs] for pairs in (self.relative_to, self.where))
        axes = {"metric": self.metric, "x": self.x, "y": self.y, "group": split(self.group) or []}
        return panel.PlotsQuery(**chosen, **axes, where=where, relative_to=relative)


@dataclass(frozen=True)
class Plot:
    """One plot of a page: its name and title, how to read it, and what draws it."""

    name: str
    title: str
    draw: Callable[[], Figure]
    text: str = ""
    log: str = ""
    """Axes that the HTML file lets readers make logarithmic."""


NOT_FOUND = "{whose} has no plot {name!r}; it has: {names}."
HTML: dict[str, Any] = {"text/html": {"schema": {"type": "string"}}}
A_PICTURE: dict[int | str, dict[str, Any]] = {200: {"model": Picture, "content": HTML}}


@router.get(
    "/jobs/{job_id}/plots",
    operation_id="list_job_plots",
    responses={200: {"model": Page[NamedPlot]}},
    dependencies=[NO_QUERY],
    summary="A job's plots",
)
@slow
def list_of_job(services: CurrentServices, job_id: JobId) -> Response:
    """Lists every plot that the pages have of a job, by name and title."""
    return _listed(plots_of_job(services, results_of(services, job_id), PictureQuery()), f"/jobs/{job_id}/plots")


@router.get("/jobs/{job_id}/plots/{name}", operation_id="get_job_plot", responses=A_PICTURE, summary="A plot of a job")
async def of_job(
    request: Request, services: CurrentServices, job_id: JobId, name: str, query: Annotated[PictureQuery, Query()]
) -> Response:
    """Returns one of its plots: traces and layout as Plotly takes them, with title and caption."""

    def make() -> Response:
        own = results_of(services, job_id)
        plots, whose = plots_of_job(services, own, query), f"Job {job_id}"
        caption = _caption([f"{whose} ({own.job['kind']})", case_text(own.job["summary"] or {})], [own.job])
        return _answer(request, query, _named(plots, name, whose), caption, f"job-{job_id}")

    query.check(name)
    return await run_sync(make, limiter=services.tables)


@router.get(
    "/sweeps/{sweep_id}/plots",
    operation_id="list_sweep_plots",
    responses={200: {"model": Page[NamedPlot]}},
    dependencies=[NO_QUERY],
    summary="A sweep's plots",
)
@slow
def list_of_sweep(services: CurrentServices, sweep_id: SweepId) -> Response:
    """Lists the plots of a sweep."""
    services.reading.sweep(sweep_id)
    return _listed(drawn_panel(services, PictureQuery().of(sweep=sweep_id)), f"/sweeps/{sweep_id}/plots")


@router.get(
    "/sweeps/{sweep_id}/plots/{name}", operation_id="get_sweep_plot", responses=A_PICTURE, summary="A plot of a sweep"
)
async def of_sweep(
    request: Request, services: CurrentServices, sweep_id: SweepId, name: str, query: Annotated[PictureQuery, Query()]
) -> Response:
    """Returns one of its plots, as of a job: `chart` has a metric along a coordinate, `heat-map` over two."""

    def make() -> Response:
        sweep, whose = services.reading.sweep(sweep_id), f"Sweep {sweep_id}"
        plot = _named(drawn_panel(services, query.of(sweep=sweep_id)), name, whose)
        jobs, number = members.page(services.database, sweep, members.MemberQuery(), limit=MOST_POINTS)
        one_valued = {path: values[0] for path, values in sweep["grid"].items() if len(values) == 1}
        swept = {*sweep["grid"], *([sweep["fit"]["axis"]] if sweep["fit"] else [])} - one_valued.keys()
        told, varied = facts.differences(with_paths(sweep["base"], one_valued)), tuple(f"{path}." for path in swept)
        fixed = [one for one in told if not f"{one.field}.".startswith(varied)]
        base = ", ".join(_fields(fixed))
        words = [f"{whose} ({sweep['base'].get('kind')}), {_jobs([job['id'] for job in jobs], number)}", base]
        return _answer(request, query, plot, _caption(words, jobs), f"sweep-{sweep_id}")

    query.check(name)
    return await run_sync(make, limiter=services.tables)


class ComparedPictureQuery(PictureQuery):
    """The jobs of a comparison, beside the choices."""

    baseline: Id
    """The job to compare with."""
    candidate: Id
    """The job that is compared."""


@router.get(
    "/compare/plots/{name}", operation_id="get_comparison_plot", responses=A_PICTURE, summary="A plot of a comparison"
)
async def of_comparison(
    request: Request, services: CurrentServices, name: str, query: Annotated[ComparedPictureQuery, Query()]
) -> Response:
    """Returns `ratios` or `distributions` of two jobs; a job of kind `compare` has them among its own plots."""

    def make() -> Response:
        sides = (f"job {query.baseline} (baseline)", f"job {query.candidate}")
        comparison = results.compare(services.database, [query.baseline], [query.candidate])
        plot = _named(compared(services, comparison, sides, query.metric), name, "The comparison")
        jobs = [services.reading.job(job_id)[0] for job_id in (query.baseline, query.candidate)]
        words = [f"{sides[1]} against {sides[0]}", comparison.judgement.sentence]
        return _answer(request, query, plot, _caption(words, jobs), f"compare-{query.baseline}-{query.candidate}")

    query.check(name)
    return await run_sync(make, limiter=services.tables)


def plots_of_job(services: Services, own: JobResults, query: PictureQuery) -> list[Plot]:
    """Return every plot that pages have of a job, in the order of its page."""
    job_id, job = own.id, own.job
    shown = [drawn for one in panels_of(own) for drawn in (one, *one.more) if drawn.draw is not None]
    plots = [Plot(one.name, one.title, one.figure, one.text, one.log) for one in shown]
    if job["state"] not in FINISHED_STATES:
        return plots
    if job["kind"] in KINDS and KINDS[job["kind"]].has_sides:
        sides = results.compare_sides(services.database, job_id)
        plots += compared(services, sides, ("baseline", "candidate"), query.metric)
    cases = results.cases_of_job(services.database, job_id)
    if len(cases) > 1:
        plots += drawn_panel(services, query.of(job=[job_id]))
    chosen = _cases(cases, query)
    if services.reading.samples(job_id)[0]:
        title, several = "Times of the measured steps in order", len(cases) > 1
        plots.append(Plot(SAMPLES, title, partial(_samples, services, job_id, chosen, several=several)))
    if cases:
        plots.append(Plot(HISTORY, "The case in each job that measured it", partial(_history, services, chosen, query)))
    return plots


def _cases(cases: Mapping[str, Mapping[str, Any]], query: PictureQuery) -> Mapping[str, Mapping[str, Any]]:
    points = [Point(coordinates, None, url=key) for key, coordinates in cases.items()]
    wanted = ["=".join(pair) for pair in query.where]
    return {str(point.url): point.place for point in panel.where(points, wanted)}


def _samples(services: Services, job_id: int, cases: Mapping[str, Any], *, several: bool) -> Figure:
    for key in cases:
        rows, processes = services.reading.samples(job_id, key)
        if rows:
            break
    figure = over_steps(rows, processes)
    case = f"The case: {case_text(cases[key])}" if several else ""
    return {**figure, "note": "; ".join(filter(None, [figure["note"], case]))}


def _history(services: Services, cases: Mapping[str, Any], query: PictureQuery) -> Figure:
    if len(cases) > 1:
        names = varying([Point(coordinates, None) for coordinates in cases.values()])
        detail = f"A history is of one case: choose one of {len(cases)} by where, in {', '.join(names)}."
        raise InvalidRequest.at("/where", detail)
    choice = results.CaseChoice(key=next(iter(cases)))
    whole = results.history(services.database, choice, query.metric, None, MOST_POINTS)
    return history_plot.figure(whole)


def drawn_panel(services: Services, query: panel.PlotsQuery) -> list[Plot]:
    """Return the chart and the heat maps of a metric, if there is something to draw."""
    view = panel.drawn(services, query)
    if view["chart"] is None:
        return []
    x = in_a_sentence(view["x"])
    plots = [Plot(CHART, f"{view['title']} along {x}", partial(json.loads, view["chart"]["json"]), log="x y")]
    for number, one in enumerate(view["maps"], start=1):
        title = f"{view['title']} over {x} and {in_a_sentence(view['y'])}" + (f": {one['of']}" if one["of"] else "")
        name = HEAT_MAP if number == 1 else f"{HEAT_MAP}-{number}"
        plots.append(Plot(name, title, partial(json.loads, one["json"])))
    return plots


def compared(
    services: Services, comparison: results.Comparison, sides: tuple[str, str], metric: str | None
) -> list[Plot]:
    shown = compare_page.shown(comparison, sides)
    chosen = metric or shown["headline"]
    figures = {RATIOS: compare_page.ratios([shown])}
    figures[DISTRIBUTIONS] = compare_page.distributions([shown], chosen) if chosen else None
    titles = {
        RATIOS: "Candidate / baseline, with its 95 % interval",
        DISTRIBUTIONS: f"{readable(chosen or '')}: both sides",
    }
    return [
        Plot(name, titles[name], partial(json.loads, figure["json"]))
        for name, figure in figures.items()
        if figure is not None
    ]


def _named(plots: Sequence[Plot], name: str, whose: str) -> Plot:
    """Return the plot of this name, or the first of several that have it with a number: `timeline` is `timeline-1`."""
    numbered = re.compile(rf"{re.escape(name)}-\d+")
    found = [plot for plot in plots if plot.name == name] or [plot for plot in plots if numbered.fullmatch(plot.name)]
    plot = next(iter(found), None)
    if plot is None:
        names = ", ".join(plot.name for plot in plots) or "none"
        hint = f" {HEAT_MAP} needs two coordinates that vary." if "heat" in name and HEAT_MAP not in names else ""
        if name == DISTRIBUTIONS:
            hint = f" {DISTRIBUTIONS} needs a metric that both sides have, one of several processes."
        raise NotFound(NOT_FOUND.format(whose=whose, name=name, names=names) + hint)
    return plot


def _listed(plots: Sequence[Plot], path: str) -> Response:
    data = [{"name": plot.name, "title": plot.title, "url": f"{path}/{plot.name}"} for plot in plots]
    return Json({"data": data, "next": None})


def _answer(request: Request, query: PictureQuery, plot: Plot, caption: str, of: str) -> Response:
    figure = plot.draw()
    only: dict[str, list[str]] = {}
    for pair in query.where:
        only.setdefault(pair[0], []).append(pair[1])
    if only:
        caption = f"{caption} Only {', '.join(f'{field}=' + '/'.join(values) for field, values in only.items())}."
    if plot.name == CHART and any("error_y" in trace for trace in figure["data"]):
        caption = f"{caption} {BARS}"
    if query.format == "json":
        note = figure.get("note") or ""
        return Json(
            light({**figure, "title": plot.title, "caption": " ".join(filter(None, [caption, note and f"{note}."]))})
        )
    name = f"flopwatch-{of}-{plot.name}.html"
    shown = {"title": plot.title, "text": plot.text, "caption": caption, "figure": embedded(figure), "log": plot.log}
    return whole_file(request, name, **shown)


def _caption(words: Sequence[str], jobs: Sequence[Mapping[str, Any]]) -> str:
    devices = [flat(job["environment"]).get("device.name") for job in jobs if job["environment"]]
    verdicts = {name: sum((job["validity"] or {}).get("verdict") == name for job in jobs) for name in VERDICTS[1:]}
    doubts = [f"{count} of {len(jobs)} jobs {name}" for name, count in verdicts.items() if count]
    if len(jobs) == 1 and doubts:
        validity = jobs[0]["validity"]
        doubts = [": ".join(filter(None, [verdict(validity), why(validity)]))]
    counts = Counter(job["state"] for job in jobs if job["state"] != "succeeded")
    states = [f"{count} of {len(jobs)} jobs {state}" if len(jobs) > 1 else state for state, count in counts.items()]
    named = dict.fromkeys(str(device) for device in devices if device)
    return "; ".join(filter(None, [*words, *named, *doubts, *states])) + "."


def _fields(differences: Sequence[facts.Difference]) -> list[str]:
    """Write the fields of a spec that are not as by default; of uploaded code its name, and its version in short."""
    values = {one.field: one.value for one in differences}
    heads = [name.removesuffix(".sha256") for name in values if name.endswith(".sha256")]
    words: dict[str, None] = {}
    for name, value in values.items():
        head = next((head for head in heads if name.startswith(f"{head}.")), None)
        if head is None:
            words[f"{name}={value_text(value)}"] = None
        else:
            label = "@".join(filter(None, (values.get(f"{head}.{part}") for part in COORDINATES)))
            words[f"{head}={label} ({values[f'{head}.sha256'][:8]})"] = None
    return list(words)


def _jobs(ids: Sequence[int], number: int) -> str:
    if len(ids) < number:
        return f"{number} jobs (what follows is of the first {len(ids)})"
    if len(ids) > MOST_JOBS:
        return f"{len(ids)} jobs, {ids[0]} to {ids[-1]}"
    return f"job{'s' if len(ids) != 1 else ''} {', '.join(map(str, ids)) or 'none'}"


@functools.cache
def _light_colours() -> Mapping[str, str]:
    text = (STATIC / "colours.css").read_text(encoding="utf-8")
    return dict(re.findall(r"(--[\w-]+):\s*light-dark\((#\w+),", text))


def light(figure: Mapping[str, Any]) -> Any:
    """Return a figure with the light theme's colours in place of variables: a client has no style sheet."""
    colours = _light_colours()
    colourway = [f"var(--plot-{number})" for number in range(1, 9)]
    text = json.dumps({**figure, "layout": {"colorway": colourway, **figure["layout"]}}, allow_nan=False)
    return json.loads(re.sub(r'"var\((--[\w-]+)\)"', lambda found: f'"{colours[found[1]]}"', text))
