"""Compares finished jobs, or the two sides of a job of kind `compare`.

Profiles are compared by the rows of their tables of times (see profiles.py), jobs of kind `memory` by what fills their
peaks (see memories.py); of both, only the headline metric is judged. All others are compared metric by metric, by the
medians of their processes, and judged (see findings.py).

Cases are matched by their coordinates. Coordinates that have one value on each side, but different values on the two
sides (precision=fp32 → bf16), are the subject of the comparison: they are listed separately, and matching ignores them.

The jobs ran at different times, unless one job measured both sides in turns: `alternated`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.errors import InvalidRequest
from app.metrics import is_rate
from app.results import agreement, environments, findings
from app.results.agreement import Agreement
from app.results.cases import CaseOfJob
from app.results.choosing import coordinates_of
from app.results.environments import VERSION, Difference, EnvironmentDifference
from app.results.matching import change_and_ratio
from app.results.memories import ComparedMemory
from app.results.process_values import process_values
from app.results.profiles import ComparedProfiles
from app.results.sheet import NOT_MEASURED, Cell
from app.results.sides import Pair, Side, joins_of, sides_of_baseline, sides_of_job, sides_of_jobs
from app.specs import KINDS, Scalar
from app.specs.compare import blocks_of_turns
from app.states import VERDICTS
from app.store.database.engine import Database, Snapshot
from app.store.reading.measurements import MAX_DOUBTFUL, unit_verdicts
from app.summaries import planned_processes, summarise
from flopwatch.text.cases import ARROW, case_text, in_use
from flopwatch.text.numbers import finite
from flopwatch.text.values import value_text

NOT_ALTERNATED = "The jobs ran one after the other: what changed on the host between them counts as a difference."
COUNTED = "memory"
"""The kind whose sizes are counted by an allocator; other kinds' may be those of a whole process."""
ALTERNATED = "Fresh processes measured both sides in turns"
RATIO = "Ratios and intervals are Hodges and Lehmann's, of all pairs of a process of either side."
MEDIANS = f"Values are medians: of each process's samples, and of several processes the median of these. {RATIO}"
FASTEST = (
    "Times on a processor, which others use as well, are those of each process's fastest sample, and rates follow from "
    f"them; other values are medians, and so is what stands for several processes. {RATIO}"
)
CUT = (
    "Processes with more samples would seem faster: of each, the first samples count, as many as the shortest process "
    "of the case has (some have {})."
)
THREADS = "threads"
"""The check that notes that threads computed beside the steps."""
MAX_REPLICATES = 100
"""Most `replicates` of a job."""
MAX_DISTRIBUTIONS = 200
"""Largest number of rows whose single processes are listed; those of the headline metric come first."""


@dataclass(frozen=True)
class Question:
    """The options of a comparison."""

    metrics: Sequence[str] = ()
    """Only these metrics are compared, and judged together; empty: all of them."""
    fail_above_percent: float | None = None
    """The gate's limit; None: there is no gate."""
    expect_equal: float | None = None
    """The relative difference by which the numbers that the steps return may differ; None: any."""


PLAIN = Question()
ComparedTables = ComparedProfiles | ComparedMemory


@dataclass(frozen=True)
class ComparedMetric:
    """A metric of a case that at least one side has."""

    place: Mapping[str, Scalar]
    """The coordinates that distinguish the case from the others of the comparison, and those that its kind shows."""
    case_key: str | None
    """None if the sides have different cases there."""
    judged: findings.Row

    def values(self) -> dict[str, Scalar]:
        """Return all numbers and findings, by the names of comparison_sheet.METRIC_COLUMNS and in their order."""
        row = self.judged
        baseline, candidate = row.cells
        estimate = row.estimate or findings.NOTHING
        change, ratio = change_and_ratio(baseline.value, candidate.value)
        if estimate.ratio is not None:
            ratio = estimate.ratio
        smallest = row.smallest_difference
        return {
            "metric": row.metric,
            "unit": row.unit,
            "better": row.better,
            "baseline": baseline.value,
            "candidate": candidate.value,
            "change": change,
            "ratio": ratio,
            "ratio_low": estimate.low,
            "ratio_high": estimate.high,
            "p_value": estimate.p_value,
            "p_adjusted": row.p_adjusted,
            "finding": row.finding,
            "sentence": row.sentence(),
            "spread_percent": None if estimate.spread is None else 100 * estimate.spread,
            "smallest_difference_percent": None if smallest is None else 100 * smallest,
            **{f"replicates_for_{number}_percent": row.replicates_for(number) for number in findings.ASKED_FOR},
            "baseline_processes": len(row.baseline) or None,
            "candidate_processes": len(row.candidate) or None,
            "baseline_n": baseline.n,
            "candidate_n": candidate.n,
            "baseline_outcome": baseline.outcome,
            "candidate_outcome": candidate.outcome,
            "baseline_validity": row.verdicts[0],
            "candidate_validity": row.verdicts[1],
            "statistic": row.statistic,
            "samples": row.samples,
            "case_key": self.case_key,
        }


