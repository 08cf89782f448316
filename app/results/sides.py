"""The two sides of a comparison: reads their jobs, cases, environments and specs."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import ValidationError

from app.errors import Conflict, InvalidRequest
from app.results.cases import CaseOfJob, cases_of
from app.results.environments import VERSION, Setup
from app.results.inference import FEWEST
from app.specs import Scalar, spec_adapter
from app.states import VERDICTS, worst
from app.store.database.engine import Snapshot
from app.store.keeping.baselines import BaselineCase, cases_of_baseline
from app.store.reading import measurements
from app.store.reading.measurements import FinishedJob, JobChoice

SideName = Literal["baseline", "candidate"]
SIDES: tuple[SideName, SideName] = ("baseline", "candidate")

Place = tuple[str | None, Scalar]
"""The key of a case, and the device that measured it; None: nothing was measured, so no device is known."""


@dataclass(frozen=True)
class Side:
    """One of the two that are compared: one job, several, or a part of one."""

    name: SideName
    jobs: Sequence[FinishedJob]
    cases: Sequence[CaseOfJob]
    metrics: Mapping[str, str]
    """The unit of each metric's column."""
    units: frozenset[int] | None
    """Indexes of the side's units; None: all of the job."""
    setup: Setup
    baseline: str | None = None
    """The name of the baseline that the side is."""
    joins: Mapping[Place, Sequence[str]] | None = None
    """The keys by which the case of a place is matched: cases of both sides that share a key. None: cases are matched
    by their coordinates."""

    @property
    def validity(self) -> str | None:
        """The worst verdict of the side's cases."""
        return worst({case.validity() for case in self.cases})

    @property
    def most_processes(self) -> int:
        """The largest number of processes of a case, in all jobs that measured it."""
        numbers: Counter[tuple[Place, str]] = Counter()
        for case in self.cases:
            for metric, rows in case.processes.items():
                numbers[_place_of(case), metric] += len(rows)
        return max(numbers.values(), default=0)

    @property
    def is_computed(self) -> bool:
        """True if formulas gave all of its values."""
        specs = [job.spec if self.units is None else job.spec.get(self.name, {}) for job in self.jobs]
        return all(spec.get("kind") == "estimate" for spec in specs)

    def as_json(self) -> dict[str, Any]:
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
            "processes": self.most_processes,
            "url": first and f"/jobs/{first.id}",
        }


@dataclass(frozen=True)
class Pair:
    """Both sides of a comparison."""

    baseline: Side
    candidate: Side
    alternated: bool = False
    """True if fresh processes of one job measured both sides in turns."""
    other_devices: Sequence[tuple[Scalar, Scalar]] = ()
    """Pairs of different devices of matched cases, which cannot be compared."""
    further: Sequence[str] = ()
    """Further clauses of the sentence, such as what has no counterpart in a baseline, or in the candidate."""

    @property
    def both(self) -> tuple[Side, Side]:
        return self.baseline, self.candidate

    @property
    def takes_fastest(self) -> bool:
        """True if processors measured both sides, in enough processes for a test. Then a process's value of a time is
        its fastest sample.

        What else runs on the host only ever lengthens samples, those of one process more than those of another: the
        fastest ones say most of the code (Chen & Revels, Robust benchmarking in noisy environments, 2016).
        """
        environments = [facts for side in self.both for facts in side.setup.environments]
        processes = min(side.most_processes for side in self.both)
        return {facts.get("device.type") for facts in environments} == {"cpu"} and processes >= FEWEST


def sides_of_jobs(snapshot: Snapshot, baseline: Sequence[int], candidate: Sequence[int]) -> Pair:
    """Read two finished jobs of one kind, or two sets of them. Errors as those of `comparing.compare`."""
    ones, others = (_finished(snapshot, jobs) for jobs in (baseline, candidate))
    _check_kinds(ones, others)
    pair = Pair(_side(snapshot, "baseline", ones), _side(snapshot, "candidate", others))
    _check_jobs(pair)
    _check_releases(pair)
    return _with_unequal_samples(snapshot, pair)


def sides_of_job(snapshot: Snapshot, job_id: int) -> Pair:
    """Read the sides of a finished job of kind `compare`. Errors as those of `comparing.compare_sides`."""
    (job,) = _finished(snapshot, [job_id])
    if not job.has_sides:
        detail = f"Job {job_id} is of kind {job.kind}, no comparison: pass two jobs, as baseline and candidate."
        raise InvalidRequest.at("/job", detail)
    whole = _side(snapshot, "baseline", [job])
    side_of_unit = measurements.sides(snapshot, [job])
    baseline, candidate = (
        replace(
            whole,
            name=name,
            cases=[case for case in whole.cases if case.coordinates.get("side") == name],
            units=frozenset(unit for (_, _, unit), side in side_of_unit.items() if side == name),
            setup=Setup.read(snapshot, [job], name),
        )
        for name in SIDES
    )
    return _with_unequal_samples(snapshot, Pair(baseline, candidate, alternated=True))


