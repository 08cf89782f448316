"""/ui/compare: compares jobs. The first is the baseline, and each of the others is a candidate."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BeforeValidator, Field

from app import results
from app.api.compare import ComparedQuery
from app.api.parameters import Id, StrictQuery, Text
from app.api.services import CurrentServices, Services
from app.errors import Conflict, InvalidRequest
from app.metrics import better
from app.results.findings import Row
from app.specs import KINDS
from app.web.parameters import NONE_IF_EMPTY
from app.web.plots.ratios import Processes, Ratio, draw_distributions, draw_ratios
from app.web.stacks import draw_changed_flames
from app.web.templates import Entry, embedded, render, table
from flopwatch.table_options import FORMATS
from flopwatch.text.cases import case_text

router = APIRouter()
NAVIGATION = Entry("Compare", "/ui/compare", order=50)

MAX_JOBS = 9
"""Largest number of jobs on one page: a baseline and its candidates."""
SHOWN_ROWS = 200
"""Rows of a comparison that the page shows; a link leads to all of them."""
SHOWN_OF_PROFILES = 20
"""Number of rows shown of each table and phase of a profile: those that changed most."""
DRAWN_CASES = 24
"""Largest number of cases whose distributions are drawn, and of rows whose ratios are."""


def _parts(values: Any) -> Any:
    return [part for value in values for part in re.split(r"[\s,]+", value) if part]


class CompareQuery(StrictQuery):
    """The jobs, and the metric whose distributions are drawn."""

    job: Annotated[list[Id], BeforeValidator(_parts)] = Field(default=[], max_length=MAX_JOBS)
    """Ids, each parameter with one or several, separated by spaces or commas."""
    baseline_name: Annotated[Text | None, NONE_IF_EMPTY] = None
    """A baseline's name: all jobs are compared with its results."""
    metric: Annotated[Text | None, NONE_IF_EMPTY] = None
    back: Annotated[str, Field(max_length=2000)] = ""
    """The query of the list in which the jobs were picked. If it is given, the oldest job is the baseline: the list has
    the newest first."""

    def ids(self) -> list[int]:
        """Return the jobs, the baseline first."""
        picked_in_a_list = "back" in self.model_fields_set
        picked = sorted(self.job) if picked_in_a_list else self.job
        return list(dict.fromkeys(picked))


@router.get("/compare")
def compare(request: Request, services: CurrentServices, query: Annotated[CompareQuery, Query()]) -> Response:
    ids = query.ids()
    jobs = [_job(services, job_id) for job_id in ids]
    comparisons = _comparisons(services, jobs, query.baseline_name) if jobs else []
    metrics = list(dict.fromkeys(name for comparison in comparisons for name in comparison["metrics"]))
    metric = (
        query.metric
        if query.metric in metrics
        else next((comparison["headline"] for comparison in comparisons if comparison["headline"]), None)
    )
    return render(
        request,
        "compare.html",
        plots=True,
        jobs=jobs,
        ids=ids,
        list_of_jobs="/ui" + (f"?{query.back}" if query.back else ""),
        baseline_name=query.baseline_name,
        alone=len(jobs) == 1 and not (jobs[0]["holds_both"] or query.baseline_name),
        comparisons=comparisons,
        metrics=metrics,
        metric=metric,
        distributions=distributions(comparisons, metric) if metric else None,
        ratios=ratios(comparisons),
        max_jobs=MAX_JOBS,
    )


def _job(services: Services, job_id: int) -> dict[str, Any]:
    job, _version = services.reading.job(job_id)
    holds_both = job["kind"] in KINDS and KINDS[job["kind"]].has_sides
    return {**job, "case": case_text(job.get("summary") or {}), "holds_both": holds_both}


def _comparisons(services: Services, jobs: Sequence[Mapping[str, Any]], baseline: str | None) -> list[dict[str, Any]]:
    """Return the comparison of each candidate with the first job, or with a named baseline; of a single job of kind
    `compare`, that of its sides."""
    if baseline is not None:
        return [_compared(services, {"baseline_name": baseline}, f"baseline {baseline}", job) for job in jobs]
    first, *others = jobs
    if first["holds_both"] and not others:
        return [_compared(services, {"job": first["id"]}, "baseline", None)]
    against = f"job {first['id']} (baseline)"
    return [_compared(services, {"baseline": [first["id"]]}, against, other) for other in others]


