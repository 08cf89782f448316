"""Compares finished jobs, or the two sides of a job of kind `compare`.

Jobs whose units reported tables of times (`classes`, `kernels-<phase>`, `operators-<phase>` of a profile) are compared
row by row: ms and calls per step that the candidate gained or lost. All others are compared metric by metric, by the
medians of their processes, and judged (see judging.py). Of profiles, only the headline metric is judged.

Cases are matched by their coordinates. Coordinates that have one value on each side, but different values on the two
sides (precision=fp32 → bf16), are the subject of the comparison: they are listed separately, and matching ignores them.

The jobs ran at different times, unless one job measured both sides in turns. `alternated` says which.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import ValidationError
from sqlalchemy import Connection, Row

from app.case_text import ARROW, case_text, in_use
from app.errors import Conflict, FieldError, InvalidRequest
from app.numbers import finite
from app.results import circumstances, judging
from app.results.cases import CaseOfJob, cases_of, cell_of
from app.results.circumstances import Circumstances
from app.results.pivoting import coordinates_of
from app.results.reported import UNIT_INDEX, list_tables, result_table
from app.results.sheet import NOT_MEASURED, Cell, Column, Sheet, free_names, type_of
from app.specs import KINDS, Scalar, spec_adapter
from app.states import VERDICTS, worst
from app.store.database.engine import Database
from app.store.keeping.baseline_rows import cases_of_baseline
from app.store.reading import measurements

SideName = Literal["baseline", "candidate"]
SIDES: tuple[SideName, SideName] = ("baseline", "candidate")
JOINED = {"classes": ("scope", "class"), "kernels": ("name", "class"), "operators": ("name", "class")}
"""Tables that are compared, by the part of their names before "-", and the columns that identify a row."""
TIMES = ("total_ms", "device_ms", "host_ms")
"""Columns of time per step. The first that both sides have values of is compared."""
CALLS = "calls"
PHASES = ("forward", "backward", "forward_backward", "optimizer", "step", "prefill", "decode")
"""The order of phases; others follow."""
DIFFERENCE = (
    Column("baseline_ms", "number", "ms"),
    Column("candidate_ms", "number", "ms"),
    Column("change_ms", "number", "ms"),
    Column("ratio", "number"),
    Column("baseline_calls", "number", "calls"),
    Column("candidate_calls", "number", "calls"),
)
"""Columns of the differences; `ratio` is candidate / baseline. Null: that side did not run the kernel or operator, or
could not determine the class.
"""
NOT_ALTERNATED = "The jobs ran one after the other: what changed on the host between them counts as a difference."
ALTERNATED = "Fresh processes measured both sides in turns."
MEDIANS = (
    "Values are medians: of each process's samples, and of several processes the median of these. Tables show means."
)
MAX_DISTRIBUTIONS = 200
"""Largest number of rows whose single processes are listed; those of the headline metric come first."""

Key = tuple[Scalar, ...]
Place = tuple[str | None, Scalar]
"""The key of a case, and the device that measured it; None: nothing was measured, so no device is known."""


@dataclass(frozen=True)
class Question:
    """The options of a comparison."""

    limit: int | None = None
    """Largest number of rows of each table and phase of a profile, those with the largest changes; None: all."""
    metrics: Sequence[str] = ()
    """Only these metrics are compared, and judged together; empty: all of them."""
    fail_above_percent: float | None = None
    """The gate's limit; None: there is no gate."""


PLAIN = Question()


@dataclass(frozen=True)
class _Side:
    """One of the two that are compared: one job, several, or a part of one."""

    name: SideName
    jobs: Sequence[Row[Any]]
    cases: Sequence[CaseOfJob]
    metrics: Mapping[str, str]
    """The unit of each metric's column."""
    units: frozenset[int] | None
    """Indexes of the side's units; None: all of the job."""
    circumstances: Circumstances
    baseline: str | None = None
    """The name of the baseline that the side is."""
    joins: Mapping[Place, Sequence[str]] | None = None
    """The keys by which the case of a place is matched: cases of both sides that share a key. None: cases are matched
    by their coordinates."""

    @property
    def validity(self) -> str | None:
        """The worst verdict of the side's cases."""
        return worst({case.validity() for case in self.cases})

    def about(self) -> dict[str, Any]:
        first = self.jobs[0] if self.jobs else None
        verdicts = Counter(verdict for case in self.cases if (verdict := case.validity()) is not None)
        return {
            "name": self.baseline,
            "job": first and first.id,
            "jobs": [job.id for job in self.jobs],
            "kind": first and first.kind,
            "state": first and first.state,
            "validity": self.validity,
            "verdicts": {verdict: verdicts[verdict] for verdict in VERDICTS if verdict in verdicts},
            "processes": max((len(rows) for case in self.cases for rows in case.processes.values()), default=0),
            "url": first and f"/jobs/{first.id}",
        }