@dataclass(frozen=True)
class Comparison:
    """A comparison of two sides. `comparison_sheet.sheet_of` writes it as a table."""

    baseline: Side
    candidate: Side
    alternated: bool
    """True if fresh processes measured both sides in turns."""
    judgement: findings.Judgement
    agreement: dict[str, Any] | None
    """How far the numbers that the steps of both sides returned agree; None if there are none."""
    rows: Sequence[ComparedMetric]
    tables: ComparedTables | None
    """The tables of two profiles or snapshots, which are shown in place of the rows; None if the sides have no such
    tables in common, or certain metrics were asked for."""
    differences: Sequence[Difference]
    """The coordinates that are the subject of the comparison."""
    spec_differences: Sequence[Difference]
    environment_differences: Sequence[EnvironmentDifference]
    how: str | None
    """What the values, ratios and intervals of `rows` are; None if there are none."""
    notes: Sequence[str]
    """Further sentences."""

    @property
    def wrong_sides(self) -> list[str]:
        """Return the sides that have a result which is not that of the reference."""
        return [
            side
            for place, side in enumerate(findings.SIDES)
            if any(row.judged.verdicts[place] == "wrong" for row in self.rows)
        ]

    def distributions(self) -> list[ComparedMetric]:
        """Return the rows with single processes' values on both sides: at most MAX_DISTRIBUTIONS, headline first."""
        tested = [row for row in self.rows if row.judged.baseline and row.judged.candidate]
        return sorted(tested, key=lambda row: row.judged.metric != self.judgement.headline)[:MAX_DISTRIBUTIONS]


def compare(
    database: Database, baseline: Sequence[int] | str, candidate: Sequence[int], question: Question = PLAIN
) -> Comparison:
    """Compare finished jobs of one kind: one with another, two sets of them, or some with the results that a baseline
    has of their cases. Jobs of one side that measured the same case are several samples of it. Cases are matched with a
    baseline's by key and device; a case that it has on other devices only is matched with those, and the sentence says
    that it cannot be compared with them, even if the specs name the devices. Raises NotFound, Conflict if a job is not
    finished, and InvalidRequest if they are of different kinds, or have no such metric."""

    def sides(snapshot: Snapshot) -> Pair:
        if isinstance(baseline, str):
            return sides_of_baseline(snapshot, baseline, list(dict.fromkeys(candidate)))
        return sides_of_jobs(snapshot, list(dict.fromkeys(baseline)), list(dict.fromkeys(candidate)))

    return _read(database, sides, question)


def compare_sides(database: Database, job_id: int, question: Question = PLAIN) -> Comparison:
    """Compare the sides of a finished job that has measured both in turns; as `compare`."""
    return _read(database, lambda snapshot: sides_of_job(snapshot, job_id), question)


def _read(database: Database, sides: Callable[[Snapshot], Pair], question: Question) -> Comparison:
    with database.read() as snapshot:
        pair = sides(snapshot)
        tables = (
            None if question.metrics else ComparedProfiles.read(snapshot, pair) or ComparedMemory.read(snapshot, pair)
        )
        apart = _apart(pair)
        pair = replace(pair, further=[*pair.further, *_beside(snapshot, pair)])
        agreed = agreement.read(snapshot, pair, lambda side, case: next(iter(_keys(side, case, apart)), None))
    return _compared(pair, tables, agreed, question)


