"""/ui: the list of jobs; on the first visit, the first steps."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from app.api.access import Sender, access_of, check_own_jobs
from app.api.bodies import read_limited
from app.api.parameters import NO_QUERY, Cursor, Id, Label, Moment, StrictQuery, Text, parse_id
from app.api.services import CurrentServices, Services
from app.api.sweeps import SweepBody, submit_sweep
from app.errors import InvalidRequest
from app.metrics import headline
from app.presets import DEMO_SWEEPS
from app.specs import KINDS
from app.states import JOB_STATES, JobState
from app.store.queue.registration import ALIVE
from app.web.live import by_content, refreshed
from app.web.parameters import NONE_IF_EMPTY
from app.web.templates import Entry, render
from flopwatch.text.cases import case_text
from flopwatch.text.numbers import number

router = APIRouter()
NAVIGATION = Entry("Jobs", "/ui", order=10)

JOBS_PER_PAGE = 50
MAX_PICKED = 500


class Filters(StrictQuery):
    """The query that the form above the list of jobs sends."""

    text: Annotated[Text | None, NONE_IF_EMPTY] = None
    state: Annotated[JobState | None, NONE_IF_EMPTY] = None
    kind: Annotated[Text | None, NONE_IF_EMPTY] = None
    label: Annotated[Label | None, NONE_IF_EMPTY] = None
    sweep: Annotated[Id | None, NONE_IF_EMPTY] = None
    submitted_by: Annotated[Text | None, NONE_IF_EMPTY] = None
    since: Annotated[Moment | None, NONE_IF_EMPTY] = None
    until: Annotated[Moment | None, NONE_IF_EMPTY] = None
    after: Annotated[Cursor | None, NONE_IF_EMPTY] = None


@dataclass(frozen=True)
class ListedJob:
    """A job as the list shows it."""

    job: Mapping[str, Any]
    case: str
    """Its case; within a sweep, the coordinates that distinguish it."""
    headline: tuple[str, str] | None
    """Name and value of its main metric."""
    is_compared: bool
    """True if it has measured two sides; the list then shows their comparison."""


@dataclass(frozen=True)
class Group:
    """Jobs that follow each other in the list: those of one sweep, or others."""

    sweep: int | None
    name: str | None
    axes: str
    """The fields in which the sweep's jobs differ."""
    jobs: Sequence[ListedJob]


@router.get("/")
@router.get("/jobs")
async def listed() -> Response:
    """Redirect from the addresses that other pages suggest."""
    return RedirectResponse("/ui", status_code=308)


@router.get("")
async def jobs(request: Request, services: CurrentServices, filters: Annotated[Filters, Query()]) -> Response:
    return await refreshed(request, lambda known: by_content(known, page(request, services, filters)))


def page(request: Request, services: Services, filters: Filters) -> Response:
    chosen = {name: value for name, value in request.query_params.items() if value}
    labels: Any = [] if filters.label is None else [filters.label]
    listed, following = services.reading.jobs(
        state=filters.state,
        kind=filters.kind,
        labels=labels,
        sweep=filters.sweep,
        limit=JOBS_PER_PAGE,
        after=filters.after,
        text=filters.text,
        since=filters.since,  # type: ignore[arg-type]  # a time, once validated
        until=filters.until,  # type: ignore[arg-type]
        submitted_by=filters.submitted_by,
    )
    metrics = {name for job in listed if job["kind"] in KINDS for name in KINDS[job["kind"]].table_columns}
    values = services.reading.first_values([job["id"] for job in listed if job["started_at"]], metrics)
    counts = services.reading.counts()
    is_first_visit = not any(counts.values())
    return render(
        request,
        "jobs.html",
        listed=listed,
        groups=grouped(listed, services.reading.sweep_heads({job["sweep_id"] for job in listed} - {None}), values),
        older=f"/ui?{urlencode({**chosen, 'after': following})}" if following is not None else None,
        newest="/ui?" + urlencode({name: value for name, value in chosen.items() if name != "after"}),
        chosen=chosen,
        query=urlencode(chosen),
        this="/ui" + (f"?{urlencode(chosen)}" if chosen else ""),
        states=JOB_STATES,
        kinds=sorted(KINDS),
        counts=counts,
        paused=services.pausing.kinds(),
        workers=_alive(services.reading.workers(gone=0)) if is_first_visit else None,
    )


def grouped(
    jobs: Sequence[Mapping[str, Any]],
    heads: Mapping[int, tuple[str | None, Sequence[str]]],
    values: Mapping[int, Sequence[Mapping[str, Any]]],
) -> list[Group]:
    """Group consecutive jobs of a sweep, and name each job by the coordinates that differ within the sweep."""
    groups = []
    for sweep, members in itertools.groupby(jobs, key=lambda job: job["sweep_id"]):
        name, own = heads.get(sweep, (None, ()))
        shown = [_listed(job, own, values.get(job["id"], ())) for job in members]
        groups.append(Group(sweep, name, " × ".join(own), shown))
    return groups