def sides_of_baseline(snapshot: Snapshot, name: str, candidate: Sequence[int]) -> Pair:
    """Read finished jobs of one kind, and the results that a baseline has of their cases: matched by key and device,
    or, where it has a case on other devices only, with those. Errors as those of `comparing.compare`."""
    others = _finished(snapshot, candidate)
    _check_kinds(others)
    side = _side(snapshot, "candidate", others)
    side = replace(side, cases=[case for job in others for case in _with_planned(job, side.cases)])
    kept = cases_of_baseline(snapshot, name)
    places = list(dict.fromkeys(_place_of(case) for case in side.cases))
    matched = _matched_devices({(kept_case.case_key, kept_case.device_key) for kept_case in kept}, places)
    chosen = {(key, device) for (key, _), devices in matched.items() for device in devices}
    ones = _finished(
        snapshot,
        sorted({kept_case.job_id for kept_case in kept if (kept_case.case_key, kept_case.device_key) in chosen}),
    )
    whole = _side(snapshot, "baseline", ones)
    of_baseline = {(kept_case.job_id, kept_case.case_key, kept_case.device_key) for kept_case in kept}
    cases = [case for case in whole.cases if (case.job, *_place_of(case)) in of_baseline and _place_of(case) in chosen]
    keys, known = {key for key, _ in places}, {case.key for case in cases}
    unmatched = []
    if new := keys - known:
        unmatched.append(f"{len(new)} of {len(keys)} cases are not in the baseline {name}, and have nothing to meet")
        side = replace(side, cases=[case for case in side.cases if case.key in known])
    if lacking := _lacking(kept, {job.id for job in ones}, keys):
        unmatched.append(lacking)
    joins: dict[SideName, dict[Place, list[str]]] = {name: {} for name in SIDES}
    for (key, device), devices in matched.items():
        for other in devices:
            join = json.dumps([key, device, other])
            joins["candidate"].setdefault((key, device), []).append(join)
            joins["baseline"].setdefault((key, other), []).append(join)
    pair = Pair(
        replace(whole, cases=cases, baseline=name, joins=joins["baseline"]),
        replace(side, joins=joins["candidate"]),
        other_devices=[
            (other, device) for (_, device), devices in matched.items() for other in devices if device != other
        ],
        further=unmatched,
    )
    _check_jobs(pair)
    return _with_unequal_samples(snapshot, pair)


def _lacking(kept: Sequence[BaselineCase], jobs: Collection[int], keys: Collection[str | None]) -> str | None:
    """Say how many cases of these jobs of the baseline, and of the other jobs of their sweeps, have other keys."""
    sweeps = {case.sweep_id for case in kept if case.job_id in jobs} - {None}
    of_jobs = {case.case_key for case in kept if case.job_id in jobs or case.sweep_id in sweeps}
    lacking = of_jobs.difference(keys)
    return f"{len(lacking)} of {len(of_jobs)} cases of the baseline were not measured" if lacking else None


def _check_jobs(pair: Pair) -> None:
    """Raise InvalidRequest if a job is on both sides among others, where a difference would be halved and seem certain;
    or if a side has several versions of one's code, whose numbers are no samples of one."""
    ones, others = ({job.id for job in side.jobs} for side in pair.both)
    if ones != others and (shared := ones & others):
        detail = f"Job {min(shared)} is on both sides, and does not differ from itself: leave it out of one."
        raise InvalidRequest.at("/candidate", detail)
    for side in pair.both:
        first: dict[Place, CaseOfJob] = {}
        for case in side.cases:
            other = first.setdefault(_place_of(case), case)
            if other.coordinates.get(VERSION) != case.coordinates.get(VERSION):
                detail = (
                    f"Jobs {other.job} and {case.job} of the {side.name} ran other versions of the same code: compare "
                    "one with the other, or name jobs of one version."
                )
                if other.job == case.job:  # of kind `compare`
                    detail = f"Job {case.job} ran two versions of the code: flopwatch compare {case.job} compares them."
                raise InvalidRequest.at(f"/{side.name}", detail)


def _check_releases(pair: Pair) -> None:
    """Raise InvalidRequest if release 0.1.0, in which the hash of uploaded code was a coordinate, measured one side."""
    of_0_1_0 = [any(name.endswith(".sha256") for case in side.cases for name in case.coordinates) for side in pair.both]
    if of_0_1_0[0] != of_0_1_0[1]:
        side = pair.both[of_0_1_0.index(True)]
        detail = f"Release 0.1.0, which names uploaded code otherwise, measured the {side.name}: measure it again."
        raise InvalidRequest.at(f"/{side.name}", detail)


