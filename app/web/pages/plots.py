"""/ui/plots: the panel of plots of a sweep or of jobs, which their pages embed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from app import results
from app.api.parameters import Id, StrictQuery, Text
from app.api.services import CurrentServices, Services
from app.errors import InvalidRequest, nearest
from app.metrics import gain_name, headline, readable
from app.specs import KINDS, Scalar
from app.store.reading import members
from app.web.live import page_tag, tagged, unchanged
from app.web.parameters import NONE_IF_EMPTY
from app.web.plots.chart import draw_chart
from app.web.plots.heat_map import draw_heat_map
from app.web.plots.points import Axes, Point, axes_of, points_of, values_along, varying
from app.web.plots.ratios import REFERENCE
from app.web.templates import embedded
from flopwatch.text.cases import case_text, in_use
from flopwatch.text.values import value_text

router = APIRouter()

NO_REFERENCE = "no reference"
MAX_MAPS = 4
"""Largest number of heat maps: there is one for each combination of the coordinates that they do not show."""
MAX_VALUES = 100
"""Largest number of values of a coordinate that a filter offers."""
MAX_FILTERS = 20
"""Largest number of coordinates that have a filter."""


KEPT = ("group", "relative_to")
"""Parameters that the panel's form has no field for, and keeps."""


def _check_pair(value: str) -> str:
    name, equals, _ = value.partition("=")
    if value and not (name.strip() and equals):
        raise PydanticCustomError("coordinate", "must be written coordinate=value")
    return value


class PlotsQuery(StrictQuery):
    """The jobs whose cases are drawn, and the axes."""

    sweep: Id | None = None
    job: list[Id] = Field(default=[], max_length=100)
    metric: Annotated[Text | None, NONE_IF_EMPTY] = None
    of: Annotated[Text | None, NONE_IF_EMPTY] = None
    """The metric for which `x`, `y` and `where` were chosen, if it is another one: coordinates that do not vary in the
    cases of `metric` are ignored."""
    x: Annotated[Text | None, NONE_IF_EMPTY] = None
    y: Annotated[Text | None, NONE_IF_EMPTY] = None
    """The coordinate of the heat map's rows."""
    group: list[Text] = Field(default=[], max_length=MAX_FILTERS)
    """The coordinates whose values make the series; by default all that vary, except `x`."""
    where: list[Annotated[Text, AfterValidator(_check_pair)]] = Field(default=[], max_length=MAX_FILTERS)
    """`coordinate=value`; only these cases. Repeated, it names alternatives of one coordinate; empty: all."""
    relative_to: list[Annotated[Text, AfterValidator(_check_pair)]] = Field(default=[], max_length=MAX_FILTERS)
    """`coordinate=value` of the reference cases: how many times better all others are is drawn, and not the metric."""


@router.get("/plots")
def panel(request: Request, services: CurrentServices, query: Annotated[PlotsQuery, Query()]) -> Response:
    """Return the panel by itself, without a page around it."""
    if query.sweep is None and not query.job:
        raise InvalidRequest.at("/sweep", "Name a sweep, or jobs: /ui/plots?sweep=3 or /ui/plots?job=17.")
    source: dict[str, Any] = {"sweep": query.sweep, "job": query.job}
    chosen = urlencode({name: value for name, value in source.items() if value}, doseq=True)
    tag = page_tag(versions(services, query), query.model_dump_json())
    if tag.is_known_to(request):
        return unchanged(tag)
    return tagged(
        tag,
        request,
        "plots.html",
        source=[(name, value) for name, values in source.items() for value in as_list(values)],
        address=f"/ui/plots?{chosen}",
        table=f"/ui/tables?{chosen}",
        kept=[(name, value) for name in KEPT for value in getattr(query, name)],
        view=drawn(services, query),
    )


