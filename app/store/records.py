"""Plain frozen values that go into the queue and come out of it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from app.specs._base import SpecBase
from app.specs._schema import SCHEMA

MAX_LABELS = 64


@dataclass(frozen=True)
class NewJob:
    """A job to submit; `timeout_s` is in seconds, None means no limit. The fields beside `spec` and `notify_url` are
    columns of the table `job`."""

    spec: SpecBase
    name: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    priority: int = 0
    timeout_s: float | None = None
    max_attempts: int = 2
    point: dict[str, int] | None = None
    """For a sweep's job: the index of its value on each path of the grid."""
    unique_key: str | None = None
    """Of the jobs with this key, at most one is queued or running."""
    submitted_by: str | None = None
    notify_url: str | None = None
    """The address that is told its end; a row of the table `webhook`."""

    @property
    def options(self) -> dict[str, Any]:
        """Return the options that a sweep keeps beside specs, labels and name, so that it can submit more such jobs."""
        names = ("priority", "timeout_s", "max_attempts", "submitted_by")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Idempotency:
    """A request's Idempotency-Key, its route, and a digest of its canonical body."""

    key: str
    route: str
    digest: str
    awaits: bool = False
    """True if the request waits for the job's end; its answer is the job at that time."""


@dataclass(frozen=True)
class Submitted:
    """The public job or sweep of the first answer; `replayed` when this was not the first request with its key."""

    response: dict[str, Any]
    replayed: bool
    awaited: bool = False
    """True if the first answer has not been sent yet: its request waits, or waited until it broke off."""


@dataclass(frozen=True)
class Offer:
    """The jobs that a worker can take now."""

    kinds: frozenset[str]
    capabilities: frozenset[str]
    total_gpus: int
    free_gpus: int
    idle: bool
    """True if no job that uses a device runs on its host."""
    deviceless: bool = True
    """True if the worker takes a job of device type `none` now, beside its other jobs."""
    schema_number: int = SCHEMA
    """Number of the specs' schema that the worker reads."""


@dataclass(frozen=True)
class Claim:
    """A job that a worker has claimed. (job_id, attempt, token) is the fence of all that the worker writes about it."""

    job_id: int
    attempt: int
    """The attempt's number, from 1."""
    token: str
    attempt_id: int
    worker_id: str
    kind: str
    name: str | None
    spec: dict[str, Any]
    timeout_s: float | None
    device_type: str
    devices: int
    exclusive_host: bool
    sweep_id: int | None = None
    submitted_by: str | None = None


@dataclass(frozen=True)
class HandedOver:
    """A claim that one worker hands over to another, which takes it over before it does anything about it."""

    job_id: int
    attempt: int
    token: str


@dataclass(frozen=True)
class NewEvent:
    """An event of a job: `progress` {"done", "total", "message"}, and "cell" if one is finished, `log` {"text"}, …"""

    type: str
    data: dict[str, Any]


@dataclass(frozen=True)
class MeasurementRecord:
    """One metric of one case; the statistics are None where `outcome` is not "ok"."""

    unit_index: int
    case: dict[str, Any]
    case_key: str
    device_key: str
    validity: str | None
    phase: str | None
    metric: str
    unit: str
    outcome: str
    reason: str | None
    n: int | None
    mean: float | None
    std: float | None
    median: float | None
    min: float | None
    max: float | None
    p05: float | None
    p25: float | None
    p75: float | None
    p95: float | None
    samples: bytes | None
    """Little-endian float64, zlib."""
    median_low: float | None = None
    """The interval of the median, as `flopwatch.intervals.median_interval` has it."""
    median_high: float | None = None


@dataclass(frozen=True)
class UnitRecord:
    """One unit of an attempt. `outcome` is "succeeded" or the code of what ended it."""

    unit_index: int
    title: str
    outcome: str
    side: str | None = None
    reason: str | None = None
    environment: dict[str, Any] | None = None
    validity: dict[str, Any] | None = None


@dataclass(frozen=True)
class TableRecord:
    """A table that a unit reported; `columns` are {"name", "type", "unit"}."""

    unit_index: int
    name: str
    columns: list[dict[str, Any]]
    row_count: int
    rows: bytes
    """A JSON array of arrays, zlib."""


@dataclass(frozen=True)
class StoredArtifact:
    """A file that FileStore.put has stored; `size` in bytes."""

    unit_index: int
    name: str
    kind: str
    media_type: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Finish:
    """The end of an attempt: its state and all its results. A failed attempt has an `error` (app.errors.job_problem);
    the queue gives a cancelled one its own.

    Raises:
        ValueError: the ending is impossible, or the attempt has two units with one index, two tables of one name in a
            unit, or two artifacts of one name.
    """

    state: Literal["succeeded", "failed", "cancelled"]
    error: dict[str, Any] | None = None
    measurements: Collection[MeasurementRecord] = ()
    tables: Sequence[TableRecord] = ()
    units: Sequence[UnitRecord] = ()
    artifacts: Sequence[StoredArtifact] = ()
    environment: dict[str, Any] | None = None
    validity: dict[str, Any] | None = None
    log: str | None = None

    def __post_init__(self) -> None:
        if self.state not in ("succeeded", "failed", "cancelled"):
            raise ValueError(f"an attempt cannot end as {self.state!r}")
        if self.state == "failed" and self.error is None:
            raise ValueError("a failed attempt has an error")
        if self.state == "succeeded" and self.error is not None:
            raise ValueError("an attempt with an error has not succeeded")


@dataclass(frozen=True)
class Renewal:
    """The result of a heartbeat: the ids of the attempts that the worker has lost, and of the jobs that a user asked to
    cancel."""

    lost: frozenset[int]
    cancel_requested: frozenset[int]
    knows_worker: bool = True
    """False if the worker's row was pruned, since it was silent for so long: it must register again."""
    server: dict[str, Any] | None = None
    """What the newest server is (see registration.py)."""


@dataclass(frozen=True)
class RunningAttempt:
    """A running attempt, with its heartbeat counter as a watcher reads it."""

    attempt_id: int
    job_id: int
    attempt: int
    beat: int