def compare(
    database: Database, baseline: int | Sequence[int], candidate: int | Sequence[int], question: Question = PLAIN
) -> Sheet:
    """Compare two finished jobs of one kind, or two sets of them. `Sheet.about` has both, and what differs.

    Jobs of one side that measured the same case are several samples of it.

    Args:
        database: the store.
        baseline: the job to compare with, or several.
        candidate: the job that is compared, or several.
        question: what is asked.

    Raises:
        NotFound: there is no such job.
        Conflict: a job is not finished.
        InvalidRequest: the jobs are of different kinds, or have no such metric.
    """
    with database.read() as connection:
        ones, others = (_finished(connection, _listed(jobs)) for jobs in (baseline, candidate))
        _check_kinds(ones, others)
        sides = [_side(connection, name, jobs) for name, jobs in zip(SIDES, (ones, others), strict=True)]
    return _compared(database, sides[0], sides[1], question, alternated=False)


def compare_with_baseline(
    database: Database, name: str, candidate: int | Sequence[int], question: Question = PLAIN
) -> Sheet:
    """Compare finished jobs of one kind with the results that a baseline has of their cases, as `compare`.

    Cases are matched by key and device. A case that the baseline has on other devices only is matched with those, and
    the sentence says that it cannot be compared with them, even if the specs name the devices.

    Raises:
        NotFound: there is no such baseline or job.
        Conflict: a job is not finished.
        InvalidRequest: the jobs are of different kinds, or have no such metric.
    """
    with database.read() as connection:
        others = _finished(connection, _listed(candidate))
        _check_kinds(others)
        side = _side(connection, "candidate", others)
        side = replace(side, cases=[case for job in others for case in _with_planned(job, side.cases)])
        kept = cases_of_baseline(connection, name)
        asked = list(dict.fromkeys(_place_of(case) for case in side.cases))
        met = _met({(one.case_key, one.device_key) for one in kept}, asked)
        chosen = {(key, device) for (key, _), devices in met.items() for device in devices}
        jobs = {one.job_id for one in kept if (one.case_key, one.device_key) in chosen}
        ones = _finished(connection, sorted(jobs))
        whole = _side(connection, "baseline", ones)
    of_baseline = {(one.job_id, one.case_key, one.device_key) for one in kept}
    cases = [case for case in whole.cases if (case.job, *_place_of(case)) in of_baseline and _place_of(case) in chosen]
    keys, found = {key for key, _ in asked}, {case.key for case in cases}
    notes = []
    if new := keys - found:
        notes.append(f"{len(new)} of {len(keys)} cases are not in the baseline {name}, and have nothing to meet.")
        side = replace(side, cases=[case for case in side.cases if case.key in found])
    ours: dict[Place, list[str]] = {}
    theirs: dict[Place, list[str]] = {}
    for (key, device), devices in met.items():
        for other in devices:
            both = json.dumps([key, device, other])
            ours.setdefault((key, device), []).append(both)
            theirs.setdefault((key, other), []).append(both)
    baseline = replace(whole, cases=cases, baseline=name, joins=theirs)
    elsewhere = [(other, device) for (_, device), devices in met.items() for other in devices if device != other]
    return _compared(
        database, baseline, replace(side, joins=ours), question, alternated=False, elsewhere=elsewhere, more_notes=notes
    )


def _place_of(case: CaseOfJob) -> Place:
    return case.key, case.coordinates.get("device")


def _met(kept: Collection[tuple[str, str]], asked: Iterable[Place]) -> dict[Place, list[str]]:
    """Return, for each case of the candidate, the baseline's devices with the same key whose results it is matched
    with.

    These are its own device or, without results there, all others. A case without a device, since nothing was measured,
    gets the devices that no other case of its key is matched with.
    """
    there: dict[str | None, list[str]] = {}
    for case_key, one in sorted(kept):
        there.setdefault(case_key, []).append(one)
    found: dict[Place, list[str]] = {place: [] for place in asked}
    for key, device in found:
        devices = there.get(key, [])
        if device is None:
            found[key, device] = [one for one in devices if (key, one) not in found] or devices
        else:
            found[key, device] = [device] if device in devices else devices
    return found