def drawn(services: Services, query: PlotsQuery) -> dict[str, Any]:
    sweep = None if query.sweep is None else services.reading.sweep(query.sweep)
    units = members.metrics(services.database, query.sweep, query.job)
    if query.metric not in (None, *units):  # earlier jobs may have measured it
        units |= members.metrics(services.database, query.sweep, query.job, sample=None)
    metric = query.metric or first_metric(sweep, list(units))
    if metric is None:
        return {"chart": None, "maps": []}
    if metric not in units:
        detail = f"Nobody has measured {metric!r} there; measured: {', '.join(units) or 'nothing yet'}."
        raise InvalidRequest.at("/metric", detail)
    titles = {name: readable(name, unit) for name, unit in units.items()}
    name, unit = metric, units[metric]
    if query.relative_to:
        name, unit = gain_name(metric, unit), None
        points = related_points(services, query, metric, name)
    else:
        choice = results.JobChoice(sweep=query.sweep, jobs=query.job)
        points = points_of(results.metric_table(services.database, choice, [metric]), metric)
    title = readable(name, unit)
    if query.relative_to:
        title = f"{title} over {' and '.join(query.relative_to)}"
    shown = figures(points, name, unit, query, title)
    return {"metrics": titles, "metric": metric, "title": title, **shown}


def related_points(services: Services, query: PlotsQuery, metric: str, name: str) -> list[Point]:
    """Return the points of the column `name`, which relates the metric to the reference of the query.

    A point without a value has the outcome of its own measurement, or NO_REFERENCE if the reference has no value.
    """
    reference = dict(pair(text) for text in query.relative_to)
    choice = results.JobChoice(sweep=query.sweep, jobs=query.job)
    sheet = results.table(services.database, choice, results.Layout(columns=[metric], relative_to=reference))
    return [
        replace(point, outcome=own.outcome if own.value is None else NO_REFERENCE)
        if point.value is None and point.outcome is None
        else point
        for own, point in zip(points_of(sheet, metric), points_of(sheet, name), strict=True)
    ]


def pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name.strip(), value.strip()


def where(points: Sequence[Point], wanted: Sequence[str]) -> Sequence[Point]:
    """Return the points at these values of coordinates; none where no case has them together, as the panel's form may
    ask for. Raises InvalidRequest for a value that one coordinate never has."""
    alternatives: dict[str, set[str]] = {}
    known = list(points[0].place) if points else []
    for name, value in (spelled(points, text) for text in wanted):
        alternatives.setdefault(name, set()).add(value)
    chosen = points
    for name, texts in alternatives.items():
        values = [*map(address_text, values_along(points, name))]
        if points and texts.isdisjoint(values):
            there_is = f"there is {', '.join(known)}"
            if name in known:
                there_is = f"of {name} there is {', '.join(values[:20])}{', …' if len(values) > 20 else ''}"
            detail = f"No case has {' and '.join(wanted)}; {there_is}."
            raise InvalidRequest.at("/where", detail)
        chosen = [point for point in chosen if address_text(point.place.get(name)) in texts]
    return chosen


def spelled(points: Sequence[Point], text: str) -> tuple[str, str]:
    """Return the coordinate and the value of `coordinate=value` as the panel's form has them: whole numbers, and False,
    may be written as tables write them."""
    name, value = pair(text)
    name = results.coordinate_of(name, points[0].place if points else ())
    texts = {one: address_text(known) for known in values_along(points, name) for one in results.spellings(known)}
    if "none" in texts:  # what stands for False, too
        texts.setdefault("false", "none")
    return name, texts.get(value, value)


def first_metric(sweep: Mapping[str, Any] | None, measured: Sequence[str]) -> str | None:
    """Return the metric that is drawn before anybody chooses one: of a search for what fits, the memory."""
    kind = KINDS.get(str(sweep["base"].get("kind"))) if sweep is not None else None
    wanted = ["peak_memory_mib"] if sweep is not None and sweep["fit"] else []
    wanted += [kind.first_plotted] if kind is not None and kind.first_plotted is not None else []
    return next((name for name in wanted if name in measured), headline(measured))


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def versions(services: Services, query: PlotsQuery) -> str:
    """Return a text that changes whenever the results of the jobs change."""
    parts = [services.reading.job_page_version(job_id) for job_id in query.job]
    if query.sweep is not None:
        parts.append(services.reading.sweep_page_version(query.sweep))
    return " ".join(parts)