def _listed(job: Mapping[str, Any], axes: Sequence[str], values: Sequence[Mapping[str, Any]]) -> ListedJob:
    is_compared = job["state"] == "succeeded" and job["kind"] in KINDS and KINDS[job["kind"]].has_sides
    return ListedJob(job, _case(job, axes), headline_of(job["kind"], values), is_compared)


def _case(job: Mapping[str, Any], axes: Sequence[str]) -> str:
    if not axes:
        return case_text(job.get("summary") or {})
    return case_text({path.rpartition(".")[2]: _value_at(job["spec"], path) for path in axes})


def _value_at(spec: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, a list as one text; None if there is none."""
    value: Any = spec
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return "/".join(map(str, value)) if isinstance(value, list) else value


def headline_of(kind: str, values: Iterable[Mapping[str, Any]]) -> tuple[str, str] | None:
    """Return the name of a job's main metric, and its value, or the smallest and the largest one.

    A job without any value has the outcomes of its cells instead, under the name "", as has one all of whose cases lack
    memory or support for it, whatever they measured before; one with a wrong result has that: the other
    implementations' times are not its answer. None: nothing is measured. Where the values are not all of the job's, it
    says so.
    """
    rows = list(values)
    if not rows or kind not in KINDS:
        return None
    measured = {row["metric"] for row in rows if row["outcome"] == "ok" and row["median"] is not None}
    metric = headline([name for name in KINDS[kind].table_columns if name in measured])
    if any(row["outcome"] == "wrong" for row in rows):
        return "", "wrong"
    first = "first " if any(row["is_cut"] for row in rows) else ""
    if metric is None:
        outcomes = dict.fromkeys(row["outcome"] for row in rows if row["outcome"] not in ("ok", "unknown"))
        return ("", f"{', '.join(outcomes)}{' in the first cases' if first else ''}") if outcomes else None
    lacking = {
        row["case_key"]: row["outcome"]
        for row in rows
        if row["outcome"] == "oom" or (row["outcome"] == "unsupported" and row["metric"] == metric)
    }
    if len(lacking) == len({row["case_key"] for row in rows}) and not first:
        return "", ", ".join(dict.fromkeys(lacking.values()))
    own = [row for row in rows if row["metric"] == metric and row["median"] is not None]
    cases = len({row["case_key"] for row in own})
    least, most = min(row["median"] for row in own), max(row["median"] for row in own)
    if "peak" in metric and cases == 1:  # of a job's phases, the one that needs the most
        least = most
    text = number(least) if number(least) == number(most) else f"{number(least)} – {number(most)}"
    unit = own[0]["unit"] if own[0]["unit"] not in (None, "1", "fraction") else ""
    without = "".join(f", {count} {outcome}" for outcome, count in Counter(lacking.values()).items())
    of = f", {first}{cases} cases" if cases > 1 else f", {first}processes" if first else ""
    return metric, f"{text} {unit}".strip() + of + without


def _alive(workers: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [worker for worker in workers if worker["state"] in ALIVE]


@router.post("/demo", dependencies=[NO_QUERY])
async def demo(services: CurrentServices, sender: Sender) -> Response:
    """Submit the sweep of `make demo`, for a GPU if a worker has one."""
    workers = _alive(await run_in_threadpool(services.reading.workers))
    has_gpu = any(device["type"] == "cuda" for worker in workers for device in worker["devices"] or ())
    body = SweepBody(name="A first sweep", labels={"demo": "true"}, **DEMO_SWEEPS["cuda" if has_gpu else "cpu"])
    submitted = await submit_sweep(services, body, sender)
    return RedirectResponse(f"/ui/sweeps/{submitted.response['id']}", status_code=303)


@router.post("/jobs/cancel", dependencies=[NO_QUERY])
async def cancel_picked(request: Request, services: CurrentServices) -> Response:
    """Cancel the jobs that are picked in the list, and show the list again; finished jobs are not changed."""
    raw = await read_limited(request, services.settings.max_body_bytes)
    sent = parse_qsl(raw.decode(errors="replace"), keep_blank_values=True)
    picked = [parse_id(value, "job") for name, value in sent if name == "job"]
    if not 0 < len(picked) <= MAX_PICKED:
        raise InvalidRequest.at("/job", f"Pick 1 to {MAX_PICKED} jobs to cancel; {len(picked)} are picked.")
    await check_own_jobs(services, access_of(request), picked)
    await services.writes.run(lambda: services.queue.cancel_some(picked))
    back = next((value for name, value in sent if name == "back"), "")
    return RedirectResponse("/ui" + (f"?{urlencode(parse_qsl(back))}" if back else ""), status_code=303)