def _with_planned(job: Row[Any], cases: Sequence[CaseOfJob]) -> list[CaseOfJob]:
    """Return the job's cases; for a job that measured nothing, those of its spec, with the reason why they have no
    numbers."""
    of_job = [case for case in cases if case.job == job.id]
    if any(case.key is not None for case in of_job) or not of_job:
        return of_job
    try:
        planned = spec_adapter.validate_json(json.dumps(job.spec)).cases()
    except (ValidationError, ValueError):  # the spec is of another version, or a comparison, which has no cases
        return of_job
    return [replace(of_job[0], coordinates=dict(its.coordinates), key=its.key) for its in planned]


def _side(connection: Connection, name: SideName, jobs: Sequence[Row[Any]]) -> _Side:
    """Read one side, all of whose units count."""
    measured = measurements.measurements(connection, jobs, "median")
    of_units = measurements.sides(connection, jobs)
    cases, metrics = cases_of(jobs, measured, lambda row: of_units.get((row.job_id, row.attempt, row.unit_index)))
    return _Side(name, jobs, cases, metrics, None, circumstances.read(connection, jobs))


def compare_sides(database: Database, job_id: int, question: Question = PLAIN) -> Sheet:
    """Compare the sides of a finished job that has measured both in turns; as `compare`.

    Raises:
        NotFound: there is no such job.
        Conflict: the job is not finished.
        InvalidRequest: it is no comparison, or has no such metric.
    """
    with database.read() as connection:
        (job,) = _finished(connection, [job_id])
        if job.kind not in KINDS or not KINDS[job.kind].holds_specs:
            detail = f"Job {job_id} is of kind {job.kind}, no comparison: pass two jobs, as baseline and candidate."
            raise InvalidRequest(detail, errors=(FieldError("/job", detail),))
        measured = measurements.measurements(connection, [job], "median")
        of_units = measurements.sides(connection, [job])
        how = [circumstances.read(connection, [job], name) for name in SIDES]
    cases, metrics = cases_of([job], measured, lambda row: of_units.get((row.job_id, row.attempt, row.unit_index)))
    sides = [
        _Side(
            name,
            [job],
            [case for case in cases if case.coordinates.get("side") == name],
            metrics,
            frozenset(unit for (_, _, unit), side in of_units.items() if side == name),
            its,
        )
        for name, its in zip(SIDES, how, strict=True)
    ]
    return _compared(database, sides[0], sides[1], question, alternated=True)


def _listed(jobs: int | Sequence[int]) -> list[int]:
    return [jobs] if isinstance(jobs, int) else list(dict.fromkeys(jobs))


def _check_kinds(*sides: Sequence[Row[Any]]) -> None:
    first = sides[0][0]
    for job in (job for side in sides for job in side):
        if job.kind != first.kind:
            kinds = f"job {first.id} is of kind {first.kind}, job {job.id} of kind {job.kind}"
            detail = f"Compare jobs of one kind: {kinds}."
            raise InvalidRequest(detail, errors=(FieldError("/candidate", detail),))


def _finished(connection: Connection, wanted: Sequence[int]) -> list[Row[Any]]:
    """Return these jobs, in this order.

    Raises:
        NotFound: there is no such job.
        Conflict: one is not finished.
    """
    if not wanted:
        return []
    chosen = measurements.choose_jobs(connection, kind=None, sweep=None, jobs=wanted, labels=())
    found = {job.id: job for job in chosen}
    for job_id in wanted:
        if job_id not in found:
            raise Conflict(f"Job {job_id} is not finished: wait for its end, then compare.")
    return [found[job_id] for job_id in wanted]


