"""The shapes of answers that are no dataclasses of the store or the results, for /openapi.json."""

from typing import Any, Generic, Literal, TypeVar

from typing_extensions import TypedDict

from app.results.environments import Difference, EnvironmentDifference
from app.results.findings import Conclusion, Gate
from app.states import JobState
from app.store.public import Time
from app.store.queue.fitting import TriedValue


class Progress(TypedDict):
    done: int
    total: int
    message: str


class Job(TypedDict):
    id: int
    kind: str
    name: str | None
    labels: dict[str, str]
    note: str | None
    submitted_by: str | None
    state: JobState
    spec: dict[str, Any]
    summary: dict[str, Any]
    priority: int
    attempt: int
    max_attempts: int
    timeout_s: float | None
    progress: Progress
    error: dict[str, Any] | None
    worker_id: str | None
    sweep_id: int | None
    unique_key: str | None
    created_at: Time
    started_at: Time | None
    finished_at: Time | None
    cancel_requested_at: Time | None
    waiting: str | None
    outcome: Literal["oom"] | None
    """`oom` if it succeeded, and its only case ran out of memory."""
    environment: dict[str, Any] | None
    validity: dict[str, Any] | None
    broken: dict[str, Any] | None
    without_effect: list[str] | None
    """Fields of the spec that change nothing in this job; null in lists."""
    links: dict[str, str]


class DryRun(TypedDict):
    jobs: int
    """Jobs that the same request without `dry_run` submits at once; with `fit`, one for each search."""
    most_jobs: int
    """Jobs that it may submit in all: with `fit`, those of the longest searches."""
    without_effect: list[str]
    """Fields that change nothing in any of the jobs that `jobs` counts."""


class Attempt(TypedDict):
    number: int
    worker_id: str
    state: str
    error: dict[str, Any] | None
    started_at: Time
    finished_at: Time | None
    links: dict[str, str]


class Event(TypedDict):
    id: int
    job_id: int
    attempt: int
    type: str
    data: dict[str, Any]
    created_at: Time


class Artifact(TypedDict):
    name: str
    kind: str
    media_type: str
    size: int
    sha256: str
    attempt: int
    unit_index: int
    unit_title: str | None
    url: str


class Column(TypedDict):
    name: str
    type: str
    unit: str | None


class Measurements(TypedDict):
    columns: list[Column]
    rows: list[dict[str, Any]]
    next: str | None


class Table(Measurements):
    missing: list[str]
    notes: list[str]


class SweepTable(Measurements):
    missing: list[str]


class ComparedSide(TypedDict):
    name: str | None
    job: int | None
    jobs: list[int]
    kind: str | None
    state: str | None
    validity: str | None
    verdicts: dict[str, int]
    processes: int
    url: str | None


class ComparedProcesses(TypedDict):
    row: int
    baseline: list[float]
    candidate: list[float]


class Agreement(TypedDict):
    relative_difference: float | None
    names: list[str]
    steps: int
    last_step: int
    work_differs: list[str]
    expect_equal: float | None
    outcome: Literal["passed", "wrong", "missing", "inconclusive", "invalid", "not_comparable"] | None
    sentence: str


class Comparison(Measurements):
    sentence: str
    conclusion: Conclusion
    headline: str | None
    agreement: Agreement | None
    alternated: bool
    gate: Gate | None
    baseline: ComparedSide
    candidate: ComparedSide
    differences: list[Difference]
    spec_differences: list[Difference]
    environment_differences: list[EnvironmentDifference]
    distributions: list[ComparedProcesses]
    notes: list[str]


class Baseline(TypedDict):
    name: str
    created_at: Time
    updated_at: Time
    set_by: str | None
    number_of_cases: int
    jobs: list[int]
    sweeps: list[int]
    links: dict[str, str]


class CaseOfBaseline(TypedDict):
    case_key: str
    device_key: str
    kind: str
    case: str
    validity: str | None
    jobs: list[int]


class BaselineOfCases(Baseline):
    cases: list[CaseOfBaseline]


class JobAndWhy(TypedDict):
    job: int
    why: str


class PutBaseline(Baseline):
    left_out: list[JobAndWhy]
    suspect: list[JobAndWhy]


class ReportedTable(TypedDict):
    name: str
    answers: bool
    columns: list[Column]
    rows: int
    units: list[int]
    partial: bool
    url: str


class NamedPlot(TypedDict):
    name: str
    title: str
    url: str


class Picture(TypedDict):
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    title: str
    caption: str


class FileOfUnit(TypedDict):
    name: str
    url: str


class Unit(TypedDict):
    attempt: int
    unit_index: int
    title: str
    side: str | None
    outcome: str
    reason: str | None
    partial: bool
    environment: dict[str, Any] | None
    validity: dict[str, Any] | None
    artifacts: list[FileOfUnit]


class Search(TypedDict):
    point: dict[str, Any]
    axis: str
    state: str
    reason: str | None
    resumable: bool
    largest: int | None
    largest_job: int | None
    too_large: int | None
    too_large_job: int | None
    tried: list[TriedValue]


class Sweep(TypedDict):
    id: int
    name: str | None
    labels: dict[str, str]
    base: dict[str, Any]
    grid: dict[str, list[Any]]
    exclude: list[dict[str, Any]]
    options: dict[str, Any]
    fit: dict[str, Any] | None
    searches: list[Search] | None
    created_at: Time
    broken: dict[str, Any] | None
    counts: dict[str, int]
    links: dict[str, str]


class CodeFile(TypedDict):
    sha256: str
    size: int
    url: str


class Used(TypedDict):
    """Device hours of attempts that ended."""

    user: str | None
    kind: str
    device: str
    attempts: int
    device_hours: float


class Standing(TypedDict):
    """A user who competes now. `recent_device_hours` count in the order of jobs; null if all are one user."""

    user: str | None
    recent_device_hours: float | None
    running_devices: int
    queued_jobs: int


class Usage(TypedDict):
    since: str
    data: list[Used]
    now: list[Standing]
    next: None


class Unfit(TypedDict):
    code: str
    reason: str
    since: Time
    next_try_at: Time | None


class Worker(TypedDict):
    id: str
    hostname: str
    pid: int
    state: str
    unfit: Unfit | None
    kinds: list[str]
    capabilities: list[str]
    devices: list[Any]
    versions: dict[str, Any]
    readings: dict[str, Any] | None
    broken: dict[str, Any] | None
    job_ids: list[int]
    registered_at: Time
    last_seen_at: Time


class Token(TypedDict):
    id: str
    name: str
    scope: str
    created_at: Time
    expires_at: Time | None
    last_used_at: Time | None


class NewToken(Token):
    token: str


Item = TypeVar("Item")


class Page(TypedDict, Generic[Item]):
    data: list[Item]
    next: str | None