def _compared(pair: Pair, tables: ComparedTables | None, agreed: Agreement | None, question: Question) -> Comparison:
    """Compare and judge two sides."""
    baseline, candidate = pair.both
    differences = _differences(baseline, candidate)
    _check_metrics(question.metrics, {**baseline.metrics, **candidate.metrics})
    rows = _rows(pair, question.metrics)
    kind = next((case.tabled_as[-1] for side in (candidate, baseline) for case in side.cases), candidate.jobs[0].kind)
    unjudged = [row.judged for row in rows]
    columns = KINDS[kind].table_columns if kind in KINDS else ()
    metrics = findings.choose(unjudged, columns, question.metrics)
    judged = findings.judge(unjudged, alternated=pair.alternated)
    of_environments = environments.environment_differences(
        baseline.setup, candidate.setup, devices_may_differ=baseline.baseline is None
    )
    judgement = findings.conclude(
        judged,
        metrics,
        environments.obstacles(of_environments, pair.other_devices),
        alternated=pair.alternated,
        same=None if pair.alternated else _same_jobs(baseline, candidate),
        hosts=environments.hosts(of_environments),
        fail_above_percent=question.fail_above_percent,
        confirm=_how_to_confirm(pair, is_same_work=not differences),
    )
    if pair.alternated and (stopped := baseline.jobs[0].stopped) is not None:
        job = baseline.jobs[0]
        judgement = findings.cut_short(judgement, judged, job.id, stopped, planned_processes(job.spec))
    lacking: Sequence[str] = ()
    if isinstance(tables, ComparedMemory) and not tables.peaks:
        lacking, tables = tables.notes, None
    if tables is not None and (explained := tables.explained()) is not None:
        sentences = [judgement.sentence, explained]
        if judgement.conclusion == "inconclusive":  # what was found comes first
            sentences.reverse()
        judgement = replace(judgement, sentence=". ".join(sentences))
    judgement = judgement.completed([*_without_values(question.metrics, unjudged), *pair.further, *_suspect(pair)])
    agreed = agreed and agreed.under(judgement)
    notes = [*_notes(pair, _unlabelled(differences, kind), of_environments), *lacking]
    how = None
    if tables is None and any(cell.value is not None for row in judged for cell in row.cells):
        how = FASTEST if pair.takes_fastest else MEDIANS
        cut = [row.cut_from for row in judged if row.cut_from is not None]
        if cut:
            how += f" {CUT.format(max(cut))}"
    return Comparison(
        baseline=baseline,
        candidate=candidate,
        alternated=pair.alternated,
        judgement=agreement.applied(judgement, agreed, question.expect_equal),
        agreement=None if agreed is None else agreed.as_json(question.expect_equal),
        rows=[replace(row, judged=its) for row, its in zip(rows, judged, strict=True)],
        tables=tables,
        differences=differences,
        spec_differences=environments.spec_differences(baseline.setup, candidate.setup),
        environment_differences=of_environments,
        how=how,
        notes=notes,
    )


def _without_values(requested: Sequence[str], rows: Sequence[findings.Row]) -> list[str]:
    """Name the metrics that were asked for beside others, and that neither side has."""
    lacking = [metric for metric in requested if all(row.metric != metric for row in rows)]
    return [f"neither side has a value of {', '.join(lacking)}"] if lacking and rows else []


def _suspect(pair: Pair) -> list[str]:
    sides = [f"the {side.name} is" for side in pair.both if side.validity == "suspect"]
    return [f"{'both sides are' if len(sides) > 1 else sides[0]} suspect"] if sides else []


def _beside(snapshot: Snapshot, pair: Pair) -> list[str]:
    """Say that threads computed beside the steps of one side alone: what moved there is not saved."""
    attempts = {job.id: job.recorded for side in pair.both for job in side.jobs if job.recorded is not None}
    if len(attempts) > MAX_DOUBTFUL:  # not all verdicts would be read
        return []
    units = [
        unit
        for unit, verdict in unit_verdicts(snapshot, attempts).items()
        if any(check["name"] == THREADS for check in verdict.get("checks", ()))
    ]
    sides = []
    for side in pair.both:
        jobs = {job.id for job in side.jobs}
        if any(job in jobs and (side.units is None or at in side.units) for job, at in units):
            sides.append(side.name)
    if len(sides) != 1:
        return []
    return [f"in the {sides[0]} alone threads computed beside the steps, and only what a step waits for is timed"]


def _check_metrics(requested: Sequence[str], known: Mapping[str, str]) -> None:
    for metric in requested:
        if metric not in known and known:
            raise InvalidRequest.at("/metric", f"{metric!r} is none of these jobs' metrics: {', '.join(known)}.")