def _compared(
    database: Database,
    baseline: _Side,
    candidate: _Side,
    question: Question,
    *,
    alternated: bool,
    elsewhere: Sequence[tuple[Scalar, Scalar]] = (),
    more_notes: Sequence[str] = (),
) -> Sheet:
    """Compare two sides; cases are matched by `joins` or, without it, by the coordinates in which the sides do not
    differ.

    `elsewhere`: pairs of different devices of matched cases, which cannot be compared.
    """
    differences = _differences(baseline, candidate)
    _check_metrics(question.metrics, {**baseline.metrics, **candidate.metrics})
    rows = _joined_rows(baseline, candidate, differences, question.metrics)
    kind = next((case.tabled_as[-1] for side in (candidate, baseline) for case in side.cases), candidate.jobs[0].kind)
    judged_rows = [row.judged for row in rows]
    headline = question.metrics[0] if question.metrics else judging.headline_of(judged_rows, _columns_of(kind))
    judged = judging.judge(judged_rows, headline, alternated=alternated, asked=question.metrics)
    environments = circumstances.environment_differences(
        baseline.circumstances, candidate.circumstances, devices_may_differ=baseline.baseline is None
    )
    judgement = judging.conclude(
        judged,
        headline,
        circumstances.obstacles(environments, elsewhere),
        alternated=alternated,
        same=None if alternated else _same_jobs(baseline, candidate),
        asked=question.metrics,
        fail_above_percent=question.fail_above_percent,
    )
    notes = [*_notes(baseline, candidate, differences, environments, alternated=alternated), *more_notes]
    tables = _Tables() if question.metrics else _Tables.read(database, baseline, candidate)
    distributions: list[dict[str, Any]] = []
    if tables.joined:
        columns, shown = tables.compared(question.limit, notes)
    else:
        columns, shown = _metric_table(rows, judged)
        if any(cell.value is not None for row in judged for cell in row.cells):
            notes.insert(0, MEDIANS)
        distributions = _distributions(judged, headline)
    about = {
        **judgement.as_json(),
        "alternated": alternated,
        "baseline": baseline.about(),
        "candidate": candidate.about(),
        "differences": [
            {"name": name, "baseline": one, "candidate": other} for name, (one, other) in differences.items()
        ],
        "spec_differences": [
            one.as_json() for one in circumstances.spec_differences(baseline.circumstances, candidate.circumstances)
        ],
        "environment_differences": [one.as_json() for one in environments],
        "distributions": distributions,
        "notes": notes,
    }
    return Sheet(columns=columns, rows=shown, notes=notes, about=about, lead=_lead(judgement))


def _lead(judgement: judging.Judgement) -> list[str]:
    """Return the sentences that stand above the table."""
    lead = [f"{judgement.sentence}."]
    if judgement.gate is not None and judgement.gate.sentence != judgement.sentence:
        lead.append(f"Gate: {judgement.gate.sentence}.")
    return lead


def _columns_of(kind: str) -> Sequence[str]:
    return KINDS[kind].table_columns if kind in KINDS else ()


def _check_metrics(asked: Sequence[str], known: Mapping[str, str]) -> None:
    for metric in asked:
        if metric not in known and known:
            detail = f"{metric!r} is none of these jobs' metrics: {', '.join(known)}."
            raise InvalidRequest(detail, errors=(FieldError("/metric", detail),))


def _notes(
    baseline: _Side,
    candidate: _Side,
    differences: Mapping[str, tuple[Scalar, Scalar]],
    environments: Sequence[circumstances.EnvironmentDifference],
    *,
    alternated: bool,
) -> list[str]:
    """Return the sentences that stand below the table."""
    notes = [ALTERNATED if alternated else NOT_ALTERNATED]
    if not alternated and _same_jobs(baseline, candidate):
        notes = []  # the sentence above the table says it
    if differences:
        notes.append(f"They differ in {case_text({name: _change(*both) for name, both in differences.items()})}.")
    if environments:
        notes.append(f"Their environments differ: {'; '.join(one.in_words() for one in environments)}.")
    for side in (baseline, candidate):
        for job in side.jobs:
            if job.state != "succeeded":
                code = (job.error or {}).get("code", job.state)
                notes.append(f"The {side.name}, job {job.id}, did not succeed ({code}): it has no numbers.")
        if all(job.state == "succeeded" for job in side.jobs) and side.validity not in (None, VERDICTS[0]):
            which = f"job {side.jobs[0].id}" if len(side.jobs) == 1 else f"of {len(side.jobs)} jobs"
            notes.append(f"The {side.name}, {which}, is {side.validity}; its verdict says why.")
    return notes