def _with_unequal_samples(snapshot: Snapshot, pair: Pair) -> Pair:
    """Return both sides with the samples of metrics whose processes have different numbers of them."""
    cases = [*pair.baseline.cases, *pair.candidate.cases]
    rows = [row for case in cases for rows in case.processes.values() for row in rows]
    if unequal := _unequal(rows):
        jobs = list({job.id: job for side in pair.both for job in side.jobs}.values())
        samples = measurements.packed_samples(snapshot, jobs, unequal)
        cases = [_with_samples(case, samples) for case in cases]
    number = len(pair.baseline.cases)
    return replace(
        pair,
        baseline=replace(pair.baseline, cases=cases[:number]),
        candidate=replace(pair.candidate, cases=cases[number:]),
    )


def _unequal(rows: Iterable[Any]) -> set[tuple[str, str | None]]:
    numbers: dict[tuple[str, str | None], set[int]] = {}
    for row in rows:
        if row.n is not None:
            numbers.setdefault((row.metric, row.phase), set()).add(row.n)
    return {metric for metric, of_metric in numbers.items() if len(of_metric) > 1}


def _with_samples(case: CaseOfJob, samples: Mapping[measurements.Key, bytes]) -> CaseOfJob:
    processes = {
        name: [row._replace(samples=samples.get(measurements.key_of(row))) for row in rows]
        for name, rows in case.processes.items()
    }
    return replace(case, processes=processes)


def _side(snapshot: Snapshot, name: SideName, jobs: Sequence[FinishedJob]) -> Side:
    measured = measurements.measurements(snapshot, jobs, "median", compared=True)
    side_of_unit = measurements.sides(snapshot, jobs)
    cases, metrics = cases_of(jobs, measured, lambda row: side_of_unit.get((row.job_id, row.attempt, row.unit_index)))
    return Side(name, jobs, cases, metrics, None, Setup.read(snapshot, jobs))


def _place_of(case: CaseOfJob) -> Place:
    return case.key, case.coordinates.get("device")


def joins_of(side: Side, case: CaseOfJob) -> Sequence[str]:
    """Return the keys by which a case of a side with `joins` is matched."""
    assert side.joins is not None
    return side.joins.get(_place_of(case), ())


def _matched_devices(kept: Collection[tuple[str, str]], places: Iterable[Place]) -> dict[Place, list[str]]:
    """Return, for each case of the candidate, the baseline's devices with the same key whose results it is matched
    with. These are its own device or, without results there, all others. A case without a device, since nothing was
    measured, gets the devices that no other case of its key is matched with."""
    by_key: dict[str | None, list[str]] = {}
    for case_key, device_of_baseline in sorted(kept):
        by_key.setdefault(case_key, []).append(device_of_baseline)
    matched: dict[Place, list[str]] = {place: [] for place in places}
    for key, device in matched:
        devices = by_key.get(key, [])
        if device is None:
            matched[key, device] = [unmatched for unmatched in devices if (key, unmatched) not in matched] or devices
        else:
            matched[key, device] = [device] if device in devices else devices
    return matched


def _with_planned(job: FinishedJob, cases: Sequence[CaseOfJob]) -> list[CaseOfJob]:
    """Return the job's cases; of one that measured nothing, those of its spec, with the reason for no numbers."""
    of_job = [case for case in cases if case.job == job.id]
    if any(case.key is not None for case in of_job) or not of_job:
        return of_job
    try:
        planned = spec_adapter.validate_json(json.dumps(job.spec)).cases()
    except (ValidationError, ValueError):  # the spec is of another version, or a comparison, which has no cases
        return of_job
    return [replace(of_job[0], coordinates=dict(its.coordinates), key=its.key) for its in planned]


def _check_kinds(*sides: Sequence[FinishedJob]) -> None:
    first = sides[0][0]
    for job in (job for side in sides for job in side):
        if job.kind != first.kind:
            kinds = f"job {first.id} is of kind {first.kind}, job {job.id} of kind {job.kind}"
            raise InvalidRequest.at("/candidate", f"Compare jobs of one kind: {kinds}.")


def _finished(snapshot: Snapshot, wanted: Sequence[int]) -> list[FinishedJob]:
    """Return these jobs, in this order. Raises NotFound, and Conflict if one is not finished."""
    if not wanted:
        return []
    chosen = measurements.choose_jobs(snapshot, JobChoice(jobs=wanted))
    finished = {job.id: job for job in chosen}
    for job_id in wanted:
        if job_id not in finished:
            raise Conflict(f"Job {job_id} is not finished: wait for its end, then compare.")
    return [finished[job_id] for job_id in wanted]