def _compared(
    services: Services, query: dict[str, Any], against: str, candidate: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return one comparison, or the problem if these two cannot be compared. `query`: the baseline, or the job that has
    both sides, as `GET /compare` takes it."""
    if candidate is not None:
        query = {**query, "candidate": [candidate["id"]]}
    sides = (against, "candidate" if candidate is None else f"job {candidate['id']}")
    page: dict[str, Any] = {
        "candidate": candidate,
        "exports": [(name, f"/compare?{urlencode({**query, 'format': name}, doseq=True)}") for name in FORMATS],
        "problem": None,
    }
    try:
        comparison = ComparedQuery(**query).comparison(services.database)
    except (InvalidRequest, Conflict) as problem:
        return {**page, **NOT_COMPARED, "sides": sides, "problem": str(problem)}
    return {**page, **shown(comparison, sides)}


NOT_COMPARED: dict[str, Any] = {"flames": None, "comparison": None, "headline": None, "metrics": [], "rows": []}


def shown(comparison: results.Comparison, sides: tuple[str, str]) -> dict[str, Any]:
    """Return what pages show of a comparison. `sides`: the names of baseline and candidate in the plots' legends.

    A comparison of profiles or snapshots has a `table`, and every other one has `rows`.
    """
    is_judged = comparison.tables is None
    sheet = results.sheet_of(comparison, SHOWN_OF_PROFILES)
    names = short_names(list(dict.fromkeys(case_text(row.place) for row in comparison.rows)))
    rows = [{**row.values(), "case": names[case_text(row.place)]} for row in comparison.rows] if is_judged else []
    rows.sort(key=lambda row: row["metric"] != comparison.judgement.headline)  # it stands first, of all cases
    shared = [word for word in next(iter(names), "").split(", ") if all(word in case.split(", ") for case in names)]
    return {
        "sides": sides,
        "comparison": comparison,
        "judgement": comparison.judgement,
        "how": comparison.how,
        "notes": [note for note in sheet.notes if note != comparison.how],
        "headline": comparison.judgement.headline if is_judged else None,
        "metrics": list(dict.fromkeys(row.judged.metric for row in comparison.distributions())) if is_judged else [],
        "rows": rows[:SHOWN_ROWS],
        "number": len(rows),
        "shared": ", ".join(shared),
        "table": "" if is_judged else table(replace(sheet, lead=(), notes=())),
        "flames": changed_flames(comparison),
        "common": not is_judged or any(row["baseline_outcome"] and row["candidate_outcome"] for row in rows),
    }


def changed_flames(comparison: results.Comparison) -> dict[str, Any] | None:
    """Return the flame graph of what two profiles spent, or of what two jobs held at their peaks; None of others."""
    if comparison.tables is None or not (found := list(comparison.tables.flames())):
        return None
    return {"what": comparison.tables.what, **embedded(draw_changed_flames(found, comparison.tables.unit))}


def distributions(comparisons: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Any] | None:
    """Return a figure of the medians of each side's processes, case by case; None if no side has several."""
    medians: dict[tuple[str, str], Processes] = {}
    unit, how = None, set()
    for shown in comparisons:
        comparison: results.Comparison | None = shown["comparison"]
        if comparison is None or comparison.tables is not None:  # it cannot be compared: the page says why
            continue
        for row in comparison.distributions():
            if row.judged.metric != metric:
                continue
            unit = row.judged.unit
            how.add(_by(row.judged))
            case = case_text(row.place) or "the case"
            for name, processes in zip(shown["sides"], (row.judged.baseline, row.judged.candidate), strict=True):
                medians.setdefault((name, case), Processes(name, case, processes))
    every = list(dict.fromkeys(case for _, case in medians))
    cases = every[:DRAWN_CASES]
    note = f"Drawn: {len(cases)} of {len(every)} cases" if len(cases) < len(every) else ""
    chosen = [group for (_, case), group in medians.items() if case in cases]
    if all(len(group.values) < 2 for group in chosen):
        return None
    names = short_names(cases)  # long ones along x would leave no room above
    groups = [replace(group, case=names[group.case]) for group in chosen]
    by = how.pop() if len(how) == 1 else "its value"  # cases may have different numbers of samples
    return {"by": by, **embedded({**draw_distributions(groups, metric, unit), "note": note})}


def _by(row: Row) -> str:
    """Say what a process counts as: "its fastest of 200 samples"."""
    return (
        "its value" if row.statistic is None or row.samples is None else f"its {row.statistic} of {row.samples} samples"
    )


def short_names(cases: Sequence[str]) -> Mapping[str, str]:
    """Return for each case's name the parts that the others lack."""
    parts = {case: case.split(", ") for case in cases}
    shared = set.intersection(*map(set, parts.values())) if len(parts) > 1 else set()
    names = {case: ", ".join(part for part in words if part not in shared) or case for case, words in parts.items()}
    # A word that all have may stand for one coordinate here, and another there.
    return names if len(set(names.values())) == len(names) else {case: case for case in cases}


def ratios(comparisons: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return a figure of every ratio with its confidence interval."""
    drawn = []
    names = short_names(
        [row["case"] for comparison in comparisons for row in comparison["rows"] if row.get("ratio") is not None]
    )
    for comparison in comparisons:
        several = len({row["case"] for row in comparison["rows"]}) > 1
        for row in comparison["rows"]:
            if row.get("ratio") is None:
                continue
            words = [
                row["metric"],
                names[row["case"]] if several else "",
                comparison["sides"][1] if len(comparisons) > 1 else "",
            ]
            label = ", ".join(word for word in words if word)
            direction = better(row["metric"], row.get("unit"))
            ends = (row["ratio_low"], row["ratio_high"])
            drawn.append(Ratio(label, row["ratio"], *ends, row["finding"], direction))
    note = f"Drawn: the first {DRAWN_CASES} ratios" if len(drawn) > DRAWN_CASES else ""
    return embedded({**draw_ratios(drawn[:DRAWN_CASES]), "note": note}) if drawn else None