def _same_jobs(*sides: _Side) -> str | None:
    """Say that both sides are the same jobs; None if they are not."""
    ones, others = ({job.id for job in side.jobs} for side in sides)
    if ones != others:
        return None
    named = f"job {min(ones)}" if len(ones) == 1 else f"the same {len(ones)} jobs"
    return f"both sides are {named}, so there is nothing to compare"


def _change(one: Scalar, other: Scalar) -> str:
    return ARROW.join("none" if value is None else str(value) for value in (one, other))


def _differences(baseline: _Side, candidate: _Side) -> dict[str, tuple[Scalar, Scalar]]:
    """Return the coordinates that have one value on each side, and another one on the other side."""
    if not baseline.cases or not candidate.cases:
        return {}
    names = dict.fromkeys(name for side in (baseline, candidate) for case in side.cases for name in case.coordinates)
    found = {}
    for name in names:
        one, other = (
            {repr(in_use(case.coordinates.get(name))) for case in side.cases} for side in (baseline, candidate)
        )
        if len(one) == len(other) == 1 and one != other and name != "side":
            found[name] = (baseline.cases[0].coordinates.get(name), candidate.cases[0].coordinates.get(name))
    return found


@dataclass(frozen=True)
class _JoinedRow:
    """A metric of a case that at least one side has."""

    place: dict[str, Scalar]
    """The coordinates that the table shows."""
    pair: tuple[CaseOfJob | None, CaseOfJob | None]
    judged: judging.Row


def _joined_rows(
    baseline: _Side, candidate: _Side, differences: Mapping[str, Any], asked: Sequence[str]
) -> list[_JoinedRow]:
    """Return a row for each metric of each case."""
    apart = {*differences, "side"}
    devices = {case.coordinates.get("device") for side in (baseline, candidate) for case in side.cases} - {None}
    if len(devices) == 1:  # it tells nothing, and a case that was not measured, which has none, meets the one that was
        apart.add("device")

    def joined(side: _Side) -> dict[str, CaseOfJob]:
        alike: dict[str, list[CaseOfJob]] = {}
        for case in side.cases:
            by_coordinates = [repr(sorted(_known(case, apart)))]
            for key in by_coordinates if side.joins is None else side.joins.get(_place_of(case), ()):
                alike.setdefault(key, []).append(case)
        return {key: _pooled(cases) for key, cases in alike.items()}

    ones, others = joined(baseline), joined(candidate)
    keys = list(dict.fromkeys([*ones, *others]))
    either = {**others, **ones}
    if candidate.joins is not None:  # the place of a row is the candidate's
        either |= {key: case for key, case in others.items() if case.coordinates.get("device") is not None}
    shown = [name for name in coordinates_of([either[key] for key in keys], None) if name not in apart]
    varying = [name for name in shown if len({repr(either[key].show(name)) for key in keys}) > 1]
    units = {**candidate.metrics, **baseline.metrics}
    metrics = list(asked) or list(dict.fromkeys([*baseline.metrics, *candidate.metrics]))
    rows = []
    for key in keys:
        pair = (ones.get(key), others.get(key))
        place = {name: either[key].show(name) for name in shown}
        words = case_text({name: place[name] for name in varying})
        verdicts = (_verdict(pair[0]), _verdict(pair[1]))
        for metric in metrics:
            one, other = (NOT_MEASURED if case is None else cell_of(case, metric, "median") for case in pair)
            if one.value is None and other.value is None and {one.outcome, other.outcome} <= {None, "unknown"}:
                continue
            row = judging.Row(
                case=words,
                metric=metric,
                unit=units.get(metric, ""),
                cells=(one, other),
                verdicts=verdicts,
                baseline=_values(pair[0], metric, one),
                candidate=_values(pair[1], metric, other),
            )
            rows.append(_JoinedRow(place, pair, row))
    return rows


def _pooled(cases: Sequence[CaseOfJob]) -> CaseOfJob:
    """Return a case with the processes of all jobs that measured it. If one of the jobs failed, it has no numbers."""
    if len(cases) == 1:
        return cases[0]
    processes: dict[str, list[Any]] = {}
    for case in cases:
        for metric, rows in case.processes.items():
            processes.setdefault(metric, []).extend(rows)
    return replace(
        cases[0], processes=processes, stopped=next((case.stopped for case in cases if case.stopped is not None), None)
    )