def figures(
    all_points: Sequence[Point], metric: str, unit: str | None, query: PlotsQuery, title: str
) -> dict[str, Any]:
    """Return the figures of a metric, and the choices that the panel offers. `title`: of the chart's axis."""
    values: Mapping[str, Sequence[Scalar]] = varying(all_points)
    if query.of not in (None, metric):
        query = without_others(query, values)
    x, y = (None if name is None else results.coordinate_of(name, values) for name in (query.x, query.y))
    query = query.model_copy(update={"x": x, "y": y})
    for field, name in (("x", query.x), ("y", query.y)):
        if name is not None and name not in values:
            detail = f"{name!r} does not vary here; what varies: {', '.join(values) or 'nothing'}."
            raise InvalidRequest.at(f"/{field}", detail)
    wanted = list(filter(None, query.where))
    points = where(all_points, wanted)
    several = varying(points) if wanted else values
    axes = axes_of(points, query.x if query.x in several else None, several)
    if query.group:
        axes = replace(axes, by=series(points, axes, query.group))
    downwards = [name for name in axes.by if name in several]
    y = query.y if query.y in axes.by else max(downwards, key=lambda name: len(several[name]), default=None)
    groups = {} if y is None else grouped(points, [name for name in axes.by if name != y])
    chart = draw_chart(points, axes, metric, unit)
    chart["layout"]["yaxis"]["title"] = {"text": title}
    if query.relative_to:
        chart["layout"]["shapes"] = [REFERENCE]
    return {
        "chart": embedded(chart) if points else None,
        "maps": [] if y is None else maps(points, groups, axes.x, y, metric, unit),
        "choices": list(values),
        "filters": filters(values, dict(spelled(all_points, text) for text in wanted)),
        "x": axes.x,
        "y": y,
        "left_out": max(0, len(groups) - MAX_MAPS),
    }


def series(points: Sequence[Point], axes: Axes, group: Sequence[str]) -> tuple[str, ...]:
    """Return the coordinates that make series, as asked for. Raises InvalidRequest for an unknown one, or if another
    one varies: a series would have several values at one place."""
    known = list(dict.fromkeys(name for point in points for name in point.place))
    group = [results.coordinate_of(name, known) for name in group]
    unknown = [name for name in group if name not in known]
    others = [name for name in axes.by if name not in group and name.partition(".")[0] not in group]
    if unknown or others:
        detail = (
            f"These cases have no coordinate {unknown[0]!r}{nearest(unknown[0], known)}"
            if unknown
            else f"{', '.join(others)} varies, too, and a series has one value at each place: name it in "
            f"`group`, too, or choose a value by `where` ({others[0]}=…)."
        )
        raise InvalidRequest.at("/group", detail)
    return tuple(name for name in group if name != axes.x)


def without_others(query: PlotsQuery, values: Mapping[str, Sequence[Scalar]]) -> PlotsQuery:
    """Return the query without coordinates and values other than these, since it was made for another metric."""
    x, y = (name if name in values else None for name in (query.x, query.y))
    where = [
        f"{name}={value}"
        for name, value in map(pair, filter(None, query.where))
        if value in map(address_text, values.get(name, ()))
    ]
    return query.model_copy(update={"x": x, "y": y, "where": where})


def filters(values: Mapping[str, Sequence[Scalar]], chosen: Mapping[str, str]) -> list[tuple[str, list[str], str]]:
    """Return the coordinates that can be filtered, with their values and the chosen one: those in use first."""
    offered = sorted(values, key=lambda name: name not in chosen)[:MAX_FILTERS]
    return [
        (name, [address_text(value) for value in choices[:MAX_VALUES]], chosen.get(name, ""))
        for name, choices in values.items()
        if name in offered
    ]


def maps(
    points: Sequence[Point], groups: Mapping[str, Sequence[Point]], x: str, y: str, metric: str, unit: str | None
) -> list[dict[str, Any]]:
    """Return a heat map for each of the first groups of points. `points`: those of all groups."""
    heat_maps = []
    for place, group in list(groups.items())[:MAX_MAPS]:
        heat_maps.append({"of": place, **embedded(draw_heat_map(group, x, y, metric, unit, points))})
    return heat_maps


def grouped(points: Sequence[Point], others: Sequence[str]) -> Mapping[str, Sequence[Point]]:
    """Return the points of each heat map, by the coordinates that no map shows."""
    if not others:
        return {"": points}
    groups: dict[str, list[Point]] = {}
    for point in points:
        place = case_text({name: value for name in others if (value := in_use(point.place.get(name))) is not None})
        groups.setdefault(place, []).append(point)
    return groups


def address_text(value: Scalar) -> str:
    """Write a coordinate's value as it stands in an address."""
    return value_text(in_use(value))