def _notes(
    pair: Pair, differences: Sequence[Difference], of_environments: Sequence[EnvironmentDifference]
) -> list[str]:
    """Return the sentences that stand below the table."""
    notes = [_in_turns(pair.baseline.jobs[0].spec.get("seed")) if pair.alternated else NOT_ALTERNATED]
    if not pair.alternated and (_same_jobs(*pair.both) or all(job.kind == COUNTED for job in pair.baseline.jobs)):
        notes = []  # the sentence above the table says it, or the host has no part in the numbers
    if differences:
        notes.append(
            f"They differ in {case_text({difference.name: _change(difference) for difference in differences})}."
        )
    if of_environments:
        notes.append(
            f"Their environments differ: {'; '.join(difference.in_words() for difference in of_environments)}."
        )
    for side in pair.both:
        for job in side.jobs:
            if job.stopped is not None and not (pair.alternated and any(case.partial for case in side.cases)):
                notes.append(f"The {side.name}, job {job.id}, did not succeed ({job.stopped}): it has no numbers.")
        if all(job.stopped is None for job in side.jobs) and side.validity not in (None, VERDICTS[0]):
            which = f"job {side.jobs[0].id}" if len(side.jobs) == 1 else f"of {len(side.jobs)} jobs"
            notes.append(f"The {side.name}, {which}, is {side.validity}; its verdict says why.")
    return notes


def _how_to_confirm(pair: Pair, *, is_same_work: bool) -> str:
    """Say what measures both sides in turns: a command, if there is one."""
    if is_same_work:
        return "both have the same spec and the same code, which cannot take turns with itself; measure them again"
    ones, others = (",".join(str(job.id) for job in side.jobs) for side in pair.both)
    if pair.baseline.baseline is not None:
        ids = others.replace(",", " ")
        return f"flopwatch check --baseline {pair.baseline.baseline} {ids} --alternate measures both in turns"
    if "," in ones or "," in others:
        return findings.IN_TURNS
    return f"flopwatch compare {ones} {others} --alternate measures both in turns"


def _in_turns(seed: int | None) -> str:
    """Say how the order of the turns came about; without a seed, an earlier release has fixed it."""
    return f"{ALTERNATED}." if seed is None else f"{ALTERNATED}, in an order drawn from seed {seed}."


def _unlabelled(differences: Sequence[Difference], kind: str) -> list[Difference]:
    """Where a label differs, leave out what it stands for and, beside a step or model of one's own, what has no effect
    there."""
    labels = KINDS[kind].labels if kind in KINDS else {}
    differing = labels.keys() & {difference.name for difference in differences}
    if not differing:
        return list(differences)
    behind = {name for label in differing for name in labels[label]}
    has_own = any(its.name.startswith(("step_code.", "code.")) for its in differences)
    used = (its for its in differences if not (has_own and None in (its.baseline, its.candidate)))
    return [its for its in used if its.name not in behind]


def _same_jobs(*sides: Side) -> str | None:
    """Say that both sides are the same jobs; None if they are not."""
    ones, others = ({job.id for job in side.jobs} for side in sides)
    if ones != others:
        return None
    named = f"job {min(ones)}" if len(ones) == 1 else f"the same {len(ones)} jobs"
    return f"both sides are {named}, so there is nothing to compare"


def _change(difference: Difference) -> str:
    return ARROW.join(map(value_text, (difference.baseline, difference.candidate)))


def _differences(baseline: Side, candidate: Side) -> list[Difference]:
    """Return the coordinates that have one value on each side, and another one on the other side."""
    if not baseline.cases or not candidate.cases:
        return []
    sides = (baseline, candidate)
    names = dict.fromkeys(name for side in sides for case in side.cases for name in case.coordinates)
    differences = []
    for name in names:
        ours, theirs = ({repr(in_use(case.coordinates.get(name))) for case in side.cases} for side in sides)
        if len(ours) == len(theirs) == 1 and ours != theirs and name != "side":
            differences.append(Difference(name, *(side.cases[0].coordinates.get(name) for side in sides)))
    return differences


def _apart(pair: Pair) -> set[str]:
    """Return the coordinates that matching ignores."""
    apart = {*(its.name for its in _differences(*pair.both)), "side", VERSION}  # versions of one case meet
    devices = {case.coordinates.get("device") for side in pair.both for case in side.cases} - {None}
    # a case that was not measured, which has no device, is matched with the one that was
    return apart | {"device"} if len(devices) == 1 else apart