def _verdict(case: CaseOfJob | None) -> str | None:
    return None if case is None else case.validity()


def _values(case: CaseOfJob | None, metric: str, cell: Cell) -> list[float]:
    """Return the median of each process, in the order in which they ran; nothing if one of them has none."""
    if case is None or cell.value is None:
        return []
    return [value for row in case.processes[metric] if (value := finite(row.value)) is not None]


def _known(case: CaseOfJob, apart: Collection[str]) -> list[tuple[str, Scalar]]:
    used = {name: in_use(value) for name, value in case.coordinates.items() if name not in apart}
    return [(name, value) for name, value in used.items() if value is not None]


def _metric_table(rows: Sequence[_JoinedRow], judged: Sequence[judging.Row]) -> tuple[list[Column], list[list[Scalar]]]:
    """Return the table of metrics: coordinates, then METRIC_COLUMNS."""
    shown = list(rows[0].place) if rows else []
    values = [
        [*joined.place.values(), *_metric_values(joined.pair, row).values()]
        for joined, row in zip(rows, judged, strict=True)
    ]
    names = free_names(shown, {column.name for column in METRIC_COLUMNS}, "case")
    types = [type_of(row[index] for row in values) for index in range(len(shown))]
    coordinates = [Column(names[name], type_, role="coordinate") for name, type_ in zip(shown, types, strict=True)]
    return [*coordinates, *_shown_columns(judged)], values


METRIC_COLUMNS = (
    Column("metric", "string"),
    Column("unit", "string"),
    Column("better", "string", in_text=False),
    Column("baseline", "number"),
    Column("candidate", "number"),
    Column("change", "number"),
    Column("ratio", "number"),
    Column("ratio_low", "number"),
    Column("ratio_high", "number"),
    Column("p_value", "number", in_text=False),
    Column("p_adjusted", "number"),
    Column("finding", "string"),
    Column("sentence", "string", in_text=False),
    Column("spread_percent", "number", "%", in_text=False),
    Column("smallest_difference_percent", "number", "%", in_text=False),
    *(Column(f"replicates_for_{number}_percent", "integer", in_text=False) for number in judging.ASKED_FOR),
    *(Column(f"{side}_processes", "integer", in_text=False) for side in SIDES),
    *(Column(f"{side}_n", "integer", in_text=False) for side in SIDES),
    *(Column(f"{side}_outcome", "string") for side in SIDES),
    *(Column(f"{side}_validity", "string") for side in SIDES),
    Column("case_key", "string", in_text=False),
)
"""Columns of a metric of a case. `ratio` is candidate / baseline, with its interval of 95 %."""


def _metric_values(pair: tuple[CaseOfJob | None, CaseOfJob | None], row: judging.Row) -> dict[str, Scalar]:
    """Return the values of METRIC_COLUMNS, in their order."""
    one, other = row.cells
    found = row.estimate or judging.NOTHING
    change, ratio = _difference(one.value, other.value)
    keys = {case.key for case in pair if case is not None}
    smallest = row.smallest_difference
    needed = {f"replicates_for_{number}_percent": row.replicates_for(number) for number in judging.ASKED_FOR}
    return {
        "metric": row.metric,
        "unit": row.unit,
        "better": row.better,
        "baseline": one.value,
        "candidate": other.value,
        "change": change,
        "ratio": ratio,
        "ratio_low": found.low,
        "ratio_high": found.high,
        "p_value": found.p_value,
        "p_adjusted": row.p_adjusted,
        "finding": row.finding,
        "sentence": row.sentence(),
        "spread_percent": None if found.spread is None else 100 * found.spread,
        "smallest_difference_percent": None if smallest is None else 100 * smallest,
        **needed,
        "baseline_processes": len(row.baseline) or None,
        "candidate_processes": len(row.candidate) or None,
        "baseline_n": one.n,
        "candidate_n": other.n,
        "baseline_outcome": one.outcome,
        "candidate_outcome": other.outcome,
        "baseline_validity": row.verdicts[0],
        "candidate_validity": row.verdicts[1],
        "case_key": keys.pop() if len(keys) == 1 else None,
    }


def _shown_columns(judged: Sequence[judging.Row]) -> list[Column]:
    """Return METRIC_COLUMNS; formats for people show only those that carry information here."""
    tested = any(row.p_adjusted is not None for row in judged)
    failed = any(cell.outcome not in ("ok", None) for row in judged for cell in row.cells)
    doubtful = any(verdict in VERDICTS[1:] for row in judged for verdict in row.verdicts)
    told = {
        "ratio_low": tested,
        "ratio_high": tested,
        "p_adjusted": tested,
        "finding": tested,
        **{f"{side}_outcome": failed for side in SIDES},
        **{f"{side}_validity": doubtful for side in SIDES},
    }
    return [replace(column, in_text=told.get(column.name, column.in_text)) for column in METRIC_COLUMNS]


def _distributions(judged: Sequence[judging.Row], headline: str | None) -> list[dict[str, Any]]:
    """Return the single processes of rows, those of the headline metric first, by the rows' places in the table."""
    tested = [(place, row) for place, row in enumerate(judged) if row.baseline and row.candidate]
    first = sorted(tested, key=lambda one: one[1].metric != headline)
    return [
        {"row": place, "baseline": list(row.baseline), "candidate": list(row.candidate)}
        for place, row in first[:MAX_DISTRIBUTIONS]
    ]


def _difference(one: float | None, other: float | None) -> tuple[float | None, float | None]:
    """Return other - one and other / one, each None if unknown."""
    if one is None or other is None:
        return None, None
    return other - one, other / one if one else None


@dataclass
class _Rows:
    """The rows of one table that both sides reported, by what identifies them: ms and calls per step."""

    kind: str
    phase: str | None
    baseline: dict[Key, tuple[float, float | None]]
    candidate: dict[Key, tuple[float, float | None]]

    @property
    def title(self) -> str:
        """Return the table and its phase, for people."""
        return self.kind if self.phase is None else f"{self.kind} ({self.phase})"

    def compared(self) -> list[list[Scalar]]:
        """Return the table's rows, those that changed most first."""
        rows: list[tuple[float, list[Scalar]]] = []
        for key in dict.fromkeys([*self.baseline, *self.candidate]):
            *_, name, class_name = key
            (one, calls), (other, other_calls) = (
                side.get(key, (None, None)) for side in (self.baseline, self.candidate)
            )
            change, ratio = _difference(one, other)
            # All classes are listed, so a missing class could not be determined. A missing kernel did not run.
            if self.kind != "classes":
                change = (other or 0.0) - (one or 0.0)
            place = (self.kind, self.phase, class_name if self.kind == "classes" else name)
            rows.append((abs(change or 0.0), [*place, class_name, one, other, change, ratio, calls, other_calls]))
        return [row for _, row in sorted(rows, key=lambda found: -found[0])]


@dataclass
class _Tables:
    """The tables of two profiles that can be compared."""

    joined: list[_Rows] = field(default_factory=list)
    of_one_side: dict[SideName, list[str]] = field(default_factory=lambda: {name: [] for name in SIDES})
    """The names of tables, and scopes of classes, that only one side has."""

    @classmethod
    def read(cls, database: Database, baseline: _Side, candidate: _Side) -> _Tables:
        """Read the tables of both sides; none if one of the jobs has not succeeded, or a side has several."""
        found = cls()
        if any(len(side.jobs) != 1 or side.jobs[0].state != "succeeded" for side in (baseline, candidate)):
            return found
        ones, others = (_names(database, side) for side in (baseline, candidate))
        for name in sorted({*ones, *others}, key=_place):
            if name not in ones or name not in others:
                found.of_one_side["baseline" if name in ones else "candidate"].append(name)
                continue
            sheets = [result_table(database, side.jobs[0].id, name) for side in (baseline, candidate)]
            for rows in _joined(name, sheets, [baseline.units, candidate.units]):
                found.add(rows)
        return found

    def add(self, rows: _Rows) -> None:
        """Take the rows of a table and phase. If one side has none at all, it has no such work to compare."""
        if rows.baseline and rows.candidate:
            self.joined.append(rows)
        elif rows.baseline or rows.candidate:
            self.of_one_side["baseline" if rows.baseline else "candidate"].append(rows.title)

    def compared(self, limit: int | None, notes: list[str]) -> tuple[list[Column], list[list[Scalar]]]:
        """Return the columns and the rows of all tables; adds a note on omitted rows to `notes`."""
        whole = [_total(rows) for rows in self.joined if rows.kind == "kernels"]
        whole = whole or [_total(rows) for rows in self.joined if rows.kind == "operators"]
        found: list[list[Scalar]] = list(whole)
        cut = []
        for rows in self.joined:
            compared = rows.compared()
            if limit is not None and len(compared) > limit:
                cut.append(f"{len(compared)} {rows.title}")
            found += compared[:limit]
        if cut:
            notes.append(f"Shown are the {limit} that changed most of {', '.join(cut)}.")
        notes += [f"Only the {side} has {', '.join(names)}." for side, names in self.of_one_side.items() if names]
        place = [Column(name, "string") for name in ("table", "phase", "name", "class")]
        return [*place, *DIFFERENCE], found