def _rows(pair: Pair, requested: Sequence[str]) -> list[ComparedMetric]:
    """Return a row for each metric of each case."""
    baseline, candidate = pair.both
    fastest, remedy = pair.takes_fastest, _remedy(pair)
    blocks = blocks_of_turns(planned_processes(baseline.jobs[0].spec)) if pair.alternated else ()
    apart = _apart(pair)
    ones, others = _matched(baseline, apart), _matched(candidate, apart)
    keys = list(dict.fromkeys([*ones, *others]))
    either = {**others, **ones}
    if candidate.joins is not None:  # the place of a row is the candidate's
        either |= {key: case for key, case in others.items() if case.coordinates.get("device") is not None}
    shown = [name for name in coordinates_of([either[key] for key in keys], None) if name not in apart]
    varying = [name for name in shown if len({repr(either[key].show(name)) for key in keys}) > 1]
    units = {**candidate.metrics, **baseline.metrics}
    metrics = list(requested) or list(dict.fromkeys([*baseline.metrics, *candidate.metrics]))
    kinds = {case.tabled_as[-1] for case in either.values()}
    rows = []
    for key in keys:
        cases = (ones.get(key), others.get(key))
        place = {name: either[key].show(name) for name in shown}
        words = case_text({name: place[name] for name in varying})
        case_keys = {case.key for case in cases if case is not None}
        case_key = case_keys.pop() if len(case_keys) == 1 else None
        verdicts = (_verdict(cases[0]), _verdict(cases[1]))
        for metric in metrics:
            values = process_values(cases, metric, fastest=fastest)
            rate = is_rate(metric, units.get(metric))
            one, other = (_cell(case, rows, rate=rate) for case, rows in zip(cases, values.sides, strict=True))
            numbers = (_values(values.sides[0], one), _values(values.sides[1], other))
            if one.value is None and other.value is None and {one.outcome, other.outcome} <= {None, "unknown"}:
                continue
            row = findings.Row(
                case=words,
                metric=metric,
                unit=units.get(metric, ""),
                cells=(one, other),
                verdicts=verdicts,
                baseline=numbers[0],
                candidate=numbers[1],
                blocks=blocks if {sum(blocks)} == set(map(len, numbers)) else (),
                statistic=values.statistic,
                samples=values.samples,
                witnesses=values.witnesses,
                cut_from=values.cut_from,
                unequal=values.unequal,
                is_computed=candidate.is_computed and baseline.is_computed,
                is_counted=kinds == {COUNTED} and units.get(metric) == "MiB",
                remedy=remedy,
            )
            rows.append(ComparedMetric(place, case_key, row))
    return rows


def _matched(side: Side, apart: Collection[str]) -> dict[str, CaseOfJob]:
    """Return the side's cases by the keys that match them: those of `joins`, else the coordinates but `apart`."""
    alike: dict[str, list[CaseOfJob]] = {}
    for case in side.cases:
        for key in _keys(side, case, apart):
            alike.setdefault(key, []).append(case)
    return {key: _pooled(cases) for key, cases in alike.items()}


def _keys(side: Side, case: CaseOfJob, apart: Collection[str]) -> Sequence[str]:
    return [repr(sorted(_known(case, apart)))] if side.joins is None else joins_of(side, case)


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


def _remedy(pair: Pair) -> Callable[[int], str | None]:
    """Return `findings.Row.remedy` of these jobs; there is none for several jobs of a side, and for a baseline."""
    jobs = list(dict.fromkeys(job.id for side in pair.both for job in side.jobs))
    if pair.baseline.baseline is not None or len(jobs) != (1 if pair.alternated else 2):
        return lambda _: None
    kind = next((case.tabled_as[-1] for side in pair.both for case in side.cases), "")
    fields = KINDS[kind].model_fields if kind in KINDS else {}

    def command(processes: int) -> str | None:
        if processes > MAX_REPLICATES:
            return None
        if not pair.alternated and "replicates" not in fields:
            return f"flopwatch compare {' '.join(map(str, jobs))} --alternate --replicates {processes}"
        return " && ".join(f"flopwatch rerun {job} replicates={processes}" for job in jobs)

    return command


def _cell(case: CaseOfJob | None, rows: Sequence[Any], *, rate: bool) -> Cell:
    """Return the median of processes' values. A job that did not succeed has no numbers in a comparison."""
    if case is None:
        return NOT_MEASURED
    return Cell(*summarise(rows, case.planned_processes, case.stopped, "median", rate=rate)[:4], case.job)


def _verdict(case: CaseOfJob | None) -> str | None:
    if case is None:
        return None
    if case.stopped is None and any(row.outcome == "wrong" for rows in case.processes.values() for row in rows):
        return "wrong"
    return case.validity()


def _values(rows: Sequence[Any], cell: Cell) -> list[float]:
    """Return the value of each process, in the order in which they ran; nothing if one of them has none."""
    if cell.value is None:
        return []
    return [value for row in rows if (value := finite(row.value)) is not None]


def _known(case: CaseOfJob, apart: Collection[str]) -> list[tuple[str, Scalar]]:
    used = {name: in_use(value) for name, value in case.coordinates.items() if name not in apart}
    return [(name, value) for name, value in used.items() if value is not None]