def _names(database: Database, side: _Side) -> list[str]:
    """Return the names of the side's tables that can be compared."""
    return [
        table["name"]
        for table in list_tables(database, side.jobs[0].id)
        if (needed := JOINED.get(table["name"].partition("-")[0])) is not None
        and {*needed} <= {column["name"] for column in table["columns"]}
        and (side.units is None or side.units & {*table["units"]})
    ]


def _place(name: str) -> tuple[int, int, str]:
    kind, _, phase = name.partition("-")
    return list(JOINED).index(kind), _order(phase), phase


def _order(phase: str) -> int:
    return PHASES.index(phase) if phase in PHASES else len(PHASES)


def _joined(name: str, sheets: Sequence[Sheet], units: Sequence[frozenset[int] | None]) -> list[_Rows]:
    """Return the rows of one table, apart for each phase; a table of classes has several (`scope`)."""
    kind, _, phase = name.partition("-")
    time = next((time for time in TIMES if all(_has_values(sheet, time) for sheet in sheets)), None)
    if time is None:
        return []
    ones, others = (_by_key(sheet, JOINED[kind], time, of_side) for sheet, of_side in zip(sheets, units, strict=True))
    if kind != "classes":
        return [_Rows(kind, phase or None, ones, others)]
    scopes = sorted({str(key[0]) for key in (*ones, *others)}, key=_order)

    def inside(rows: Mapping[Key, Any], scope: str) -> dict[Key, Any]:
        return {key: row for key, row in rows.items() if str(key[0]) == scope}

    return [_Rows(kind, scope, inside(ones, scope), inside(others, scope)) for scope in scopes]


def _has_values(sheet: Sheet, column: str) -> bool:
    return column in sheet.names() and any(value is not None for value in sheet.column(column))


def _by_key(
    sheet: Sheet, identity: Sequence[str], time: str, units: frozenset[int] | None
) -> dict[Key, tuple[float, float | None]]:
    """Return time and calls of each row. If several processes measured them: means over the processes.

    A process whose table lacks a row did not run it.
    """
    names = sheet.names()
    at = {name: names.index(name) for name in (UNIT_INDEX, *identity, time)}
    calls_at = names.index(CALLS) if CALLS in names else None
    found: dict[Key, dict[int, tuple[float, float]]] = {}
    processes = set()
    for row in sheet.rows:
        unit = row[at[UNIT_INDEX]]
        if (units is not None and unit not in units) or row[at[time]] is None:
            continue
        processes.add(unit)
        calls = row[calls_at] if calls_at is not None else None
        of_unit = found.setdefault(tuple(row[at[name]] for name in identity), {})
        before = of_unit.get(unit, (0.0, 0.0))
        of_unit[unit] = (before[0] + row[at[time]], before[1] + (calls or 0.0))

    def mean(values: Callable[[tuple[float, float]], float], of_unit: Mapping[int, tuple[float, float]]) -> float:
        return statistics.fmean(values(of_unit.get(unit, (0.0, 0.0))) for unit in processes)

    return {
        key: (
            mean(lambda both: both[0], of_unit),
            None if calls_at is None else _whole(mean(lambda both: both[1], of_unit)),
        )
        for key, of_unit in found.items()
    }


def _whole(number: float) -> float:
    """Return a number of calls, as an integer if it is one."""
    return int(number) if number.is_integer() else number


def _total(rows: _Rows) -> list[Scalar]:
    """Return the row with the sums of a phase."""
    (one, calls), (other, other_calls) = (
        (sum(row[0] for row in side.values()), sum(row[1] or 0 for row in side.values()))
        for side in (rows.baseline, rows.candidate)
    )
    return ["total", rows.phase, f"all {rows.kind}", None, one, other, *_difference(one, other), calls, other_calls]
